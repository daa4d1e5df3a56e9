"""Who may join a cluster, under which rank, and what happens without one."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, attempt, await_file
from tests.integration.scripts import run_script
from tests.ports import free_port


def identify() -> tuple[int, int, int, int]:
    return zps.rank(), zps.size(), zps.local_rank(), zps.local_size()


def join() -> Any:
    return attempt(zps.init)


def join_as_spawned() -> Any:
    """As in a process that spawn has started: it imports the script under another name."""
    sys.modules["__main__"].__name__ = "__mp_main__"
    return join()


def test_ranks_are_those_of_the_environment() -> None:
    with Cluster(workers=3, servers=1) as cluster:
        workers = {
            rank: cluster.start(identify, rank=rank, environ={"LOCAL_RANK": str(local)})
            for rank, local in ((2, 1), (0, 2), (1, 0))
        }
        assert {rank: worker.result() for rank, worker in workers.items()} == {
            2: (2, 3, 1, 3),
            0: (0, 3, 2, 3),
            1: (1, 3, 0, 3),
        }
        cluster.drain()


def test_ranks_are_given_where_nobody_asks_and_a_late_worker_is_refused(tmp_path: Path) -> None:
    with Cluster(workers=2, servers=1) as cluster:
        workers = [cluster.start(hold_and_identify, tmp_path / "go") for _ in range(2)]
        cluster.await_state("running")
        late = cluster.start(join_as_spawned, init=False).result()
        assert late.kind == "UsageError"
        assert "complete with 2 worker(s)" in late.text
        assert "put zps.init() under `if __name__ == '__main__':`" in late.text
        (tmp_path / "go").touch()
        results = sorted(worker.result() for worker in workers)
        assert results == [(0, 2, 0, 2), (1, 2, 1, 2)]


def hold_and_identify(go: Path) -> tuple[int, int, int, int]:
    await_file(go)
    zps.barrier()
    return identify()


def test_a_rank_can_be_taken_once() -> None:
    with Cluster(workers=2, servers=1) as cluster:
        first = cluster.start(identify, rank=0)
        until = time.monotonic() + 30
        while not cluster.nodes("worker"):
            assert time.monotonic() < until
            time.sleep(0.05)
        second = cluster.start(join, rank=0, init=False).result()
        assert second.kind == "UsageError"
        assert "rank 0 is taken by worker 0" in second.text
        beyond = cluster.start(join, rank=2, init=False).result()
        assert beyond.kind == "UsageError"
        assert "0 to 1" in beyond.text
        other = cluster.start(identify, rank=1)
        assert (first.result()[0], other.result()[0]) == (0, 1)


@pytest.mark.parametrize("local_rank", ["first", pytest.param("-1", marks=pytest.mark.long)])
def test_a_wrong_local_rank_is_refused_before_the_worker_registers(local_rank: str) -> None:
    with Cluster(workers=1, servers=1) as cluster:
        refused = cluster.start(join, init=False, environ={"LOCAL_RANK": local_rank}).result()
        assert refused.kind == "ConfigError"
        assert cluster.start(identify).result() == (0, 1, 0, 1)


def fail_to_record() -> tuple[Any, bool]:
    return join(), zps.is_initialized()


def test_a_worker_that_fails_once_it_has_joined_leaves(tmp_path: Path) -> None:
    """A trace cannot be written; the others hear of the departure before the lease has expired."""
    trace = {"ZENPS_PLAN_TRACE": str(tmp_path / "no" / "folder"), "ZENPS_PLAN_STEPS": "3"}
    with Cluster(workers=2, servers=1, lease_seconds=60.0) as cluster:
        failing = cluster.start(fail_to_record, init=False, environ=trace)
        other = cluster.start(wait_for_the_other)
        error, is_initialized = failing.result()
        assert (error.kind, is_initialized) == ("FileNotFoundError", False)
        assert "left before it" in other.result().text, "else it waits until its deadline"


def wait_for_the_other() -> Any:
    return attempt(zps.barrier)


def test_a_second_init_does_nothing_or_names_the_setting_that_differs() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        again, other, wrong, rank = cluster.start(join_again).result()
    assert (again, rank) == (None, 0)
    assert other.kind == "UsageError"
    assert "zenps.init() was called before with sync.scheme = 'zenps', and is now with 'zen'" in other.text
    assert wrong.kind == "ConfigError"


def join_again() -> Any:
    again, other, wrong = (
        attempt(zps.init, sets=sets) for sets in ((), ["sync.scheme=zen"], ["sync.scheme=foo"])
    )
    return again, other, wrong, zps.rank()


def test_settings_that_are_not_the_schedulers() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        error = cluster.start(join, init=False, settings={"sync.granule": 64, "sync.seed": 7}).result()
    assert error.kind == "MismatchError"
    assert "sync.granule is 64 here and 32 there" in error.text
    assert "sync.seed is 7" in error.text


def broadcast_from_the_last() -> tuple[float, float]:
    model = {"weight": torch.full((3,), float(zps.rank()))}
    zps.broadcast_parameters(model, zps.size() - 1)
    zps.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 1).parameters()))
    return model["weight"][0].item(), zps.broadcast(torch.tensor(float(zps.rank())), 1).item()


def test_workers_need_not_know_how_many_they_are() -> None:
    with Cluster(workers=2, servers=1) as cluster:
        settings = {"cluster.workers": 1}
        workers = [cluster.start(broadcast_from_the_last, rank=rank, settings=settings) for rank in (0, 1)]
        assert [worker.result() for worker in workers] == [(1.0, 1.0), (1.0, 1.0)]


def test_workers_of_an_elastic_job_must_know_how_many_they_are() -> None:
    with Cluster(workers=2, servers=1, settings={"cluster.on_worker_loss": "continue"}) as cluster:
        error = cluster.start(join, rank=0, init=False, settings={"cluster.workers": 1}).result()
    assert error.kind == "MismatchError"
    assert "cluster.workers is 1 here and 2 there" in error.text


def test_a_partition_that_does_not_exist() -> None:
    settings = {"sync.partition": "no.such:Strategy"}
    with Cluster(workers=1, servers=1, settings=settings) as cluster:
        error = cluster.start(join, init=False).result()
    assert error.kind == "ConfigError"
    assert "no.such:Strategy" in error.text


@pytest.mark.long
def test_rendezvous_names_who_is_missing() -> None:
    settings = {"cluster.rendezvous_seconds": 10}
    with Cluster(workers=3, servers=2, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        error = cluster.start(join, rank=2, init=False).result()
        assert error.kind == "DeadlineError"
        assert "missing after 10 s: 2 of 3 worker(s) (rank 0, 1)" in error.text
        for process in (*cluster.servers, cluster.scheduler):
            assert process.wait() != 0
            assert "2 of 3 worker(s) (rank 0, 1)" in process.log


@pytest.mark.long
def test_no_scheduler_there() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        address = f"127.0.0.1:{free_port()}"
        settings = {"cluster.scheduler": address, "cluster.rendezvous_seconds": 0.1}
        error = cluster.start(join, init=False, settings=settings).result()
    assert error.kind == "DeadlineError"
    assert f"no answer from the scheduler at {address}" in error.text


# ── alone ───────────────────────────────────────────────────────────────────────────────────────

ALONE = """
import torch
import zenps as zps

zps.init()
model = torch.nn.Embedding(10, 4, sparse=True)
torch.nn.init.zeros_(model.weight)
optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
zps.broadcast_parameters(model.state_dict())
model(torch.tensor([3, 3, 5])).sum().backward()
optimizer.step()
assert model.weight.detach()[[3, 5, 7], 0].tolist() == [-2.0, -1.0, 0.0]
sparse = torch.sparse_coo_tensor([[3, 1, 3]], [1.0, 2.0, 4.0], (5,))
summed = zps.push_pull(sparse, "x")
assert summed.is_coalesced() and summed.indices().tolist() == [[1, 3]] and summed.values().tolist() == [2, 5]
assert zps.broadcast_object({"a": [1]}) == {"a": [1]}
zps.barrier()
print(zps.rank(), zps.size(), zps.local_rank(), zps.local_size())
zps.shutdown()
"""


@pytest.mark.long
def test_a_script_alone_runs_with_size_1(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ALONE)
    done = run_script(script, {})
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "0", "1"]), done.stderr


def test_one_of_several_without_a_scheduler_is_refused() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        worker = cluster.start(
            join, init=False, settings={"cluster.scheduler": ""}, environ={"WORLD_SIZE": "2"}
        )
        error = worker.result()
    assert error.kind == "ConfigError"
    assert "cluster.scheduler" in error.text
