"""Servers and schedulers that die, join and leave while a model trains: its weights keep their bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import (
    DEADLINE_SECONDS,
    LEASE_SECONDS,
    Cluster,
    Process,
    Raised,
    attempt,
    await_file,
)
from tests.integration.embedding_model import OPTIMIZERS, loss_of, make_model, state_of
from tests.integration.progress import await_step, report, step_of
from zenps.cli.status import drain
from zenps.config.settings import ClusterConfig
from zenps.schemes.registry import schemes

STEPS = 60
STEP_SECONDS = 0.03
"""Training would otherwise be over before anything can happen to it."""

State = dict[str, Tensor]


def train(path: Path, until: Path | None = None) -> State:
    """Trains, and says how far it is; after STEPS it goes on with barriers until the file is there."""
    model = make_model()
    optimizers = [
        zps.DistributedOptimizer(optimizer, model.named_parameters())
        for optimizer in OPTIMIZERS["sparse adam and adam"](model)
    ]
    big = torch.zeros(70_000)
    for step in range(STEPS):
        loss_of(model, step, zps.rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # Large enough to be split over all servers.
        big += zps.push_pull(torch.full((70_000,), float(step + zps.rank())), "big")
        report(path, zps.rank(), step)
        time.sleep(STEP_SECONDS)
    step = STEPS
    while until is not None and not _all_have_seen(until):
        zps.barrier()
        report(path, zps.rank(), step := step + 1)
        time.sleep(STEP_SECONDS)
    return state_of(model) | {"big": big}


def _all_have_seen(file: Path) -> bool:
    return bool(zps.push_pull(torch.tensor([float(file.exists())]), "seen", average=False) == zps.size())


class Training:
    """Two workers that train on a cluster to which things happen."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster = cluster
        self._path = path
        self._until = path / "until"
        self.workers = [cluster.start(train, path, self._until, rank=rank) for rank in range(2)]
        self.await_steps(5)

    def await_steps(self, more: int) -> None:
        """Waits until both have done so many more."""
        for rank in range(2):
            await_step(self._path, rank, step_of(self._path, rank) + more, self.workers[rank])

    def finish(self, codes: dict[str, int] | None = None) -> list[State]:
        """Waits for the end of all; ``codes`` are those of processes that do not end with 0."""
        self._until.touch()
        states: list[State] = [worker.result() for worker in self.workers]
        for process in (*self.cluster.servers, self.cluster.scheduler):
            expected = (codes or {}).get(process.name, 0)
            assert process.wait() == expected, f"{process.name}:\n{process.log}"
        return states


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The weights of a run to which nothing happens."""
    with Cluster() as cluster:
        first, second = cluster.run(train, tmp_path_factory.mktemp("undisturbed"))
    _assert_equal(first, second)
    state: State = first
    return state


def _assert_equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    different = [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]
    assert not different


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(servers=3, lease_seconds=LEASE_SECONDS) as cluster:
        yield cluster


def stop(process: Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        pytest.param(Process.kill, -signal.SIGKILL, id="kill -9"),
        pytest.param(stop, 1, id="stopped", marks=pytest.mark.long),
    ],
)
def test_survivors_take_a_lost_servers_slots(
    cluster: Cluster, tmp_path: Path, undisturbed: State, harm: Callable[[Process], None], code: int
) -> None:
    training = Training(cluster, tmp_path)
    victim = cluster.servers[1]
    harm(victim)
    cluster.await_epoch(2)
    training.await_steps(5)
    slots = {node.rank: (node.state, node.slots) for node in cluster.nodes("server")}
    (lost,) = [rank for rank, (state, _) in slots.items() if state == "lost"]
    assert slots.pop(lost) == ("lost", 0)
    assert set(slots.values()) == {("present", 2048)}
    os.kill(victim.pid, signal.SIGCONT) if victim.alive else None
    for state in training.finish({victim.name: code}):
        _assert_equal(state, undisturbed)
    if code == 1:
        assert f"was silent for more than its lease of {LEASE_SECONDS:g} s; start it again" in victim.log
    assert f"server {lost} (host" in cluster.scheduler.log


@pytest.mark.long
@pytest.mark.parametrize(
    "scheme", [scheme.name for scheme in schemes() if scheme.engine == "servers" and scheme.name != "zenps"]
)
def test_a_server_is_lost_under_the_other_schemes_over_servers(
    scheme: str, tmp_path: Path, undisturbed: State
) -> None:
    """All of them add in the order of ranks."""
    settings = {"sync.scheme": scheme}
    with Cluster(servers=3, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        training = Training(cluster, tmp_path)
        cluster.servers[1].kill()
        cluster.await_epoch(2)
        training.await_steps(5)
        for state in training.finish({"server1": -signal.SIGKILL}):
            _assert_equal(state, undisturbed)


def push_much(path: Path, until: Path) -> float:
    """Rank 0 has a gibibyte in flight, and waits for it once the file is there; rank 1 pushes it then."""
    tensors = [torch.full((16 << 20,), float(number)) for number in range(16)]
    handles = [zps.push_pull_async(tensors[0], "t0")]
    if zps.rank() == 0:
        handles += [zps.push_pull_async(tensor, f"t{n}") for n, tensor in enumerate(tensors) if n]
    (path / f"pushed{zps.rank()}").touch()
    await_file(until)
    if zps.rank() == 1:
        handles += [zps.push_pull_async(tensor, f"t{n}") for n, tensor in enumerate(tensors) if n]
    results = [zps.synchronize(handle) for handle in handles]
    return float(sum(result[::4096].sum() for result in results))


@pytest.mark.long
def test_a_gibibyte_in_flight_delays_no_heartbeat_when_a_server_is_lost(tmp_path: Path) -> None:
    """Nobody waits for it: it is sharded, copied and pushed again by the worker's own threads."""
    until, long_seconds = tmp_path / "until", 2 * DEADLINE_SECONDS
    settings = {"cluster.deadline_seconds": long_seconds}
    with Cluster(servers=2, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_much, tmp_path, until, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"pushed{rank}")
        cluster.servers[0].kill()
        cluster.await_epoch(2)
        time.sleep(2 * LEASE_SECONDS)
        until.touch()
        assert [worker.result(long_seconds) for worker in workers] == [4096 * sum(range(16))] * 2


@pytest.mark.long
def test_the_last_servers_successor_is_waited_for(tmp_path: Path, undisturbed: State) -> None:
    with Cluster(servers=1, lease_seconds=LEASE_SECONDS) as cluster:
        training = Training(cluster, tmp_path)
        cluster.servers[0].kill()
        cluster.await_epoch(2)
        cluster.add_server()
        training.await_steps(5)
        for state in training.finish({"server0": -signal.SIGKILL}):
            _assert_equal(state, undisturbed)


def test_servers_join_and_leave_while_a_job_trains(tmp_path: Path, undisturbed: State) -> None:
    with Cluster(servers=1, lease_seconds=LEASE_SECONDS) as cluster:
        training = Training(cluster, tmp_path)
        for count in (2, 3, 4):
            cluster.add_server()
            cluster.await_epoch(count)
            training.await_steps(2)
        assert [node.slots for node in cluster.nodes("server")] == [1024] * 4
        address = ClusterConfig(scheduler=cluster.address)
        for rank in (0, 1, 3):
            drain(address, rank, DEADLINE_SECONDS)
            training.await_steps(2)
        assert [(n.rank, n.slots) for n in cluster.nodes("server") if n.state == "present"] == [(2, 4096)]
        for state in training.finish():
            _assert_equal(state, undisturbed)


@pytest.mark.long
def test_a_server_that_is_told_to_end_leaves_nothing_undone(tmp_path: Path, undisturbed: State) -> None:
    with Cluster(servers=3, lease_seconds=DEADLINE_SECONDS) as cluster:
        training = Training(cluster, tmp_path)
        begin = time.monotonic()
        os.kill(cluster.servers[0].pid, signal.SIGINT)
        cluster.await_epoch(2)
        assert time.monotonic() - begin < DEADLINE_SECONDS / 2, "it said so"
        training.await_steps(5)
        for state in training.finish({"server0": 1}):
            _assert_equal(state, undisturbed)


def test_a_job_goes_on_without_its_scheduler_which_returns(
    cluster: Cluster, tmp_path: Path, undisturbed: State
) -> None:
    training = Training(cluster, tmp_path)
    before = cluster.status()
    cluster.scheduler.kill()
    training.await_steps(10)
    cluster.restart_scheduler()
    cluster.await_state("running")
    after = cluster.status()
    assert after.epoch == before.epoch, "nothing has changed"
    assert [(n.role, n.rank, n.pid, n.slots) for n in after.nodes[1:]] == [
        (n.role, n.rank, n.pid, n.slots) for n in before.nodes[1:]
    ]
    # Those who train on wait at barriers, which only it can open.
    training.await_steps(STEPS // 2)
    for state in training.finish():
        _assert_equal(state, undisturbed)


def test_a_scheduler_that_returns_with_other_settings_ends_and_the_job_waits_for_another(
    cluster: Cluster, tmp_path: Path, undisturbed: State
) -> None:
    training = Training(cluster, tmp_path)
    cluster.scheduler.kill()
    cluster.restart_scheduler(sync__partition="parallel", sync__seed=1)
    assert cluster.scheduler.wait() == 1
    assert (
        "sync.partition is 'parallel' here and 'balanced' there; sync.seed is 1 here" in cluster.scheduler.log
    )
    assert "start the scheduler with the settings of that job" in cluster.scheduler.log
    cluster.restart_scheduler()
    cluster.await_state("running")
    for state in training.finish():
        _assert_equal(state, undisturbed)


@pytest.mark.long
def test_what_happened_while_the_scheduler_was_away_is_noticed(
    cluster: Cluster, tmp_path: Path, undisturbed: State
) -> None:
    training = Training(cluster, tmp_path)
    cluster.scheduler.kill()
    cluster.servers[0].kill()
    cluster.restart_scheduler()
    cluster.await_epoch(2)
    training.await_steps(5)
    for state in training.finish({"server0": -signal.SIGKILL}):
        _assert_equal(state, undisturbed)


def sum_of_ranks() -> float:
    return float(zps.push_pull(torch.tensor([zps.rank() + 1.0]), "sum", average=False))


def test_a_server_of_a_dead_job_does_not_keep_the_next_from_beginning(tmp_path: Path) -> None:
    """It waits for its scheduler, and knows the members of its own job."""
    with Cluster(servers=2, lease_seconds=LEASE_SECONDS) as cluster:
        training = Training(cluster, tmp_path)
        left_over, other = cluster.servers
        for process in (cluster.scheduler, *training.workers, other):
            process.kill()
        begin = time.monotonic()
        cluster.restart_scheduler()
        cluster.await_state("recovering")
        servers = [cluster.add_server() for _ in range(2)]
        workers = [cluster.start(sum_of_ranks, rank=rank) for rank in range(2)]
        assert [worker.result() for worker in workers] == [3.0, 3.0]
        assert [process.wait() for process in (*servers, cluster.scheduler)] == [0, 0, 0]
        assert left_over.wait() == 1
        assert "another job of this name has begun" in left_over.log
        assert time.monotonic() - begin < DEADLINE_SECONDS / 2


def test_workers_that_wait_are_told_when_the_scheduler_ends(tmp_path: Path) -> None:
    with Cluster(servers=1, lease_seconds=LEASE_SECONDS) as cluster:
        waiting = cluster.start(attempt_to_join, init=False)
        until = time.monotonic() + DEADLINE_SECONDS
        while not cluster.nodes("worker"):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(cluster.scheduler.pid, signal.SIGINT)
        assert waiting.result().text == "the scheduler was told to end"


def attempt_to_join() -> Raised:
    raised = attempt(zps.init)
    assert isinstance(raised, Raised)
    return raised


UNREAD = 400
COMPUTE_SECONDS = 6.0
"""Longer than two of libzmq's heartbeat intervals: the first finds the connection gone."""


def push_and_compute(path: Path) -> list[float]:
    """Leaves hundreds of results unread while a server dies; afterwards waits for them all."""
    handles = [
        zps.push_pull_async(torch.full((4096,), float(number + zps.rank())), f"t{number}", average=False)
        for number in range(UNREAD)
    ]
    (path / f"pushed{zps.rank()}").touch()
    time.sleep(COMPUTE_SECONDS)
    return [float(handle.wait().mean()) for handle in handles]


@pytest.mark.long
@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 20], ids=["room", "little room"])
def test_a_server_is_killed_while_hundreds_of_results_are_unread(tmp_path: Path, budget_bytes: int) -> None:
    # The default lease: nodes are not lost before the workers have computed for a while.
    with Cluster(2, 2, {"cluster.server_budget_bytes": budget_bytes}) as cluster:
        workers = [cluster.start(push_and_compute, tmp_path, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"pushed{rank}")
        time.sleep(1)
        cluster.servers[0].kill()
        for worker in workers:
            assert worker.result() == [2.0 * number + 1 for number in range(UNREAD)]
