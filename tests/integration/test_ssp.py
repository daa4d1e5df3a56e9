"""``sync.consistency = ssp``: each step applies the averages of some steps before, whatever the timing."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prometheus_client import generate_latest
from torch import Tensor, nn

import zenps as zps
from tests.integration import test_sparsifiers
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, attempt, await_file
from tests.integration.embedding_model import (
    OPTIMIZERS,
    Model,
    assert_bits,
    assert_same,
    loss_of,
    make_model,
    state_of,
)
from tests.integration.scraping import Samples, parse
from tests.integration.test_levels import REACHED, start_on_two_hosts
from zenps import errors as zps_errors
from zenps.worker.process import PROCESS

LONG = pytest.mark.long
STEPS = 9
RANKS = 3

State = dict[str, Tensor]


def settings(staleness: int, **more: object) -> dict[str, object]:
    return {"sync.consistency": "ssp", "sync.staleness": staleness} | {
        name.replace("__", "."): value for name, value in more.items()
    }


def wrap(model: Model, name: str) -> list[zps.DistributedOptimizer]:
    wrapped = []
    for optimizer in OPTIMIZERS[name](model):
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        mine = [(each, parameter) for each, parameter in model.named_parameters() if parameter in own]
        wrapped.append(zps.DistributedOptimizer(optimizer, mine))
    return wrapped


def train(name: str, steps: int = STEPS, jitter_seconds: float = 0.0) -> tuple[State, State]:
    """The parameters before and after ``drain()``."""
    model = make_model()
    optimizers = wrap(model, name)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        time.sleep(jitter_seconds * ((7 * step + 3 * zps.rank()) % 5))
        loss_of(model, step, zps.rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
    before = state_of(model)
    for optimizer in optimizers:
        optimizer.drain()
    return before, state_of(model)


def train_in_one_process(name: str, staleness: int, ranks: int, steps: int = STEPS) -> tuple[State, State]:
    """The same, with gradients that wait in a queue."""
    model = make_model()
    optimizers = OPTIMIZERS[name](model)
    waiting: deque[list[Tensor | None]] = deque()

    def apply() -> None:
        for parameter, gradient in zip(model.parameters(), waiting.popleft(), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()

    for step in range(steps):
        model.zero_grad()
        (sum((loss_of(model, step, rank) for rank in range(ranks)), torch.zeros(())) / ranks).backward()
        waiting.append([parameter.grad for parameter in model.parameters()])
        if len(waiting) > staleness:
            apply()
    before = state_of(model)
    while waiting:
        apply()
    return before, state_of(model)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=LONG), RANKS])
@pytest.mark.parametrize(
    ("name", "staleness"),
    [
        ("momentum", 1),
        ("sparse adam and adam", 3),
        pytest.param("momentum", 3, marks=LONG),
        pytest.param("sparse adam and adam", 1, marks=LONG),
    ],
)
def test_each_step_applies_the_averages_of_some_steps_before(name: str, staleness: int, ranks: int) -> None:
    with Cluster(ranks, settings=settings(staleness)) as cluster:
        results = cluster.run(train, name)
    before, after = train_in_one_process(name, staleness, ranks)
    for got_before, got_after in results:
        assert_same(got_before, before)
        assert_same(got_after, after)
    assert_bits([got for _, got in results])


@pytest.mark.parametrize(
    "scheme",
    ["agsparse", *(pytest.param(each, marks=LONG) for each in ("zen", "byteps", "omnireduce", "auto"))],
)
def test_a_delay_works_under_every_scheme(scheme: str) -> None:
    with Cluster(2, settings=settings(2, sync__scheme=scheme)) as cluster:
        results = cluster.run(train, "sgd")
    for _, got in results:
        assert_same(got, train_in_one_process("sgd", 2, 2)[1])


def test_a_delay_of_no_step_is_bsp_bit_for_bit() -> None:
    found = []
    for chosen in ({}, settings(0)):
        with Cluster(2, settings=chosen) as cluster:
            found += [after for _, after in cluster.run(train, "adagrad")]
    assert_bits(found)


@pytest.mark.long
def test_timing_changes_no_bit() -> None:
    found = []
    for jitter_seconds in (0.0, 0.02):
        with Cluster(RANKS, settings=settings(2)) as cluster:
            found += [after for _, after in cluster.run(train, "adagrad", STEPS, jitter_seconds)]
    assert_bits(found)


def test_a_training_shorter_than_the_delay_applies_all_of_it_in_the_end() -> None:
    with Cluster(2, settings=settings(STEPS + 1)) as cluster:
        results = cluster.run(train, "sgd")
    for before, after in results:
        assert_bits([before, state_of(make_model())])
        assert_same(after, train_in_one_process("sgd", STEPS + 1, 2)[1])


def test_two_levels() -> None:
    with Cluster(4, 2, settings(2, sync__levels=2), server_settings=REACHED) as cluster:
        results = [worker.result() for worker in start_on_two_hosts(cluster, 4, train, "sgd")]
        cluster.drain()
    for _, after in results:
        assert_same(after, train_in_one_process("sgd", 2, 4)[1])


# ── the end of a training ───────────────────────────────────────────────────────────────────────


def train_and_leave() -> State:
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    zps.shutdown()
    return state_of(model)


def test_shutdown_applies_the_rest() -> None:
    with Cluster(2, settings=settings(3)) as cluster:
        results = cluster.run(train_and_leave)
    for after in results:
        assert_same(after, train_in_one_process("sgd", 3, 2)[1])


def fail_and_leave() -> tuple[State, State]:
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    before = state_of(model)
    try:
        raise RuntimeError("the training fails")
    except RuntimeError:
        zps.shutdown()
    return before, state_of(model)


def test_a_training_that_fails_leaves_its_weights_as_they_are() -> None:
    with Cluster(1, settings=settings(1)) as cluster:
        ((before, after),) = cluster.run(fail_and_leave)
    assert_bits([before, after])


def save_on_one_rank() -> Any:
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    if zps.rank() == 0:
        optimizer.state_dict()
    for step in range(3, 6):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        refused = attempt(optimizer.step)
    return refused, attempt(zps.shutdown)


def test_a_state_that_one_rank_alone_saves_is_an_error_on_all() -> None:
    with Cluster(2, settings=settings(2)) as cluster:
        results = cluster.run(save_on_one_rank)
    for refused, left in results:
        assert refused == Raised("MismatchError", refused.text)
        assert "pushed after 2 drained step(s) sparse" in refused.text
        assert left.kind == "MismatchError", "what is still in flight cannot be applied either"


def drain_at_the_wrong_point() -> list[Any]:
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    loss_of(model, 0, zps.rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1, zps.rank()).backward()
    found = [attempt(optimizer.drain), attempt(optimizer.state_dict)]
    optimizer.step()
    optimizer.drain()
    return found


def test_drain_between_backward_and_step_is_refused_and_leaves_the_step_as_it_is() -> None:
    with Cluster(1, settings=settings(1)) as cluster:
        (found,) = cluster.run(drain_at_the_wrong_point)
    assert [each.kind for each in found] == ["UsageError", "UsageError"]
    assert "expected it after step()" in found[0].text
    assert "call zero_grad() before" in found[0].text


def train_with_leftovers() -> State:
    """As a GAN's generator leaves gradients in its critic: in the end, ``join`` throws them away."""
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    with zps.join(optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, zps.rank()).backward()
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 0, zps.rank(), 1).backward()
    optimizer.drain()
    return state_of(model)


def leave_gradients_at_the_end() -> State:
    """As a GAN's generator leaves gradients in its critic after the last step."""
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 0, zps.rank(), 1).backward()
    optimizer.zero_grad()
    optimizer.drain()
    return state_of(model)


@pytest.mark.parametrize("staleness", [1, 3])
def test_zero_grad_before_drain_throws_away_what_is_left_and_no_step_before(staleness: int) -> None:
    with Cluster(2, settings=settings(staleness)) as cluster:
        results = cluster.run(leave_gradients_at_the_end)
    for after in results:
        assert_same(after, train_in_one_process("sgd", staleness, 2)[1])


@pytest.mark.parametrize("staleness", [1, 3])
def test_what_join_throws_away_loses_no_step_before(staleness: int) -> None:
    with Cluster(2, settings=settings(staleness)) as cluster:
        results = cluster.run(train_with_leftovers)
    for after in results:
        assert_same(after, train_in_one_process("sgd", staleness, 2)[1])


# ── losses and checkpoints ──────────────────────────────────────────────────────────────────────


LOST_AFTER = (5, 15)
"""Steps after which a server is lost."""


def train_past_losses(directory: Path, losses: int) -> tuple[State, int]:
    model = make_model()
    (optimizer,) = wrap(model, "adagrad")
    for step in range(30):
        if (before := step - 1) in LOST_AFTER[:losses]:
            await_file(directory / f"lost{before}")
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
        if zps.rank() == 0:
            (directory / f"step{step}").touch()
        time.sleep(0.02)
    optimizer.drain()
    world: Any = PROCESS.world
    return state_of(model), world._session.lease.view.ring_epoch


def test_servers_that_are_killed_or_leave_change_no_bit(tmp_path: Path) -> None:
    found = []
    for losses in (0, 2):
        directory = tmp_path / str(losses)
        directory.mkdir()
        with Cluster(RANKS, 4, settings(3), lease_seconds=LEASE_SECONDS) as cluster:
            workers = [
                cluster.start(train_past_losses, directory, losses, rank=rank) for rank in range(RANKS)
            ]
            for lost, step in enumerate(LOST_AFTER[:losses]):
                await_file(directory / f"step{step}")
                if lost:  # hands its slots over and ends
                    os.kill(cluster.servers[lost].pid, signal.SIGTERM)
                else:
                    cluster.servers[lost].kill()
                (directory / f"lost{step}").touch()
            results = [worker.result() for worker in workers]
        for state, ring_epoch in results:
            assert (ring_epoch > 1) == (losses > 0)
            found.append(state)
    assert_bits(found)


def train_until_one_is_lost(directory: Path) -> Any:
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    for step in range(1000):
        try:
            optimizer.zero_grad()
            loss_of(model, step, zps.rank()).backward()
            optimizer.step()
        except zps_errors.PeerLostError:
            return attempt(optimizer.drain), attempt(optimizer.state_dict)
        (directory / f"rank{zps.rank()}step{step}").touch()
        time.sleep(0.03)
    return None


def test_a_state_can_be_saved_after_a_worker_is_lost(tmp_path: Path) -> None:
    with Cluster(2, settings=settings(3), lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train_until_one_is_lost, tmp_path, rank=rank) for rank in range(2)]
        await_file(tmp_path / "rank1step5")
        workers[1].kill()
        drained, state = workers[0].result()
    assert drained is None
    assert state["zenps"]["step"] > 5


def train_on(
    model: Model, optimizer: zps.DistributedOptimizer, steps: Iterable[int], scale: float = 1
) -> None:
    for step in steps:
        optimizer.zero_grad()
        (loss_of(model, step, zps.rank()) * scale).backward()
        optimizer.step()


def go_back(fails: bool) -> list[State]:
    """The weights of a checkpoint, after it is loaded, and twice after three steps more."""
    model = make_model()
    (optimizer,) = wrap(model, "momentum")
    train_on(model, optimizer, range(3))
    saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    found = [state_of(model)]
    train_on(model, optimizer, range(3, 6))
    optimizer.drain()
    after = state_of(model)
    if fails:
        leave_out_a_step_on_one_rank(model, optimizer)
    else:
        train_on(model, optimizer, range(6, 9), scale=math.nan)
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    if fails:
        zps.broadcast_optimizer_state(optimizer)
    found.append(state_of(model))
    train_on(model, optimizer, range(3, 6))
    optimizer.drain()
    return [*found, after, state_of(model)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_that_a_running_job_loads_replaces_what_is_in_flight(fails: bool) -> None:
    with Cluster(2, settings=settings(2)) as cluster:
        results = cluster.run(go_back, fails)
    for saved, loaded, first, second in results:
        assert_bits([saved, loaded])
        assert_bits([first, second])


def leave_out_a_step_on_one_rank(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    """The other ranks take it, and all go on until they get the error, which later steps get as well."""
    loss_of(model, 0, zps.rank()).backward()
    if zps.rank() == 1:
        optimizer.zero_grad()
    else:
        optimizer.step()
    raised = [attempt(train_on, model, optimizer, [step]) for step in range(1, 4)]
    assert Raised("MismatchError", raised[-1].text) == raised[-1]


def refuse_a_step_on_one_rank(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    """It applies no averages, and so gets other weights and another momentum."""
    loss_of(model, 0, zps.rank()).backward()
    if zps.rank() == 1:
        for parameter in model.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.mul_(2)
        assert attempt(optimizer.step).kind == "UsageError"
        optimizer.zero_grad()
    else:
        optimizer.step()
    train_on(model, optimizer, [1, 2])


def change_the_momentum_on_one_rank(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    if zps.rank() == 1:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()


def make_equal_again(
    differ: Callable[[Model, zps.DistributedOptimizer], None], root_rank: int
) -> tuple[State, State, State]:
    """The weights after a broadcast of them, after one of the state, and after three steps more."""
    model = make_model()
    (optimizer,) = wrap(model, "momentum")
    train_on(model, optimizer, range(4))
    differ(model, optimizer)
    zps.broadcast_parameters(model.state_dict(), root_rank)
    weights = state_of(model)
    zps.broadcast_optimizer_state(optimizer, root_rank)
    with_state = state_of(model)
    train_on(model, optimizer, range(3))
    optimizer.drain()
    return weights, with_state, state_of(model)


@pytest.mark.parametrize(
    ("differ", "root_rank"),
    [
        (leave_out_a_step_on_one_rank, 0),
        (refuse_a_step_on_one_rank, 0),
        (change_the_momentum_on_one_rank, 0),
        pytest.param(refuse_a_step_on_one_rank, 1, marks=LONG),
    ],
)
def test_broadcasts_of_weights_and_state_make_ranks_equal_again(
    differ: Callable[[Model, zps.DistributedOptimizer], None], root_rank: int
) -> None:
    with Cluster(2, settings=settings(2)) as cluster:
        results = cluster.run(make_equal_again, differ, root_rank)
    assert_bits([each for weights, with_state, _ in results for each in (weights, with_state)])
    assert_bits([after for _, _, after in results])


def broadcast_with_leftovers_on_one_rank() -> list[Any]:
    model = make_model()
    (optimizer,) = wrap(model, "momentum")
    train_on(model, optimizer, range(3))
    if zps.rank() == 0:
        loss_of(model, 3, 0).backward()
    outcomes = [
        attempt(lambda: zps.broadcast_parameters(model.state_dict())),
        attempt(zps.broadcast_optimizer_state, optimizer),
    ]
    if zps.rank() == 1:
        loss_of(model, 3, 1).backward()
    attempt(optimizer.step)
    zps.broadcast_optimizer_state(optimizer)
    return outcomes


def test_a_rank_that_cannot_drain_keeps_no_other_from_its_broadcast() -> None:
    with Cluster(2, settings=settings(1, **{"cluster.deadline_seconds": 20})) as cluster:
        first, second = cluster.run(broadcast_with_leftovers_on_one_rank)
    assert [error.kind for error in first] == ["UsageError"] * 2
    assert all("not between backward and step" in error.text for error in first)
    assert second[0].kind == "MismatchError"
    assert "see errors there" in second[0].text
    assert second[1].kind == "UsageError"
    assert "rank 0 had nothing to broadcast" in second[1].text


def train_and_broadcast_buffers() -> tuple[State, State]:
    model, buffer = make_model(), torch.zeros(3)
    (optimizer,) = wrap(model, "sgd")
    for step in range(STEPS):
        train_on(model, optimizer, [step])
        zps.broadcast_parameters({"mean": buffer, "none": torch.zeros(0)})
    before = state_of(model)
    optimizer.drain()
    return before, state_of(model)


def test_a_broadcast_of_buffers_leaves_the_delay_as_it_is() -> None:
    with Cluster(2, settings=settings(2)) as cluster:
        results = cluster.run(train_and_broadcast_buffers)
    before, after = train_in_one_process("sgd", 2, 2)
    for got_before, got_after in results:
        assert_same(got_before, before)
        assert_same(got_after, after)


@pytest.mark.long
@pytest.mark.parametrize(("name", "saved_after"), [("exdyna", 2), ("exdyna", 8), ("dgc", 8)])
def test_a_resumed_training_has_the_same_bits(tmp_path: Path, name: str, saved_after: int) -> None:
    chosen = test_sparsifiers.SETTINGS | settings(3) | {"sync.sparsifier": name}
    found = []
    for begin in (0, saved_after):
        with Cluster(RANKS, settings=chosen) as cluster:
            save_at = saved_after if not begin else -1
            found += cluster.run(test_sparsifiers.train_in_two_jobs, tmp_path, begin, 14, save_at)
    assert_bits(found)


def train_with_a_layer_that_is_unused(directory: Path, begin: int) -> State:
    """Trains to step 4, whose gradients have one layer only; loads first, or saves at step 2."""
    path = directory / "saved.pt"
    model = nn.ParameterDict({"used": torch.zeros(8, 8), "unused": torch.zeros(8, 8)})
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), model.named_parameters())
    if begin:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        zps.load_sparsifier_state_dict(saved["sparsifier"])
    for step in range(begin, 4):
        if step == 2 and not begin:
            state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
            torch.save(state | {"sparsifier": zps.sparsifier_state_dict()}, path)
        optimizer.zero_grad()
        loss = model["used"].sum()
        if step < 3:
            loss = loss + 9 * model["unused"].sum()
        loss.backward()
        optimizer.step()
    optimizer.drain()
    return state_of(model)


def test_a_loaded_residual_of_an_unused_layer_is_applied(tmp_path: Path) -> None:
    """With a delay of one step, step 3 is the first that pushes what step 1 has left of the layer."""
    chosen = settings(1, sync__sparsifier="topk", sync__density=0.25, sparsifier__least_bytes=0)
    found = []
    for begin in (0, 2):
        with Cluster(1, 1, chosen) as cluster:
            found += cluster.run(train_with_a_layer_that_is_unused, tmp_path, begin)
    assert_bits(found)


def test_a_loaded_state_may_be_that_of_a_job_without_a_delay(tmp_path: Path) -> None:
    state = torch.optim.SGD(make_model().parameters(), 0.25).state_dict()
    with Cluster(1, settings=settings(1)) as cluster:
        (found,) = cluster.run(load_and_save, state)
    assert found["param_groups"][0]["lr"] == 0.25
    assert found["zenps"] == {"step": 0}


def load_and_save(state: dict[str, Any]) -> dict[str, Any]:
    (optimizer,) = wrap(make_model(), "sgd")
    optimizer.load_state_dict(state)
    return optimizer.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("name", ["topk", "exdyna", "dgc"])
def test_sparsified_ranks_are_equal_and_learn(name: str) -> None:
    chosen = test_sparsifiers.SETTINGS | settings(2) | {"sync.sparsifier": name, "sync.values": "int8"}
    with Cluster(RANKS, settings=chosen) as cluster:
        results = cluster.run(test_sparsifiers.train_floats)
    (first, before, after), *others = results
    assert after < 0.85 * before
    assert_bits([first, *(values for values, _, _ in others)])


# ── what is seen of it ──────────────────────────────────────────────────────────────────────────


def train_and_see() -> tuple[Samples, dict[str, float]]:
    model = make_model()
    (optimizer,) = wrap(model, "sgd")
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, zps.rank()).backward()
        optimizer.step()
    world: Any = PROCESS.world
    seen = parse(generate_latest(world._session.metrics._registry).decode()), world._session.statistics.load()
    optimizer.drain()
    return seen


def test_metrics_status_and_timeline_have_the_staleness(tmp_path: Path) -> None:
    with Cluster(1, settings=settings(2, sync__trace=tmp_path / "trace.json")) as cluster:
        ((metrics, load),) = cluster.run(train_and_see)
    assert metrics["zenps_staleness_steps", ""] == load["staleness"] == 2
    (part,) = tmp_path.glob("trace.worker.*.json")
    applied = [event["args"] for event in json.loads(part.read_text()) if event["name"] == "apply"]
    assert [args["step"] for args in applied[2:]] == [0, 1, 2, 3]
    assert {args["staleness"] for args in applied} == {2}


# ── elastic jobs ────────────────────────────────────────────────────────────────────────────────


def train_elastically(directory: Path) -> State:
    """Ends when another has the place of the lost worker."""
    model = make_model()
    (optimizer,) = wrap(model, "adagrad")
    state = zps.TrainingState(model, [optimizer], step=0)
    # Until a worker has the view without the lost one, its size is that from before the loss.
    while state.step < 40 or zps.size() < 2 or epoch() == 1:
        if state.step == 6:
            await_file(directory / "killed")
        optimizer.zero_grad()
        loss_of(model, state.step, zps.rank()).backward()
        optimizer.step()
        state.step += 1
        (directory / f"rank{zps.rank()}step{state.step}").touch()
        time.sleep(0.05)
        state.commit()
    optimizer.drain()
    return state_of(model)


def epoch() -> int:
    """That of this worker's view."""
    world: Any = PROCESS.world
    return int(world._session.lease.view.epoch)


@pytest.mark.long
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    chosen = settings(2, cluster__on_worker_loss="continue")
    with Cluster(2, settings=chosen, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train_elastically, tmp_path, rank=rank) for rank in range(2)]
        await_file(tmp_path / "rank1step5")
        workers[1].kill()
        (tmp_path / "killed").touch()
        cluster.await_epoch(2)
        joining = cluster.start(train_elastically, tmp_path)
        results = [workers[0].result(), joining.result()]
        cluster.drain()
    assert_bits(results)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────


def attempt_ddp(store: Path) -> Any:
    """What backward raises with the hook, on the only rank."""
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    ddp.register_comm_hook(None, zps.comm_hook)
    raised = attempt(ddp(torch.ones(3)).sum().backward)
    dist.destroy_process_group()
    return raised


def use_what_is_refused(store: Path) -> list[Any]:
    model = nn.Linear(3, 1)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3)).sum()).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        found = [attempt(scaler.step, optimizer)]
        optimizer.step()
    found.append(attempt_ddp(store))
    return found


def test_scalers_and_ddp_are_refused(tmp_path: Path) -> None:
    with Cluster(1, settings=settings(2)) as cluster:
        (found,) = cluster.run(use_what_is_refused, tmp_path / "store")
    assert "expected gradients of this step, got those of 2 steps before" in found[0].text
    assert "expected sync.consistency = bsp, got ssp with sync.staleness = 2" in found[1].text


def wrap_one_with_momentum() -> None:
    wrap(make_model(), "momentum")


def test_a_warning_names_staleness_and_momentum() -> None:
    with Cluster(1, settings=settings(2)) as cluster:
        worker = cluster.start(wrap_one_with_momentum)
        worker.result()
        assert "sync.staleness = 2 with momentum = 0.9: diverges if" in worker.log
