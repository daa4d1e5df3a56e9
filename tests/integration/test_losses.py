"""Waits that end without what was waited for: the error names who is missing or lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, attempt, await_file, await_ranks
from tests.integration.scripts import run_script
from zenps.worker.process import PROCESS

RENDEZVOUS_SECONDS = 4.0
SLACK_SECONDS = 10.0
"""What a machine that is busy with others may add to the lease."""


def miss(missed: Path) -> dict[str, Any]:
    """Rank 1 misses a barrier and a push; afterwards the ranks are in step again."""
    outcomes: dict[str, Any] = {}
    if zps.rank() == 1:
        await_file(missed)
    push = zps.push_pull_async(torch.ones(3), "x")
    if zps.rank() == 0:
        outcomes["barrier"] = attempt(zps.barrier)
    outcomes["push"] = attempt(push.wait)
    if zps.rank() == 0:
        missed.touch()
    await_ranks(missed.with_name("ready"))
    outcomes["next"] = zps.push_pull(torch.ones(3), "x")
    return outcomes


def test_deadlines_name_who_is_missing(tmp_path: Path) -> None:
    with Cluster(settings={"cluster.deadline_seconds": LEASE_SECONDS}) as cluster:
        first, second = (cluster.start(miss, tmp_path / "missed", rank=rank) for rank in range(2))
        on_time, late = first.result(), second.result()
    within = f"within {LEASE_SECONDS:g} s"
    assert on_time["barrier"].kind == "DeadlineError"
    assert f"barrier 1: not reached {within} by worker 1 (host" in on_time["barrier"].text
    assert on_time["push"].kind == "DeadlineError"
    assert f"tensor 'x', step 0: no push {within} from rank(s) 1" in on_time["push"].text
    assert late["push"].kind == "DeadlineError", "the late rank learns that its round has failed"
    assert torch.equal(on_time["next"], torch.ones(3))
    assert torch.equal(late["next"], torch.ones(3))


# ── losses ──────────────────────────────────────────────────────────────────────────────────────


def wait_for_the_dead(name: str) -> tuple[Any, float]:
    """What a wait raises, and when."""
    if zps.rank() == 1:
        time.sleep(60)
    calls: dict[str, Callable[[], Any]] = {
        "push": lambda: zps.push_pull(torch.ones(100_003), "x"),
        "barrier": zps.barrier,
    }
    error = attempt(calls[name])
    return error, time.time()


@pytest.mark.parametrize("wait", ["push", pytest.param("barrier", marks=pytest.mark.long)])
def test_a_killed_worker_is_named_within_its_lease(wait: str) -> None:
    with Cluster(lease_seconds=LEASE_SECONDS) as cluster:
        survivor = cluster.start(wait_for_the_dead, wait, rank=0)
        victim = cluster.start(wait_for_the_dead, wait, rank=1)
        cluster.await_state("running")
        time.sleep(0.5)
        victim.kill()
        killed_at = time.time()
        error, raised_at = survivor.result()
        assert error.kind == "PeerLostError"
        assert f"worker 1 (host {socket.gethostname()}, pid {victim.pid}) is lost" in error.text
        assert raised_at - killed_at < LEASE_SECONDS + SLACK_SECONDS
        for process in (*cluster.servers, cluster.scheduler):
            assert process.wait() != 0
            assert "worker 1 (host" in process.log


def push_forever() -> tuple[Any, float]:
    while True:
        outcome = attempt(zps.push_pull, torch.ones(100_003), "x")
        if isinstance(outcome, Raised):
            return outcome, time.time()


@pytest.mark.long
def test_the_last_server_is_named_if_no_other_comes() -> None:
    settings = {"cluster.rendezvous_seconds": RENDEZVOUS_SECONDS}
    with Cluster(servers=1, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_forever, rank=rank) for rank in range(2)]
        cluster.await_state("running")
        time.sleep(0.5)
        victim = cluster.servers[0]
        victim.kill()
        killed_at = time.time()
        for worker in workers:
            error, raised_at = worker.result()
            assert error.kind == "PeerLostError"
            assert "server" in error.text
            assert f"(host {socket.gethostname()}, pid {victim.pid}) is gone" in error.text
            assert raised_at - killed_at < LEASE_SECONDS + RENDEZVOUS_SECONDS + SLACK_SECONDS
        assert cluster.scheduler.wait() != 0


def leave_early() -> Any:
    if zps.rank() == 1:
        return None
    time.sleep(0.5)
    return attempt(zps.push_pull, torch.ones(3), "x"), attempt(zps.barrier)


@pytest.mark.long
def test_a_worker_that_left_is_named() -> None:
    with Cluster() as cluster:
        (push, barrier), _ = cluster.run(leave_early)
    assert push.kind == "PeerLostError"
    assert "worker 1 (host" in push.text
    assert "left the job" in push.text
    assert "worker 1 (host" in barrier.text


@pytest.mark.long
def test_a_script_that_crashes_takes_its_leave(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import zenps as zps\nzps.init()\nraise SystemExit(3)\n")
    with Cluster() as cluster:
        survivor = cluster.start(leave_early, rank=0)
        crashed = run_script(script, {"ZENPS_CLUSTER_SCHEDULER": cluster.address, "RANK": "1"})
        assert crashed.returncode == 3
        push, barrier = survivor.result()
        assert push.kind == "PeerLostError"
        assert "left the job" in push.text
        assert "worker 1 (host" in barrier.text


def act_after_the_lease_has_ended() -> Any:
    """As where the thread ends between a command and the byte that wakes it."""
    world: Any = PROCESS.world
    world._session.lease.close(together=False)
    return attempt(zps.barrier)


def test_nobody_waits_for_a_thread_that_has_ended() -> None:
    with Cluster(workers=1) as cluster:
        (barrier,) = cluster.run(act_after_the_lease_has_ended)
    assert barrier == Raised("LeftError", "this worker has left the cluster; call zenps.init() to join again")
