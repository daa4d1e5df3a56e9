"""Training on several ranks against one process that sees the concatenated batch.

In float64 the two differ by nothing but the order of sums: a relative 1e-9 after a few steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from tests.integration.embedding_model import OPTIMIZERS, Model, assert_same, loss_of, make_model, state_of
from zenps.worker.core.request import Request
from zenps.worker.process import PROCESS

STEPS = 5
RANKS = 2


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


def train_in_one_process(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    model = make_model()
    optimizers = OPTIMIZERS[name](model)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum((loss_of(model, step, rank) for rank in range(RANKS)), torch.zeros(())) / RANKS).backward()
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
        (sum((loss_of(model, step, rank) for rank in range(RANKS)), torch.zeros(())) / RANKS).backward()
        nn.utils.clip_grad_norm_(model.dense(), 0.05)
        optimizer.step()
    return state_of(model)


def sparse_and_fused(model: Model) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.sparse(), lr=0.3), torch.optim.SGD(model.dense(), lr=0.3, fused=True)]


def scale() -> dict[str, Tensor]:
    """With a scaler, as for float16. In step 1 a gradient overflows, on one rank."""
    model = make_model()
    optimizers = wrap(model, sparse_and_fused(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        loss = loss_of(model, step, zps.rank())
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss * float("inf") if (step, zps.rank()) == (1, 1) else loss).backward()
        for optimizer in optimizers:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        scaler.update()
    return state_of(model)


def scale_in_one_process() -> dict[str, Tensor]:
    model = make_model()
    optimizers = sparse_and_fused(model)
    for step in (0, *range(2, STEPS)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum((loss_of(model, step, rank) for rank in range(RANKS)), torch.zeros(())) / RANKS).backward()
        for optimizer in optimizers:
            optimizer.step()
    return state_of(model)


class Table(nn.Module):
    """One table of which single elements are taken: all of its gradient's dimensions are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def loss(self, step: int, rank: int) -> Tensor:
        taken = torch.tensor([[rank, 2], [step % 4, 3]])
        total: Tensor = torch.gather(self.weight, 1, taken, sparse_grad=True).square().sum()
        return total


def take_elements() -> dict[str, Tensor]:
    """From step to step, another rank does not use the table."""
    model = Table()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), average=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2 == zps.rank():
            model.loss(step, zps.rank()).backward()
        optimizer.step()
    return model.state_dict()


def take_elements_in_one_process() -> dict[str, Tensor]:
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(step, step % 2).backward()
        optimizer.step()
    return model.state_dict()


def rewrap() -> bool:
    """Trains with one optimizer, then with another; whether nothing keeps the first one alive."""
    model = make_model()
    for first in wrap(model, OPTIMIZERS["sgd"](model)):
        for step in range(2):
            first.zero_grad()
            loss_of(model, step, 0).backward()
            first.step()
    gone = weakref.ref(first)
    del first
    (second,) = wrap(model, OPTIMIZERS["momentum"](model))
    for step in range(3):
        second.zero_grad()
        loss_of(model, step, 0).backward()
        second.step()
    return gone() is None


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
        rates.append(float(scheduler.get_last_lr()[0]))
    return state_of(model), rates


def schedule_in_one_process() -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    (optimizer,) = OPTIMIZERS["sgd"](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum((loss_of(model, step, rank) for rank in range(RANKS)), torch.zeros(())) / RANKS).backward()
        optimizer.step()
        scheduler.step()
        rates.append(float(scheduler.get_last_lr()[0]))
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
    with pytest.MonkeyPatch.context() as patch:
        return _watch_pushes(patch)


def _watch_pushes(patch: pytest.MonkeyPatch) -> list[list[str]]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    events: list[str] = []

    begin = PROCESS.world.begin

    def watched(request: Request) -> Any:
        is_broadcast = request.options.purpose == "broadcast"
        if not is_broadcast:
            events.append("push sparse" if request.tensor.is_sparse else f"push {request.name}")
        return begin(request)

    patch.setattr(PROCESS.world, "begin", watched)
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
    return steps


def go_on(model: Model, optimizer: torch.optim.Optimizer) -> tuple[bool, dict[str, Tensor]]:
    """After a refused step: whether it left the weights alone, and the weights after the next one."""
    before = state_of(model)
    optimizer.zero_grad()
    is_same = all(torch.equal(before[name], tensor) for name, tensor in state_of(model).items())
    loss_of(model, 2, zps.rank()).backward()
    optimizer.step()
    return is_same, state_of(model)


def misuse() -> dict[str, Any]:
    model = make_model()
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    outcomes: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        if step == 1:
            nn.utils.clip_grad_norm_(model.dense(), 1e-3)
            outcomes["clipped"] = attempt(optimizer.step)
            outcomes["refused"] = go_on(model, optimizer)
        else:
            optimizer.step()
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
    table = Table()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    if zps.rank() == 0:
        table.loss(0, 0).backward()
    else:
        nn.functional.embedding(torch.tensor([1]), table.weight, sparse=True).sum().backward()
    outcomes["other sparse dimensions"] = attempt(optimizer.step)
    return outcomes


def run_all() -> dict[str, Any]:
    results: dict[str, Any] = {f"train {name}": train(name) for name in OPTIMIZERS}
    results["sum"] = sum_instead_of_average()
    results["accumulate"] = accumulate()
    results["clip"] = clip()
    results["elements"] = take_elements()
    results["schedule"] = schedule()
    results["closure"] = use_a_closure()
    results["scale"] = scale()
    results["rewrap"] = rewrap()
    results["pushes"] = watch_pushes()
    results["misuse"] = misuse()
    return results


# ── in the test process ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    # Small buckets, so that there are several; a short deadline, in case a rank waits for nothing.
    settings = {"sync.bucket_bytes": 1024, "cluster.deadline_seconds": 10}
    with Cluster(settings=settings) as cluster:
        yield cluster.run(run_all)


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


def test_table_whose_elements_are_sparse_and_that_one_rank_does_not_use(
    results: list[dict[str, Any]],
) -> None:
    wanted = take_elements_in_one_process()
    for outcome in results:
        assert_same(outcome["elements"], wanted)


def test_scaled_loss_of_which_one_overflows(results: list[dict[str, Any]]) -> None:
    wanted = scale_in_one_process()
    for outcome in results:
        assert_same(outcome["scale"], wanted)


def test_optimizer_that_is_dropped_pushes_no_more(results: list[dict[str, Any]]) -> None:
    assert [outcome["rewrap"] for outcome in results] == [True] * RANKS


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
            assert after[0].endswith(":kinds")
            pushed = next(i for i, event in enumerate(during) if event.startswith("push"))
            assert pushed < during.index("gradient words.weight"), during


MISUSE = {
    "clipped": ("UsageError", "changed since backward computed it"),
    "passes": ("UsageError", "at least 1"),
    "unnamed": ("UsageError", "1 parameter(s) of the optimizer are not in named_parameters; pass model"),
    "one name": ("UsageError", "have the name 'weight'"),
    "other names": ("MismatchError", "rank(s) 1 have other parameters than rank 0"),
    "other kinds": ("MismatchError", "dense on 1 rank(s), sparse by 1 dimension(s) on 1 rank(s)"),
    "other sparse dimensions": ("MismatchError", "sparse by 1 dimension(s) on 1 rank(s), sparse by 2"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(results: list[dict[str, Any]], name: str) -> None:
    for outcome in results:
        error = outcome["misuse"][name]
        assert isinstance(error, Raised), error
        assert error.kind == MISUSE[name][0], error
        assert MISUSE[name][1] in error.text


def test_training_goes_on_after_a_step_that_was_refused(results: list[dict[str, Any]]) -> None:
    model = make_model()
    (optimizer,) = OPTIMIZERS["sgd"](model)
    for step, ranks in ((0, [0]), (2, range(RANKS))):
        optimizer.zero_grad()
        (sum((loss_of(model, step, rank) for rank in ranks), torch.zeros(())) / len(ranks)).backward()
        optimizer.step()
    for outcome in results:
        is_same, weights = outcome["misuse"]["refused"]
        assert is_same
        assert_same(weights, state_of(model))


def test_other_names_are_listed(results: list[dict[str, Any]]) -> None:
    text = results[1]["misuse"]["other names"].text
    assert "bag.weight of rank 0, bag.weight of rank 1" in text


def unfreeze_in_a_step_of_its_own() -> Any:
    model = make_model()
    model.words.weight.requires_grad_(False)
    model.never.requires_grad_(False)  # otherwise each step waits for the other rank
    (optimizer,) = wrap(model, OPTIMIZERS["sgd"](model))
    for step in range(STEPS):
        if step == 2 + zps.rank():
            model.words.weight.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        if isinstance(error := attempt(optimizer.step), Raised):
            return error
    return None


def test_ranks_that_unfreeze_in_different_steps_are_refused() -> None:
    """They trained on, a step apart, with weights that differed."""
    with Cluster(2, 1) as cluster:
        workers = [cluster.start(unfreeze_in_a_step_of_its_own, rank=rank) for rank in range(RANKS)]
        first, second = (worker.result() for worker in workers)
    assert (first.kind, second.kind) == ("MismatchError", "MismatchError")
    assert "rank(s) 1 have other new parameters than rank 0" in first.text
    assert "rank 0 has them before its step 2, this one before step 3" in second.text
