"""Training with sparsified gradients: real roles against one process that keeps each rank's residual."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, attempt, await_file
from tests.integration.test_levels import REACHED, start_on_two_hosts
from zenps.config.settings import SparsifierConfig
from zenps.sparsifiers import Above, Sparsifier, Step, Task, sparsifier_class
from zenps.sparsifiers.dgc import DGC
from zenps.sparsifiers.exdyna import ExDyna
from zenps.sparsifiers.registry import sparsifier_names
from zenps.sparsifiers.topk import TopK
from zenps.worker.core.request import Options, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.process import PROCESS

RANKS = 3
STEPS = 12
DENSITY = 0.02
RATE = 0.05

SETTINGS: dict[str, object] = {
    "sync.sparsifier": "topk",
    "sync.density": DENSITY,
    "sparsifier.least_bytes": 1024,
    # The wide layer has a bucket of its own.
    "sync.bucket_bytes": "16KiB",
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 7)).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 40, generator=generator, dtype=torch.float64)
    return nn.functional.cross_entropy(model(inputs), inputs[:, :7].argmax(1))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train() -> tuple[dict[str, Tensor], zps.Stats]:
    model = make_model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5), model.named_parameters()
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    return values_of(model), zps.stats()


class Expected:
    """All ranks in one process: each has its residuals, and pushes what the sparsifiers select."""

    def __init__(self, name: str) -> None:
        self.model = make_model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE, momentum=0.5)
        kind = sparsifier_class(name)
        assert kind is not None
        self._sparsifiers: dict[tuple[str, int], Sparsifier] = {}
        self._residuals: dict[tuple[str, int], Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        for layer, parameter in self.model.named_parameters():
            for rank in range(RANKS):
                size = parameter.numel() + 1  # the presence element, which is never selected from
                task = Task(layer, size, rank, RANKS, 0, SparsifierConfig())
                self._sparsifiers[layer, rank] = kind(task)
                self._residuals[layer, rank] = torch.zeros(size, dtype=torch.float64)

    def train(self) -> dict[str, Tensor]:
        for step in range(STEPS):
            gradients: dict[str, list[Tensor]] = {name: [] for name in values_of(self.model)}
            for rank in range(RANKS):
                self.model.zero_grad()
                loss_of(self.model, step, rank).backward()
                for name, parameter in self.model.named_parameters():
                    assert parameter.grad is not None
                    gradients[name].append(parameter.grad.clone())
            for name, parameter in self.model.named_parameters():
                parameter.grad = self._sum(name, step, gradients[name]) / RANKS
            self._optimizer.step()
        return values_of(self.model)

    def _sum(self, name: str, number: int, gradients: list[Tensor]) -> Tensor:
        if gradients[0].dim() == 1:
            return torch.stack(gradients).sum(0)
        sparsifiers = [self._sparsifiers[name, rank] for rank in range(RANKS)]
        residuals = [self._residuals[name, rank] for rank in range(RANKS)]
        step, chosen = Step(number, DENSITY, self._counts.get(name)), []
        for sparsifier, residual, gradient in zip(sparsifiers, residuals, gradients, strict=True):
            residual[:-1] += gradient.reshape(-1)
            selection = sparsifier.select(residual, step)
            chosen.append(selection.indices(residual) if isinstance(selection, Above) else selection)
        is_agreed = sparsifiers[0].exchange == "agreed"
        if is_agreed:
            chosen = [torch.cat(chosen).unique()] * RANKS
        total = torch.zeros_like(residuals[0])
        for residual, indices in zip(residuals, chosen, strict=True):
            total[indices] += residual[indices]
            residual[indices] = 0
        if is_agreed:
            for sparsifier in sparsifiers:
                sparsifier.learn(chosen[0], step)
            counts = [
                each.count(residual, step) for each, residual in zip(sparsifiers, residuals, strict=True)
            ]
            self._counts[name] = torch.stack([each for each in counts if each is not None]).sum(0)
        return total[:-1].view(gradients[0].shape)


def assert_close(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "scheme",
    ["zenps", "omnireduce", pytest.param("agsparse", marks=pytest.mark.long)],
)
def test_ranks_train_as_one_process_with_all_residuals(scheme: str) -> None:
    with Cluster(RANKS, settings=SETTINGS | {"sync.scheme": scheme}) as cluster:
        results = cluster.run(train)
    expected = Expected("topk").train()
    for values, _ in results:
        assert_close(values, expected)
    stats = results[0][1]
    whole = STEPS * (40 * 300 + 300 * 7)
    # Presence elements are counted with the gradients: one for each of two layers.
    assert stats.whole_elements == whole + 2 * STEPS
    assert stats.selected_elements == STEPS * (round(DENSITY * 12_001) + round(DENSITY * 2101) + 2)
    assert stats.selected_elements < stats.union_elements <= RANKS * stats.selected_elements


@pytest.mark.long
def test_randomk_chooses_the_same_elements_on_all_ranks_and_others_in_each_step() -> None:
    settings = SETTINGS | {"sync.scheme": "agsparse", "sync.sparsifier": "randomk"}
    with Cluster(RANKS, settings=settings) as cluster:
        (values, stats), *_ = cluster.run(train)
    assert stats.union_elements == stats.selected_elements
    before = values_of(make_model())
    changed = int((values["0.weight"] != before["0.weight"]).sum())
    assert changed > 5 * DENSITY * 12_000, "twelve steps choose nearly twelve times as many as one"


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("exdyna", "zenps"),
        ("exdyna", "agsparse"),
        ("micro", "zenps"),
        pytest.param("exdyna", "auto", marks=pytest.mark.long),
    ],
)
def test_an_agreed_exchange_is_that_of_one_process(scheme: str, name: str) -> None:
    settings = SETTINGS | {"sync.scheme": scheme, "sync.sparsifier": name}
    with Cluster(RANKS, settings=settings) as cluster:
        results = cluster.run(train)
    expected = Expected(name).train()
    for values, stats in results:
        assert_close(values, expected)
        assert stats.union_elements <= sum(other.selected_elements for _, other in results)
        assert stats.selected_elements < stats.union_elements < 4 * DENSITY * stats.whole_elements


KILLED_AFTER = (5, 15)
"""Steps after which a server is killed."""


def train_past_losses(directory: Path, kills: int) -> tuple[dict[str, Tensor], int]:
    """Trains; says after each step how far it is. Returns the values and how often the ring has changed."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5), model.named_parameters()
    )
    for step in range(4 * STEPS):
        if (before := step - 1) in KILLED_AFTER[:kills]:
            await_file(directory / f"killed{before}")
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
        if zps.rank() == 0:
            (directory / f"step{step}").touch()
        time.sleep(0.02)
    world: Any = PROCESS.world
    return values_of(model), world._session.lease.view.ring_epoch


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "values"),
    [*((name, "same") for name in sparsifier_names()[1:]), ("exdyna", "int8"), ("topk", "int8")],
)
def test_servers_that_are_killed_change_no_bit(tmp_path: Path, name: str, values: str) -> None:
    settings = SETTINGS | {"sync.sparsifier": name, "sync.values": values}
    found = []
    for kills in (0, 2):
        directory = tmp_path / str(kills)
        directory.mkdir()
        with Cluster(RANKS, 4, settings, lease_seconds=LEASE_SECONDS) as cluster:
            workers = [cluster.start(train_past_losses, directory, kills, rank=rank) for rank in range(RANKS)]
            for server, step in zip(cluster.servers, KILLED_AFTER[:kills], strict=False):
                await_file(directory / f"step{step}")
                server.kill()
                (directory / f"killed{step}").touch()
            results = [worker.result() for worker in workers]
        for trained, ring_epoch in results:
            assert (ring_epoch > 1) == (kills > 0)
            found.append(trained)
    for trained in found[1:]:
        assert all(torch.equal(trained[layer], found[0][layer]) for layer in trained)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"sync.values": "bfloat16"},
        {"sync.values": "int8"},
        {"sync.codec": "bitmap"},
        {"sync.partition": "centralized"},
        {"sparsifier.controller": "published"},
    ],
    ids=str,
)
def test_ranks_are_equal_and_learn_under_other_settings(settings: dict[str, object]) -> None:
    with Cluster(RANKS, settings=SETTINGS | {"sync.sparsifier": "exdyna"} | settings) as cluster:
        results = cluster.run(train_floats)
    (first, before, after), *others = results
    assert after < 0.8 * before
    for values, _, _ in others:
        assert all(torch.equal(values[layer], first[layer]) for layer in first)


def train_floats() -> tuple[dict[str, Tensor], float, float]:
    """The values, and the first and last loss."""
    model = make_model().float()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 10 * RATE), model.named_parameters()
    )
    losses = []
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(zps.rank())
        inputs = torch.randn(64, 40, generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :7].argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return values_of(model), losses[0], losses[-1]


def test_only_leaders_select_between_hosts() -> None:
    """Of two hosts, each selects from half of the elements."""
    settings = SETTINGS | {"sync.sparsifier": "exdyna", "sync.levels": 2}
    with Cluster(4, 2, settings, server_settings=REACHED) as cluster:
        outcomes = [worker.result() for worker in start_on_two_hosts(cluster, 4, train)]
    for values, _ in outcomes[1:]:
        assert all(torch.equal(values[layer], outcomes[0][0][layer]) for layer in values)
    # The small layer goes over servers from all ranks.
    small = STEPS * 2101
    for _, stats in (outcomes[1], outcomes[3]):
        assert stats.whole_elements == small
    for _, stats in (outcomes[0], outcomes[2]):
        assert stats.whole_elements == small + STEPS * 12_001


def test_tensors_may_be_waited_for_in_any_order() -> None:
    """The second rounds of all are pushed, whichever tensor a rank waits for."""
    with Cluster(RANKS, settings=SETTINGS | {"sync.sparsifier": "exdyna"}) as cluster:
        results = cluster.run(push_many)
    assert results[0] == results[1] == results[2]
    assert all(results[0]), "nothing of some tensor was selected"


def push_many() -> list[float]:
    residuals, options = Residuals(), {"purpose": "gradient", "is_sparsifiable": True}
    tensors = {f"t{index}": torch.randn(20_000) for index in range(8)}
    begun = {
        name: PROCESS.world.begin(Request(tensor, name, Options(residuals=residuals, **options)))  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    }
    order = sorted(begun, reverse=zps.rank() % 2 == 1)
    sums = {name: float(begun[name].wait().double().sum()) for name in order}
    return [sums[name] for name in begun]


@pytest.mark.parametrize("name", ["topk", "exdyna"])
def test_a_dropped_optimizer_frees_its_residuals_and_is_in_no_checkpoint(name: str) -> None:
    """Though rounds are kept, for ranks that may need them again."""
    with Cluster(RANKS, settings=SETTINGS | {"sync.sparsifier": name}) as cluster:
        results = cluster.run(wrap_one_after_the_other)
    assert results == [[{"optimizer0"}, set(), {"optimizer1"}]] * RANKS


def wrap_one_after_the_other() -> list[set[str]]:
    """The optimizers in a checkpoint while the first is used, after it is dropped, and with the second."""

    def saved() -> set[str]:
        gc.collect()
        return {name.partition("/")[0] for name in zps.sparsifier_state_dict()["tensors"]}

    model, found = make_model(), []
    for _ in range(2):
        optimizer: Any = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, zps.rank()).backward()
            optimizer.step()
        found.append(saved())
        del optimizer
        found.append(saved())
    return found[:-1]


def test_a_scheme_without_indices_refuses_an_agreed_exchange() -> None:
    plugin = "zenps.sparsifiers.exdyna:ExDyna"  # known to need indices once it is imported
    with Cluster(1, 1, SETTINGS | {"sync.sparsifier": plugin, "sync.scheme": "omnireduce"}) as cluster:
        refused = cluster.start(init, init=False).result()
    assert isinstance(refused, Raised)
    assert refused.text == (
        f"sync.sparsifier = {plugin!r}: expected one whose exchange is own, unlike exdyna and micro, "
        "because sync.scheme = omnireduce sends no indices"
    )


def train_with_ddp(store: Path) -> dict[str, Tensor]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=zps.size())
    model = nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=0.1)
    state = zps.CommHookState()
    model.register_comm_hook(state, zps.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    stats = zps.stats()
    dist.destroy_process_group()
    return values_of(model) | {"stats": torch.tensor([stats.whole_elements, stats.selected_elements])}


@pytest.mark.parametrize("name", ["topk", pytest.param("exdyna", marks=pytest.mark.long)])
def test_ddp_pushes_each_layout_whole_once(tmp_path: Path, name: str) -> None:
    with Cluster(2, settings=SETTINGS | {"sync.sparsifier": name}) as cluster:
        results = cluster.run(train_with_ddp, tmp_path / "store")
    for layer in values_of(make_model()):
        assert torch.equal(results[0][f"module.{layer}"], results[1][f"module.{layer}"]), layer
    whole, selected = results[0]["stats"].tolist()
    assert 0 < whole < STEPS * (12_000 + 2100 + 307), "the first round of a layout is not thinned out"
    assert selected < 0.1 * whole


def test_an_unknown_sparsifier_is_refused_before_joining() -> None:
    with Cluster(1, 1, settings=SETTINGS) as cluster:
        worker = cluster.start(init, init=False, settings={"sync.sparsifier": "zenps:Top"})
        refused = worker.result()
    assert isinstance(refused, Raised)
    assert refused.kind == "ConfigError"
    assert refused.text.startswith(
        "sync.sparsifier = 'zenps:Top': expected one of none, dgc, exdyna, micro, randomk, threshold, topk, "
    )


def init() -> Any:
    return attempt(zps.init)


class Wrong(ExDyna):
    """Breaks after the first round of its second step."""

    def learn(self, union: Tensor, step: Step) -> None:
        if step.number:
            raise ZeroDivisionError("by zero")
        super().learn(union, step)


class WrongLater(ExDyna):
    """Breaks in `sent`, which the thread that polls calls."""

    def sent(self, indices: Tensor) -> None:
        raise ZeroDivisionError("by zero")


class Miscounting(ExDyna):
    """Counts in float32."""

    def count(self, values: Tensor, step: Step) -> Tensor:
        return torch.ones(3)


class WrongOnOne(ExDyna):
    """Breaks on rank 1 only, in its second step."""

    def learn(self, union: Tensor, step: Step) -> None:
        super().learn(union, step)
        if step.number == 1 and self.task.rank == 1:
            raise ZeroDivisionError("by zero")


class WrongOnOneHost(TopK):
    """Breaks at the first host's leader only, in its second step."""

    def select(self, values: Tensor, step: Step) -> Above:
        if step.number == 1 and self.task.rank == 0 and self.task.size > 10_000:
            raise ZeroDivisionError("by zero")
        return super().select(values, step)


class Unequal(ExDyna):
    """Ranks count differently many."""

    def count(self, values: Tensor, step: Step) -> Tensor | None:
        return torch.ones(self.task.rank, dtype=torch.int64) if self.task.rank else None


def train_twice() -> list[Any]:
    return [attempt(train), attempt(zps.push_pull, torch.ones(3), "after")]


def train_on(steps: int) -> list[Any]:
    """Goes on after errors; returns each step's."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE), model.named_parameters())
    found = []
    for step in range(steps):
        loss_of(model, step, zps.rank()).backward()
        found.append(attempt(optimizer.step))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("scheme", ["zenps", "agsparse"])
def test_a_plug_in_that_breaks_on_one_rank_keeps_nobody_waiting(scheme: str) -> None:
    settings = SETTINGS | {"sync.sparsifier": f"{__name__}:WrongOnOne", "sync.scheme": scheme}
    with Cluster(RANKS, settings=settings) as cluster:
        results = cluster.run(train_on, 4)
    for rank, steps in enumerate(results):
        assert [isinstance(each, Raised) for each in steps] == [False, True, False, False], steps
        assert steps[1].kind == ("UsageError" if rank == 1 else "MismatchError")


def test_a_plug_in_that_breaks_on_one_leader_keeps_nobody_waiting() -> None:
    settings = SETTINGS | {"sync.sparsifier": f"{__name__}:WrongOnOneHost", "sync.levels": 2}
    with Cluster(4, settings=settings, server_settings=REACHED) as cluster:
        results = [worker.result() for worker in start_on_two_hosts(cluster, 4, train_on, 4)]
    for rank, steps in enumerate(results):
        assert [isinstance(each, Raised) for each in steps] == [False, True, False, False], steps
        assert steps[1].kind == ("UsageError" if rank < 2 else "MismatchError")


@pytest.mark.parametrize("scheme", ["zenps", pytest.param("agsparse", marks=pytest.mark.long)])
def test_ranks_that_count_differently_many_get_an_error(scheme: str) -> None:
    settings = SETTINGS | {"sync.sparsifier": f"{__name__}:Unequal", "sync.scheme": scheme}
    with Cluster(RANKS, settings=settings) as cluster:
        results = cluster.run(train_twice)
    for failed, after in results:
        assert failed.kind == "MismatchError"
        assert after.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Wrong", "Wrong: ZeroDivisionError('by zero') in learn or count; correct the sparsifier"),
        pytest.param(
            "WrongLater",
            "WrongLater: ZeroDivisionError('by zero') in sent; correct the sparsifier",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "Miscounting",
            "Miscounting.count: expected int64 [n], got torch.float32 of shape (3,) on cpu; correct the "
            "sparsifier",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_plug_in_that_breaks_fails_its_round_only(kind: str, reason: str) -> None:
    with Cluster(RANKS, settings=SETTINGS | {"sync.sparsifier": f"{__name__}:{kind}"}) as cluster:
        results = cluster.run(train_twice)
    for failed, after in results:
        assert (failed.kind, failed.text) == ("UsageError", reason)
        assert after.tolist() == [1, 1, 1]


# ── batches that are thrown away ────────────────────────────────────────────────────────────────


def float_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(inputs), inputs[:, :7].argmax(1))


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights, residuals and what sparsifiers know; but not how often they have pushed."""
    found = {name: value.clone() for name, value in values_of(model).items()}
    tables = optimizer._consistency._agreement.residuals._tables
    found |= {name: table.clone() for name, table in tables.items()}
    if PROCESS.world.sparsification is not None:
        for name, state in zps.sparsifier_state_dict()["tensors"].items():
            found |= {f"{name}: {key}": copy.deepcopy(state[key]) for key in ("sparsifier", "counts")}
    return found


def throw_away(way: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Everything before and after a batch that is thrown away, and weights some steps later."""
    model = make_model().float()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5), model.named_parameters()
    )

    def train_on(steps: range) -> None:
        for step in steps:
            for _ in range(2 if way == "a pass of two" else 1):
                float_loss(model, step, zps.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()

    train_on(range(3))
    before = everything(model, optimizer)
    with optimizer.no_sync() if way == "no_sync" else contextlib.nullcontext():
        loss = model[2](torch.ones(1, 300)).sum() if way == "a part" else float_loss(model, 3, zps.rank())
        (1e6 * loss).backward()
    optimizer.zero_grad()
    after = everything(model, optimizer)
    train_on(range(4, 6))
    return before, after, values_of(model)


def throw_away_in_turn(ways: Sequence[str]) -> dict[str, Any]:
    return {way: attempt(throw_away, way) for way in ways}


BEFORE_THE_PUSH = ("a pass of two", "no_sync", "a part")


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({"sync.sparsifier": "topk"}, BEFORE_THE_PUSH),
        ({"sync.sparsifier": "topk", "sync.values": "int8"}, BEFORE_THE_PUSH),
        ({"sync.sparsifier": "none", "sync.values": "int8"}, BEFORE_THE_PUSH),
        ({"sync.sparsifier": "exdyna"}, BEFORE_THE_PUSH),
        ({"sync.sparsifier": "exdyna", "sync.scheme": "agsparse"}, BEFORE_THE_PUSH),
        ({"sync.sparsifier": "dgc", "sparsifier.clip_norm": 1.0}, (*BEFORE_THE_PUSH, "a pass")),
    ],
    ids=str,
)
def test_what_is_thrown_away_before_it_is_pushed_leaves_residuals_as_they_are(
    settings: dict[str, object], ways: Sequence[str]
) -> None:
    every = {"sync.density": 0.1, "sparsifier.least_bytes": 0}
    with Cluster(2, settings=every | settings) as cluster:
        results = cluster.run(throw_away_in_turn, ways)
    for way in ways:
        for found in results:
            assert not isinstance(found[way], Raised), found[way]
            before, after, later = found[way]
            assert any(name.startswith("optimizer") for name in before)
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            assert all(torch.equal(later[name], results[0][way][2][name]) for name in later)
            assert all(value.isfinite().all() and value.abs().max() < 10 for value in later.values())


def test_what_was_pushed_is_not_thrown_away() -> None:
    every = {"sync.sparsifier": "topk", "sync.density": 0.1, "sparsifier.least_bytes": 0}
    with Cluster(2, settings=every) as cluster:
        results = cluster.run(throw_away_in_turn, ["a pass"])
    for found in results:
        assert found["a pass"].kind == "UsageError"
        assert "expected step() next, got zero_grad()" in found["a pass"].text


def train_gan() -> tuple[dict[str, Any], list[Tensor]]:
    """What the loss of the generator leaves in the critic is thrown away in each step."""
    torch.manual_seed(0)
    generator, critic = torch.nn.Embedding(9, 32, sparse=True), torch.nn.Linear(32, 1)
    optimizers = [
        zps.DistributedOptimizer(torch.optim.SGD(each.parameters(), RATE), each.named_parameters())
        for each in (generator, critic)
    ]
    ids = torch.arange(4) + zps.rank()
    outcomes: dict[str, Any] = {}
    for way in ("plain", "no_sync"):
        for _ in range(3):
            optimizers[1].zero_grad()
            (critic(generator(ids).detach()) - critic(torch.ones(4, 32))).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            with optimizers[1].no_sync() if way == "no_sync" else contextlib.nullcontext():
                critic(generator(ids)).mean().neg().backward()
            optimizers[0].step()
            outcomes[way] = attempt(optimizers[1].zero_grad)
            optimizers[1].zero_grad()
    return outcomes, [each.detach() for each in (*generator.parameters(), *critic.parameters())]


def test_a_gan_runs_the_backward_of_its_generator_inside_no_sync_of_its_critic() -> None:
    with Cluster(2, settings={"sync.values": "int8"}) as cluster:
        results = cluster.run(train_gan)
    for outcomes, weights in results:
        assert "inside no_sync() of this optimizer" in outcomes["plain"].text
        assert outcomes["no_sync"] is None
        assert all(map(torch.equal, weights, results[0][1]))


# ── momentum correction ─────────────────────────────────────────────────────────────────────────


def train_with_sgd(path: Path, **settings: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trains; one layer is too small to be sparsified. Returns the values and the optimizer's state."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, **settings), model.named_parameters()
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    torch.save(optimizer.state_dict(), path / f"{zps.rank()}")
    return values_of(model), optimizer.param_groups[0] | {"params": None}


def sgd_in_one_process(**settings: Any) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE, **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss: Tensor = sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS  # type: ignore[assignment]
        loss.backward()
        optimizer.step()
    return values_of(model)


class Everything(DGC):
    """Has the momentum of DGC, and leaves nothing out."""

    def select(self, values: Tensor, step: Step) -> Above:
        return Above(0.0)


WITH_MOMENTUM = SETTINGS | {"sync.sparsifier": "dgc", "sparsifier.least_bytes": "32KiB"}


@pytest.mark.parametrize(
    "sgd",
    [
        {"momentum": 0.9, "weight_decay": 0.1},
        pytest.param({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, marks=pytest.mark.long),
        pytest.param({"weight_decay": 0.1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_momentum_that_is_taken_is_that_of_sgd(tmp_path: Path, sgd: dict[str, Any]) -> None:
    everything = {"sync.sparsifier": f"{__name__}:Everything", "sparsifier.mask_momentum": "off"}
    settings = WITH_MOMENTUM | everything
    with Cluster(RANKS, settings=settings) as cluster:
        results = cluster.run(train_with_dgc, tmp_path, sgd)
    expected = sgd_in_one_process(**sgd)
    for values, group in results:
        assert_close(values, expected)
        assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0, False, 0)


def train_with_dgc(path: Path, sgd: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return train_with_sgd(path, **sgd)


def test_dgc_trains_and_ranks_are_equal(tmp_path: Path) -> None:
    settings = WITH_MOMENTUM | {"sparsifier.clip_norm": 1.0, "sparsifier.warmup_steps": 4}
    with Cluster(RANKS, settings=settings) as cluster:
        results = [values for values, _ in cluster.run(train_with_dgc, tmp_path, {"momentum": 0.5})]
    for values in results[1:]:
        assert all(torch.equal(values[layer], results[0][layer]) for layer in values)
    before = values_of(make_model())
    assert all(not torch.equal(results[0][layer], before[layer]) for layer in before)


def load_the_state_of_sgd() -> list[Any]:
    """Of a training without a sparsifier; then a scheduler changes the momentum."""
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), RATE, momentum=0.5, weight_decay=0.1)
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5), model.named_parameters()
    )
    optimizer.load_state_dict(plain.state_dict())
    found: list[Any] = []
    for momentum in (0.5, 0.4):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.zero_grad()
        loss_of(model, 0, zps.rank()).backward()
        found += [attempt(optimizer.step), optimizer.param_groups[0]["momentum"]]
    assert optimizer._correction is not None
    assert not optimizer._correction._corrected, "the next gradient may lie in the memory of the last one"
    return [*found, optimizer._correction._weight_decays]


def test_momentum_is_taken_again_from_a_loaded_state() -> None:
    with Cluster(1, 1, settings=WITH_MOMENTUM) as cluster:
        ((stepped, momentum, refused, _, weight_decays),) = cluster.run(load_the_state_of_sgd)
    assert (stepped, momentum, weight_decays) == (None, 0.0, [0.1])
    assert "momentum cannot change" in refused.text


def wrap_again_and_save(path: Path) -> list[Any]:
    """Wraps one optimizer twice; continues its state in another one."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), RATE, momentum=0.5, weight_decay=0.1)
    zps.DistributedOptimizer(sgd, model.named_parameters())
    optimizer = zps.DistributedOptimizer(sgd, model.named_parameters())
    state = optimizer.state_dict()
    other = torch.optim.SGD(model.parameters(), RATE)
    other.load_state_dict(state)
    wrapped = zps.DistributedOptimizer(other, model.named_parameters())
    found = []
    for each in (optimizer, wrapped):
        assert each._correction is not None
        found += [each._correction.momentum.factor, each._correction._weight_decays]
    return found


def test_momentum_outlives_a_second_wrapper_and_a_checkpoint(tmp_path: Path) -> None:
    with Cluster(1, 1, settings=WITH_MOMENTUM) as cluster:
        assert cluster.run(wrap_again_and_save, tmp_path) == [[0.5, [0.1], 0.5, [0.1]]]


def test_on_one_host_with_two_levels_the_optimizer_keeps_its_momentum(tmp_path: Path) -> None:
    sgd = {"momentum": 0.9, "weight_decay": 0.1}
    with Cluster(RANKS, settings=WITH_MOMENTUM | {"sync.levels": 2}) as cluster:
        results = cluster.run(train_with_dgc, tmp_path, sgd)
    expected = sgd_in_one_process(**sgd)
    for values, group in results:
        assert_close(values, expected)
        assert group["momentum"] == 0.9


def freeze_later() -> tuple[Tensor, Tensor]:
    """The first layer's weights when it is frozen, and in the end."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1), model.named_parameters()
    )
    before, first = torch.empty(0), model[0]
    assert isinstance(first, nn.Linear)
    for step in range(2 * STEPS):
        if step == STEPS:
            first.requires_grad_(requires_grad=False)
            before = first.weight.detach().clone()
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    return before, first.weight.detach()


def test_a_parameter_that_is_frozen_stays_as_it_is() -> None:
    with Cluster(2, settings=SETTINGS) as cluster:
        for before, after in cluster.run(freeze_later):
            assert torch.equal(before, after)


def refuse_others() -> list[Any]:
    """Optimizers whose momentum cannot be taken."""
    model = make_model()
    other = [
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD(
            [{"params": [p], "momentum": 0.1 * index} for index, p in enumerate(model.parameters())], RATE
        ),
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5, dampening=0.1),
    ]
    return [attempt(zps.DistributedOptimizer, each, model.named_parameters()) for each in other]


def test_dgc_refuses_what_it_cannot_take() -> None:
    with Cluster(1, 1, settings=WITH_MOMENTUM) as cluster:
        (refused,) = cluster.run(refuse_others)
    assert [each.kind for each in refused] == ["UsageError"] * 3
    assert refused[0].text == (
        "sync.sparsifier = dgc: expected torch.optim.SGD, whose momentum it takes, got Adam; "
        "use topk for other optimizers"
    )
    assert "expected one momentum for all" in refused[1].text
    assert "without dampening" in refused[2].text


def push_with_ddp(store: Path) -> Any:
    return attempt(train_with_ddp, store)


def test_dgc_refuses_ddp(tmp_path: Path) -> None:
    with Cluster(2, settings=WITH_MOMENTUM) as cluster:
        results = cluster.run(push_with_ddp, tmp_path / "store")
    for refused in results:
        assert "expected DistributedOptimizer, whose momentum it takes, got the DDP hook" in refused.text


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────


def train_in_two_jobs(directory: Path, begin: int, end: int, save_at: int) -> dict[str, Tensor]:
    """Trains from step ``begin`` to ``end``; loads everything first, and saves it before step ``save_at``."""
    model, path = make_model(), directory / f"rank{zps.rank()}.pt"
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), RATE, momentum=0.5, weight_decay=0.1), model.named_parameters()
    )
    if begin:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        zps.load_sparsifier_state_dict(saved["sparsifier"])
    for step in range(begin, end):
        if step == save_at:
            states = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
            torch.save(states | {"sparsifier": zps.sparsifier_state_dict()}, path)
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    optimizer.drain()
    return values_of(model)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scheme"), [*((name, "zenps") for name in sparsifier_names()[1:]), ("exdyna", "agsparse")]
)
def test_a_resumed_training_has_the_same_bits(tmp_path: Path, name: str, scheme: str) -> None:
    settings = SETTINGS | {"sync.sparsifier": name, "sync.scheme": scheme, "sparsifier.warmup_steps": 8}
    results = []
    for begin, save_at in ((0, STEPS // 2), (STEPS // 2, STEPS)):
        with Cluster(RANKS, settings=settings) as cluster:
            results += cluster.run(train_in_two_jobs, tmp_path, begin, STEPS, save_at)
    for values in results[1:]:
        assert all(torch.equal(values[layer], results[0][layer]) for layer in values)


def load_wrong_states(directory: Path, tensors: str) -> list[Any]:
    state = torch.load(directory / f"rank{zps.rank()}.pt")["sparsifier"]
    refused = [
        attempt(zps.load_sparsifier_state_dict, state | {what: wrong})
        for what, wrong in (("sparsifier", "topk"), ("rank", 7), ("world", 9))
    ]
    model = make_model()
    wrong = {name: each | {"residual": torch.zeros(5)} for name, each in state["tensors"].items()}
    zps.load_sparsifier_state_dict(state | {"tensors": {"other": {}} if tensors == "others" else wrong})
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE), model.named_parameters())
    loss_of(model, 0, zps.rank()).backward()
    return [*refused, attempt(optimizer.step)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ("others", "expected one of tensor 'optimizer0/bucket0/1', got other"),
        ("smaller", "5 elements of torch.float32, expected 2101 of torch.float64"),
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path: Path, tensors: str, reason: str) -> None:
    settings = SETTINGS | {"sync.sparsifier": "exdyna"}
    with Cluster(RANKS, settings=settings) as cluster:
        cluster.run(train_in_two_jobs, tmp_path, 0, 3, 2)
    with Cluster(RANKS, settings=settings) as cluster:
        refused = cluster.run(load_wrong_states, tmp_path, tensors)[1]
    assert [each.kind for each in refused] == ["UsageError"] * 4
    advice = "as here; load on each rank what it has saved, in a job with the same settings"
    assert [each.text for each in refused[:3]] == [
        f"sparsifier state: sparsifier is 'topk', expected 'exdyna', {advice}",
        f"sparsifier state: rank is 7, expected 1, {advice}",
        f"sparsifier state: world is 9, expected 3, {advice}",
    ]
    assert reason in refused[3].text


def load_anything() -> Any:
    assert zps.sparsifier_state_dict() == {}
    zps.load_sparsifier_state_dict({})
    return attempt(zps.load_sparsifier_state_dict, {"tensors": {}})


def test_without_a_sparsifier_there_is_no_state() -> None:
    with Cluster(1, 1) as cluster:
        (refused,) = cluster.run(load_anything)
    assert refused.text.endswith(
        "no gradient is sparsified here; set sync.sparsifier as in the job that saved it"
    )
