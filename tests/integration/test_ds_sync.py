"""``sync.consistency = ds-sync``: ranks step alone, and average their models in groups that change."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster, attempt, await_file
from tests.integration.embedding_model import assert_bits, state_of
from tests.integration.interrupts import interrupted_in
from tests.integration.scraping import Samples, parse
from tests.integration.test_ssp import attempt_ddp
from zenps.worker.backends.peers.schedule import make_cycle
from zenps.worker.core.pending import Pending
from zenps.worker.process import PROCESS

LONG = pytest.mark.long
STEPS = 7
SETTINGS: dict[str, object] = {"sync.consistency": "ds-sync"}

State = dict[str, Tensor]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3).double()).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1))


def optimize(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def wrap(model: nn.Module) -> zps.DistributedOptimizer:
    return zps.DistributedOptimizer(
        optimize(model), model.named_parameters(), named_buffers=model.named_buffers()
    )


def train(steps: int = STEPS, jitter_seconds: float = 0.0) -> tuple[State, State, zps.Stats]:
    """The model before and after ``average_parameters()``."""
    model = make_model()
    optimizer = wrap(model)
    for step in range(steps):
        time.sleep(jitter_seconds * ((5 * step + zps.rank()) % 3))
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    before = state_of(model)
    zps.average_parameters()
    return before, state_of(model), zps.stats()


def average_models(models: Sequence[nn.Module], takers: Sequence[nn.Module]) -> None:
    """Gives the average of some models to those that take it."""
    states = [model.state_dict() for model in models]
    for name, first in states[0].items():
        if first.is_floating_point():
            mean = torch.stack([state[name] for state in states]).mean(0)
            for taker in takers:
                taker.state_dict()[name].copy_(mean)


def train_in_one_process(ranks: int, group: int) -> tuple[list[State], State]:
    models = [make_model() for _ in range(ranks)]
    optimizers = [optimize(model) for model in models]
    cycle = make_cycle(ranks, group, seed=0x5A454E)
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        for members in cycle[step % len(cycle)]:
            together = [models[rank] for rank in members]
            average_models(together, together)
    before = [state_of(model) for model in models]
    average_models(models, models)
    return before, state_of(models[0])


@pytest.mark.parametrize(
    ("ranks", "group"),
    [(1, 2), pytest.param(2, 2, marks=LONG), (3, 2), (4, 2), pytest.param(5, 2, marks=LONG)],
)
def test_ranks_train_as_models_of_one_process_that_are_averaged(ranks: int, group: int) -> None:
    with Cluster(ranks, settings=SETTINGS | {"sync.group": group}) as cluster:
        results = cluster.run(train)
    before, after = train_in_one_process(ranks, group)
    for rank, (got_before, got_after, _) in enumerate(results):
        torch.testing.assert_close(got_before, before[rank], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(got_after, after, rtol=1e-9, atol=1e-12)
    assert_bits([got for _, got, _ in results])
    if ranks == 4:
        model_bytes = sum(value.nbytes for value in before[0].values() if value.is_floating_point())
        sent = STEPS * (model_bytes + 16)
        assert all(stats.peer_rounds == STEPS for _, _, stats in results)
        assert all(sent <= stats.pushed_bytes <= sent + 2 * model_bytes for _, _, stats in results)


@pytest.mark.long
def test_timing_changes_no_bit() -> None:
    found: list[list[State]] = []
    for jitter_seconds in (0.0, 0.02):
        with Cluster(4, settings=SETTINGS) as cluster:
            found.append([before for before, _, _ in cluster.run(train, STEPS, jitter_seconds)])
    for one, other in zip(*found, strict=True):
        assert_bits([one, other])


@pytest.mark.parametrize(
    "scheme", ["agsparse", *(pytest.param(each, marks=LONG) for each in ("byteps", "auto"))]
)
def test_every_scheme_averages_over_all(scheme: str) -> None:
    with Cluster(2, settings=SETTINGS | {"sync.scheme": scheme}) as cluster:
        results = cluster.run(train)
    _, after = train_in_one_process(2, 2)
    for _, got, _ in results:
        torch.testing.assert_close(got, after, rtol=1e-9, atol=1e-12)


def train_in_two_jobs(directory: Path, begin: int, end: int) -> State:
    model, path = make_model(), directory / f"rank{zps.rank()}.pt"
    optimizer = wrap(model)
    if begin:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return state_of(model)


def test_a_training_that_each_rank_resumes_has_the_same_bits(tmp_path: Path) -> None:
    """Three of the schedules of two come before: the fourth is the second one again."""
    found = []
    for bounds in ([0, 6], [0, 3, 6]):
        for begin, end in pairwise(bounds):
            with Cluster(4, settings=SETTINGS) as cluster:
                results = cluster.run(train_in_two_jobs, tmp_path, begin, end)
        found.append(results)
    for one, other in zip(*found, strict=True):
        assert_bits([one, other])


# ── what is seen of it ──────────────────────────────────────────────────────────────────────────


def train_and_scrape() -> tuple[Samples, dict[str, float]]:
    train()
    world: Any = PROCESS.world
    metrics = parse(generate_latest(world._session.metrics._registry).decode())
    return metrics, world._session.statistics.load()


def test_metrics_status_and_timeline_have_groups_and_distances(tmp_path: Path) -> None:
    with Cluster(4, settings=SETTINGS | {"sync.trace": tmp_path / "trace.json"}) as cluster:
        results = cluster.run(train_and_scrape)
    for rank, (metrics, load) in enumerate(results):
        assert metrics["zenps_group_workers", ""] == 2
        assert 0 < metrics["zenps_group_distance_ratio", ""] < 1
        assert 0 < metrics["zenps_consensus_distance_ratio", ""] < 1
        assert load["group"] == min(rank, rank ^ 1)  # of the seventh step, whose groups are neighbours
        assert load["distance"] == metrics["zenps_group_distance_ratio", ""]
        assert load["step"] == STEPS - 1
    events = [json.loads(part.read_text()) for part in tmp_path.glob("trace.worker.*.json")]
    groups = [[each["args"]["group"] for each in some if each.get("cat") == "average"] for some in events]
    schedules = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    assert len(groups) == 4
    for of_rank in groups:
        assert len(of_rank) == STEPS
        assert all(group in schedules[step % 2] for step, group in enumerate(of_rank))


# ── what is refused, and what fails ─────────────────────────────────────────────────────────────


def use_what_is_refused(store: Path) -> list[Any]:
    sparse = nn.Embedding(9, 3, sparse=True)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(sparse.parameters(), 0.1), sparse.named_parameters())
    sparse(torch.tensor([1, 2])).sum().backward()
    found = [attempt(optimizer.step)]
    model = make_model()
    found.append(attempt(zps.DistributedOptimizer, optimize(model), model.named_parameters(), average=False))
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0, 0)).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        found.append(attempt(scaler.step, optimizer))
    found.append(attempt_ddp(store))
    return found


def test_what_cannot_be_averaged_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with Cluster(1, settings=SETTINGS) as cluster:
        (found,) = cluster.run(use_what_is_refused, tmp_path / "store")
    assert [each.kind for each in found[:3]] == ["UsageError"] * 3
    assert "has a sparse gradient: expected a dense one" in found[0].text
    assert "average = False: expected True" in found[1].text
    assert "expected that all ranks step" in found[2].text
    assert "expected sync.consistency = bsp, got ds-sync" in found[3].text


def wrap_another_model() -> Any:
    return attempt(wrap, nn.Linear(3, 2 + zps.rank()))


def test_models_that_differ_are_an_error_on_all_ranks() -> None:
    with Cluster(2, settings=SETTINGS) as cluster:
        results = cluster.run(wrap_another_model)
    assert {refused.kind for refused in results} == {"MismatchError"}


def step_unequally_often() -> Any:
    model = make_model()
    optimizer = wrap(model)
    loss_of(model, 0, 0).backward()
    if zps.rank() == 1:
        optimizer._consistency.step = 1
    return attempt(optimizer.step), attempt(optimizer.step)


def test_ranks_that_step_unequally_often_are_noticed() -> None:
    with Cluster(2, settings=SETTINGS) as cluster:
        results = cluster.run(step_unequally_often)
    for first, second in results:
        assert first.kind == second.kind == "MismatchError"
        assert "expected that all ranks step equally often" in first.text


def train_until_one_is_late() -> Any:
    model = make_model()
    optimizer = wrap(model)
    for step in range(4):
        if (zps.rank(), step) == (1, 2):
            time.sleep(8)
        loss_of(model, step, zps.rank()).backward()
        result = attempt(optimizer.step)
        if result is not None:
            return result
    return None


@pytest.mark.long
def test_a_rank_that_comes_too_late_is_named() -> None:
    with Cluster(2, settings=SETTINGS | {"cluster.deadline_seconds": 3}) as cluster:
        workers = [cluster.start(train_until_one_is_late, rank=rank) for rank in range(2)]
        first, second = (worker.result() for worker in workers)
    assert first.kind == "DeadlineError"
    assert "step 2: not averaged with rank(s) 1" in first.text
    assert first.text.endswith("; see their logs")
    assert second.kind in ("PeerLostError", "DeadlineError")


@pytest.mark.long
def test_a_stall_says_whose_models_are_waited_for() -> None:
    with Cluster(2, settings=SETTINGS | {"cluster.stall_seconds": 1}, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train_until_one_is_late, rank=rank) for rank in range(2)]
        until = time.monotonic() + DEADLINE_SECONDS
        while "models of rank(s) 1, step 2" not in cluster.status().stall:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert [worker.result() for worker in workers] == [None, None]


def train_for_long(directory: Path) -> Any:
    model = make_model()
    optimizer = wrap(model)
    for step in range(10_000):
        loss_of(model, step, zps.rank()).backward()
        result = attempt(optimizer.step)
        if result is not None:
            return result, attempt(optimizer.step)
        (directory / f"rank{zps.rank()}step{step}").touch()
        time.sleep(0.05)
    return None


def test_a_worker_that_is_killed_ends_the_job_with_its_name(tmp_path: Path) -> None:
    with Cluster(4, settings=SETTINGS, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train_for_long, tmp_path, rank=rank) for rank in range(4)]
        await_file(tmp_path / "rank2step3")
        workers[2].kill()
        results = [workers[rank].result() for rank in (0, 1, 3)]
    for first, second in results:
        assert first.kind == second.kind == "PeerLostError"
        assert "worker 2" in first.text


def interrupt_and_go_on(directory: Path) -> State:
    """Rank 0 is interrupted while it waits for rank 1; then both go on."""
    model = make_model()
    optimizer = wrap(model)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        if (zps.rank(), step) == (1, 2):
            await_file(directory / "interrupted")
        if (zps.rank(), step) == (0, 2):
            with interrupted_in(Pending.wait):
                optimizer.step()
            (directory / "interrupted").touch()
        else:
            optimizer.step()
    zps.average_parameters()
    return state_of(model)


def test_ctrl_c_ends_a_wait_and_training_can_go_on(tmp_path: Path) -> None:
    """Rank 0 goes on with its own model of step 2, and rank 1 with the average."""
    with Cluster(2, settings=SETTINGS) as cluster:
        results = cluster.run(interrupt_and_go_on, tmp_path)
    models = [make_model(), make_model()]
    optimizers = [optimize(model) for model in models]
    for step in range(6):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        average_models(models, takers=models[1:] if step == 2 else models)
    assert_bits(results)
    torch.testing.assert_close(results[0], state_of(models[0]), rtol=1e-9, atol=1e-12)
