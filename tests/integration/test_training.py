"""Training on several ranks against one process that sees the concatenated batch.

In float64 the two differ by nothing but the order of sums: a relative 1e-9 after a few steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt

STEPS = 5
BATCH = 6
RANKS = 2

Optimizers = Callable[["Model"], list[torch.optim.Optimizer]]


class Model(nn.Module):
    """Both kinds of sparse embeddings, dense layers, and two layers that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True)
        self.bag = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
        self.hidden = nn.Linear(8, 16)
        self.rare = nn.Embedding(30, 16, sparse=True)
        self.extra = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, ids: Tensor, use_extra: bool) -> Tensor:
        both = torch.cat([self.words(ids).sum(1), self.bag(ids % 40)], dim=1)
        hidden = torch.tanh(self.hidden(both))
        if use_extra:
            hidden = hidden + self.extra(hidden) + self.rare(ids[:, 0] % 30)
        result: Tensor = self.out(hidden)
        return result

    def sparse(self) -> list[nn.Parameter]:
        return [self.words.weight, self.bag.weight, self.rare.weight]

    def dense(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if all(p is not sparse for sparse in self.sparse())]


def make_model() -> Model:
    torch.manual_seed(7)
    return Model().double()


def loss_of(model: Model, step: int, rank: int, part: int = 0) -> Tensor:
    """Rank r's loss; rank 0 alone uses ``extra`` and ``rare``, and nobody ``never``."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    # Skewed, so that batches repeat ids and ranks share some.
    ids = (50 * torch.rand((BATCH, 3), generator=generator) ** 2).long()
    wanted = torch.randn((BATCH, 1), generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(ids, use_extra=rank == 0), wanted)


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.3)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    "sparse adam and adam": lambda model: [
        torch.optim.SparseAdam(model.sparse(), lr=0.05),
        # A decay would change `never`, if it ever got a gradient.
        torch.optim.AdamW(model.dense(), lr=0.05, weight_decay=0.1),
    ],
}


def wrap(
    model: Model, optimizers: list[torch.optim.Optimizer], **options: Any
) -> list[zps.DistributedOptimizer]:
    named = list(model.named_parameters())
    if zps.rank() == 1:
        named.reverse()
    wrapped = []
    for optimizer in optimizers:
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        mine = [(name, parameter) for name, parameter in named if parameter in own]
        wrapped.append(zps.DistributedOptimizer(optimizer, named_parameters=mine, **options))
    return wrapped


def state_of(model: Model) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# ── on the workers, and what one process does instead ───────────────────────────────────────────


def train(name: str) -> dict[str, Tensor]:
    model = make_model()
    optimizers = wrap(model, OPTIMIZERS[name](model))
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert model.never.weight.grad is None
    return state_of(model)


def train_in_one_process(name: str) -> dict[str, Tensor]:
    model = make_model()
    optimizers = OPTIMIZERS[name](model)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()
        for optimizer in optimizers:
            optimizer.step()
    return state_of(model)


def accumulate() -> dict[str, Tensor]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["adagrad"](model), backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, step, zps.rank(), part).backward()
        optimizer.step()
    return state_of(model)


def accumulate_in_one_process() -> dict[str, Tensor]:
    model = make_model()
    (optimizer,) = OPTIMIZERS["adagrad"](model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, part in itertools.product(range(RANKS), range(2)):
            (loss_of(model, step, rank, part) / RANKS).backward()
        optimizer.step()
    return state_of(model)


def sum_instead_of_average() -> dict[str, Tensor]:
    model = make_model()
    (optimizer,) = wrap(model, [torch.optim.SGD(model.parameters(), lr=0.3 / RANKS)], average=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    return state_of(model)


def clip() -> dict[str, Tensor]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["momentum"](model))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.dense(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    return state_of(model)


def clip_in_one_process() -> dict[str, Tensor]:
    model = make_model()
    (optimizer,) = OPTIMIZERS["momentum"](model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()
        nn.utils.clip_grad_norm_(model.dense(), 0.05)
        optimizer.step()
    return state_of(model)


def schedule() -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return state_of(model), rates


def schedule_in_one_process() -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    (optimizer,) = OPTIMIZERS["sgd"](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return state_of(model), rates


def use_a_closure() -> tuple[dict[str, Tensor], bool]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    returned = []
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, zps.rank())
            loss.backward()
            return loss

        returned.append(optimizer.step(closure))
    return state_of(model), all(isinstance(loss, Tensor) for loss in returned)


def watch_pushes() -> list[list[str]]:
    """For each step, what happened in which order: a push, a gradient, the end of backward."""
    from zenps.worker import optimizer as module

    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    events: list[str] = []
    push_pull_async = module.push_pull_async

    def watched(tensor: Tensor, name: str, *options: Any, **named: Any) -> Any:
        events.append("push sparse" if tensor.is_sparse else f"push {name}")
        return push_pull_async(tensor, name, *options, **named)

    module.push_pull_async = watched
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(f"gradient {name}"))
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        # Rank 0's loss on both ranks: every layer but `never` has a gradient.
        loss_of(model, step, 0).backward()
        events.append("end of backward")
        optimizer.step()
        steps.append(events[:])
        events.clear()
    module.push_pull_async = push_pull_async
    return steps


def misuse() -> dict[str, Any]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    outcomes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        if step == 1:
            outcomes["zero_grad"] = attempt(optimizer.zero_grad)
            outcomes["backward"] = attempt(loss_of(model, step, 0).backward)
        optimizer.step()
    group = {"params": [nn.Parameter(torch.ones(1))]}
    outcomes["group"] = attempt(optimizer.add_param_group, group)
    outcomes["passes"] = attempt(wrap, model, OPTIMIZERS["sgd"](model), backward_passes_per_step=0)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    outcomes["unnamed"] = attempt(zps.DistributedOptimizer, plain, list(model.named_parameters())[1:])
    twice = [("weight", parameter) for parameter in model.parameters()]
    outcomes["one name"] = attempt(zps.DistributedOptimizer, plain, twice)
    names = [(f"{name} of rank {zps.rank()}", parameter) for name, parameter in model.named_parameters()]
    outcomes["other names"] = attempt(zps.DistributedOptimizer, plain, names)
    layer = nn.Embedding(9, 2, sparse=zps.rank() == 0)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    layer(torch.tensor([1])).sum().backward()
    outcomes["other kinds"] = attempt(optimizer.step)
    return outcomes


def every_dtype(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    numbers = torch.randn(6, 5)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    dtypes += (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
    state = {str(dtype): (9 * numbers.abs()).to(dtype) for dtype in dtypes}
    state["0-dim"] = torch.tensor(rank + 1)
    state["empty"] = torch.empty(0, 3)
    state["transposed"] = torch.randn(6, 5).t()
    state["special"] = torch.tensor([float("nan"), -0.0, float("inf")]) * (1 - 2 * rank)
    state["large"] = torch.randn(100_003)
    state["large bool"] = torch.rand(200_001) < 0.5
    return state


def broadcast() -> dict[str, Any]:
    state = every_dtype(zps.rank())
    zps.broadcast_parameters(state, root_rank=1)
    model = make_model() if zps.rank() == 1 else Model().double()
    zps.broadcast_parameters(model.named_parameters(), root_rank=1)
    again = every_dtype(zps.rank())
    zps.broadcast_parameters(again, root_rank=0)
    return {"from 1": state, "model": state_of(model), "from 0": again}


PLAIN = {
    "text": "Zen ∆",
    "bytes": b"\0\xff",
    "numbers": [1, -(2**63), 2**64 - 1, 0.1, float("inf")],
    "nested": {"none": None, "true": True, "list": [[], {}, [1, [2, [3]]]]},
    "long": "x" * 100_000,
    7: "an integer key",
}


def broadcast_objects() -> dict[str, Any]:
    mine = PLAIN if zps.rank() == 0 else object()
    return {
        "plain": zps.broadcast_object(mine),
        "again": zps.broadcast_object([zps.rank()], root_rank=1),
        "tuple": zps.broadcast_object((1, 2)),
        "none": zps.broadcast_object(None),
    }


def broadcast_state(name: str) -> list[dict[str, Any]]:
    """Rank 1 has trained alone; rank 0, fresh and with other hyperparameters, gets its state."""
    model = make_model()
    optimizers = OPTIMIZERS[name](model)
    if zps.rank() == 1:
        for step in range(2):
            loss_of(model, step, 0).backward()
            for optimizer in optimizers:
                optimizer.step()
    else:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 123.0
    for optimizer in optimizers:
        zps.broadcast_optimizer_state(optimizer, root_rank=1)
    return [optimizer.state_dict() for optimizer in optimizers]


def run_all() -> dict[str, Any]:
    results: dict[str, Any] = {f"train {name}": train(name) for name in OPTIMIZERS}
    results["sum"] = sum_instead_of_average()
    results["accumulate"] = accumulate()
    results["clip"] = clip()
    results["schedule"] = schedule()
    results["closure"] = use_a_closure()
    results["pushes"] = watch_pushes()
    results["broadcast"] = broadcast()
    results["objects"] = broadcast_objects()
    results["misuse"] = misuse()
    for name in OPTIMIZERS:
        results[f"state {name}"] = broadcast_state(name)
    return results


# ── in the test process ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    # Small buckets, so that there are several; a short deadline, in case a rank waits for nothing.
    settings = {"sync.bucket_bytes": 1024, "cluster.deadline_seconds": 10}
    with Cluster(settings=settings) as cluster:
        yield cluster.run(run_all)


def assert_same(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(state, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    wanted = train_in_one_process(name)
    before = make_model().state_dict()
    assert torch.equal(wanted["never.weight"], before["never.weight"])
    assert not torch.equal(wanted["extra.weight"], before["extra.weight"])
    for outcome in results:
        assert_same(outcome[f"train {name}"], wanted)


@pytest.mark.parametrize("name", [*(f"train {name}" for name in OPTIMIZERS), "accumulate", "clip"])
def test_ranks_have_the_same_bits(results: list[dict[str, Any]], name: str) -> None:
    first, *others = (outcome[name] for outcome in results)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_gradient_accumulation(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        assert_same(outcome["accumulate"], accumulate_in_one_process())


def test_sum_instead_of_average(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        assert_same(outcome["sum"], train_in_one_process("sgd"))


def test_clipping_between_synchronize_and_step(results: list[dict[str, Any]]) -> None:
    wanted = clip_in_one_process()
    for outcome in results:
        assert_same(outcome["clip"], wanted)


def test_learning_rate_scheduler(results: list[dict[str, Any]]) -> None:
    state, rates = schedule_in_one_process()
    for outcome in results:
        assert_same(outcome["schedule"][0], state)
        assert outcome["schedule"][1] == rates


def test_closure(results: list[dict[str, Any]]) -> None:
    wanted = train_in_one_process("sgd")
    for outcome in results:
        state, returned = outcome["closure"]
        assert_same(state, wanted)
        assert returned


def test_pushes_start_while_backward_runs(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        first, *later = outcome["pushes"]
        assert not any(event.startswith("push") for event in first[: first.index("end of backward")])
        for events in later:
            during = events[: events.index("end of backward")]
            after = events[events.index("end of backward") + 1 :]
            assert during.count("push sparse") == 3
            assert sum(event.startswith("push optimizer") for event in during) >= 2
            # `never` has no gradient: all that is left is to ask the others whether it has one there.
            assert len(after) == 1
            assert after[0].endswith("/kinds")
            pushed = next(i for i, event in enumerate(during) if event.startswith("push"))
            assert pushed < during.index("gradient words.weight"), during


MISUSE = {
    "zero_grad": ("UsageError", "in flight"),
    "backward": ("UsageError", "backward_passes_per_step"),
    "group": ("UsageError", "before wrapping"),
    "passes": ("UsageError", "at least 1"),
    "unnamed": ("UsageError", "1 parameter(s)"),
    "one name": ("UsageError", "one name"),
    "other names": ("MismatchError", "rank(s) 1 have other parameters than rank 0"),
    "other kinds": ("MismatchError", "sparse"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(results: list[dict[str, Any]], name: str) -> None:
    for outcome in results:
        error = outcome["misuse"][name]
        assert isinstance(error, Raised), error
        assert error.kind == MISUSE[name][0], error
        assert MISUSE[name][1] in error.text


def test_other_names_are_listed(results: list[dict[str, Any]]) -> None:
    text = results[1]["misuse"]["other names"].text
    assert "bag.weight of rank 0, bag.weight of rank 1" in text


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(results: list[dict[str, Any]], root: int) -> None:
    wanted = every_dtype(root)
    for outcome in results:
        got = outcome["broadcast"][f"from {root}"]
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name].contiguous().view(-1).view(torch.uint8),
                               tensor.contiguous().view(-1).view(torch.uint8)), name  # fmt: skip
        assert_same(outcome["broadcast"]["model"], make_model().state_dict())


def test_broadcast_object(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        assert outcome["objects"] == {"plain": PLAIN, "again": [1], "tuple": [1, 2], "none": None}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(results: list[dict[str, Any]], name: str) -> None:
    first, second = (outcome[f"state {name}"] for outcome in results)
    assert name == "sgd" or any(state["state"] for state in second)
    for got, wanted in zip(first, second, strict=True):
        assert got["param_groups"] == wanted["param_groups"]
        assert got["state"].keys() == wanted["state"].keys()
        for key, values in wanted["state"].items():
            torch.testing.assert_close(got["state"][key], values, rtol=0, atol=0)
