"""What is refused, what times out and who is lost: an error on every rank that says what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt

LEASE_SECONDS = 2.0


def table(rows: int, columns: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sparse, with one row."""
    indices = torch.zeros((1, 1), dtype=torch.int64)
    values = torch.ones((1, columns), dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, (rows, columns), check_invariants=True)


def without_check(index: int) -> Tensor:
    indices = torch.tensor([[index]])
    return torch.sparse_coo_tensor(indices, torch.ones(1, 4), (10, 4), check_invariants=False)


def beyond_a_dimension() -> Tensor:
    """As one number the index would be inside: 0 · 90 + 100 < 70 · 90."""
    indices = torch.tensor([[0], [100]])
    return torch.sparse_coo_tensor(indices, torch.ones(1), (70, 90), check_invariants=False)


# ── refused before anything is sent ─────────────────────────────────────────────────────────────

REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "int32": (lambda: zps.push_pull(torch.ones(3, dtype=torch.int32), "x"), "TensorError", "int32"),
    "bool": (lambda: zps.push_pull(torch.ones(3, dtype=torch.bool), "x"), "TensorError", "bool"),
    "uint8": (lambda: zps.push_pull(torch.ones(3, dtype=torch.uint8), "x", False), "TensorError", "uint8"),
    "complex": (lambda: zps.push_pull(torch.ones(3, dtype=torch.complex64), "x"), "TensorError", "complex64"),
    "meta": (lambda: zps.push_pull(torch.ones(3, device="meta"), "x"), "TensorError", "meta"),
    "csr": (lambda: zps.push_pull(torch.eye(3).to_sparse_csr(), "x"), "TensorError", "sparse_csr"),
    "list": (lambda: zps.push_pull([1.0, 2.0], "x"), "TensorError", "list"),  # type: ignore[arg-type]
    "average of int64": (
        lambda: zps.push_pull(torch.ones(3, dtype=torch.int64), "x"),
        "TensorError",
        "average=False",
    ),
    "index beyond the table": (lambda: zps.push_pull(without_check(10), "x"), "TensorError", "0 to 9"),
    "negative index": (lambda: zps.push_pull(without_check(-1), "x"), "TensorError", "0 to 9"),
    "index beyond its dimension": (
        lambda: zps.push_pull(beyond_a_dimension(), "x"),
        "TensorError",
        "(70, 90)",
    ),
    "second init": (zps.init, "UsageError", "shutdown()"),
    "empty name": (lambda: zps.push_pull(torch.ones(3), ""), "UsageError", "1 to 1024"),
    "long name": (lambda: zps.push_pull(torch.ones(3), "x" * 1025), "UsageError", "1 to 1024"),
    "name not text": (lambda: zps.push_pull(torch.ones(3), 7), "UsageError", "string"),  # type: ignore[arg-type]
    "name not Unicode": (lambda: zps.push_pull(torch.ones(3), "\ud800"), "UsageError", "a string"),
    "no such root": (
        lambda: zps.broadcast_parameters({"x": torch.ones(3)}, root_rank=2),
        "UsageError",
        "0 to 1",
    ),
    "sparse broadcast": (lambda: zps.broadcast_parameters({"x": table(3)}), "TensorError", "strided"),
    "object not plain": (
        lambda: zps.broadcast_object({"x": object()}, zps.rank()),
        "UsageError",
        "plain data",
    ),
}

# ── refused by a server, on every rank ──────────────────────────────────────────────────────────

MISMATCHED: dict[str, tuple[tuple[Tensor, bool], tuple[Tensor, bool]]] = {
    "shape": ((torch.ones(3), True), (torch.ones(4), True)),
    "transposed": ((torch.ones(2, 3), True), (torch.ones(3, 2), True)),
    "small and large": ((torch.ones(5), True), (torch.ones(100_003), True)),
    "empty": ((torch.ones(0), True), (torch.ones(3), True)),
    "dtype": ((torch.ones(3), True), (torch.ones(3, dtype=torch.float64), True)),
    "kind": ((torch.ones(500, 4), True), (table(500), True)),
    # Where a tensor lies depends on its name: in eight of them small and sparse will not always meet.
    **{f"kind of small {letter}": ((torch.ones(1, 4), True), (table(1), True)) for letter in "abcdefgh"},
    "average": ((torch.ones(3), True), (torch.ones(3), False)),
    "rows": ((table(1000), True), (table(1001), True)),
    "columns": ((table(1000, 4), True), (table(1000, 5), True)),
    **{f"{rows} rows": ((table(rows), True), (table(rows + 1), True)) for rows in range(1, 6)},
    "1 row and many": ((table(1), True), (table(50_000), True)),
    "1 wide row": ((table(1, 20_000), True), (table(2, 20_000), True)),
    "sparse dtype": ((table(9), True), (table(9, dtype=torch.float64), True)),
    "element-sparse": ((torch.ones(70).to_sparse(), True), (torch.ones(71).to_sparse(), True)),
    "sparse dimensions": ((torch.ones(6, 6).to_sparse(), True), (torch.ones(6, 6).to_sparse(1), True)),
}


def collect() -> dict[str, Any]:
    outcomes: dict[str, Any] = {name: attempt(call) for name, (call, _, _) in REFUSED.items()}
    outcomes["after"] = zps.push_pull(torch.ones(3), "x")
    for name, by_rank in MISMATCHED.items():
        tensor, average = by_rank[zps.rank()]
        begin = time.monotonic()
        outcomes[f"mismatched {name}"] = attempt(zps.push_pull, tensor, f"bad {name}", average)
        outcomes[f"seconds {name}"] = time.monotonic() - begin
        outcomes[f"again {name}"] = attempt(zps.push_pull, torch.ones(3), f"bad {name}")
    outcomes |= use_a_name_twice()
    zps.shutdown()
    zps.shutdown()
    outcomes["closed"] = {name: attempt(call) for name, call in CALLS.items()}
    return outcomes


def use_a_name_twice() -> dict[str, Any]:
    if zps.rank() == 1:
        zps.barrier()
        return {"first": zps.push_pull(torch.ones(3), "twice"), "second": None}
    handle = zps.push_pull_async(torch.ones(3), "twice")
    ready = zps.poll(handle)
    second = attempt(zps.push_pull_async, torch.ones(3), "twice")
    zps.barrier()
    return {"first": handle.wait(), "second": second, "ready": ready}


CALLS: dict[str, Callable[[], Any]] = {
    "rank": zps.rank,
    "size": zps.size,
    "local_rank": zps.local_rank,
    "local_size": zps.local_size,
    "stats": zps.stats,
    "barrier": zps.barrier,
    "push_pull": lambda: zps.push_pull(torch.ones(3), "x"),
    "push_pull_async": lambda: zps.push_pull_async(torch.ones(3), "x"),
    "broadcast_parameters": lambda: zps.broadcast_parameters({"x": torch.ones(3)}),
    "broadcast_object": lambda: zps.broadcast_object(1),
    "DistributedOptimizer": lambda: zps.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    with Cluster(servers=3) as cluster:
        return cluster.run(collect)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_sent(outcomes: list[dict[str, Any]], name: str) -> None:
    _, kind, text = REFUSED[name]
    for results in outcomes:
        assert isinstance(results[name], Raised), results[name]
        assert results[name].kind == kind
        assert text in results[name].text


def test_a_refused_name_stays_free(outcomes: list[dict[str, Any]]) -> None:
    assert all(torch.equal(results["after"], torch.ones(3)) for results in outcomes)


@pytest.mark.parametrize("name", MISMATCHED)
def test_mismatch_is_an_error_on_every_rank(outcomes: list[dict[str, Any]], name: str) -> None:
    for results in outcomes:
        error = results[f"mismatched {name}"]
        assert isinstance(error, Raised), error
        assert error.kind == "MismatchError"
        assert f"'bad {name}'" in error.text
        for rank, (tensor, _) in enumerate(MISMATCHED[name]):
            assert f"{rank} pushed {'sparse' if tensor.is_sparse else 'dense'}" in error.text
            assert str(tuple(tensor.shape)) in error.text
            assert str(tensor.dtype).removeprefix("torch.") in error.text
        assert results[f"seconds {name}"] < 10, "found by a deadline, not by the servers"
        assert torch.equal(results[f"again {name}"], torch.ones(3))


def test_same_name_twice_in_flight(outcomes: list[dict[str, Any]]) -> None:
    second = outcomes[0]["second"]
    assert (second.kind, outcomes[0]["ready"]) == ("UsageError", False)
    assert "'twice' is in flight" in second.text
    assert all(torch.equal(results["first"], torch.ones(3)) for results in outcomes)


@pytest.mark.parametrize("name", CALLS)
def test_call_after_shutdown(outcomes: list[dict[str, Any]], name: str) -> None:
    assert all(results["closed"][name].kind == "UsageError" for results in outcomes)
    assert all("zenps.init()" in results["closed"][name].text for results in outcomes)


@pytest.mark.parametrize("name", CALLS)
def test_call_before_init(name: str) -> None:
    error = attempt(CALLS[name])
    assert error.kind == "UsageError"
    assert "zenps.init()" in error.text


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


def identify() -> tuple[int, int, int, int]:
    return zps.rank(), zps.size(), zps.local_rank(), zps.local_size()


def join() -> Any:
    return attempt(zps.init)


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


def test_ranks_are_given_where_nobody_asks_and_a_late_worker_is_refused() -> None:
    with Cluster(workers=2, servers=1) as cluster:
        workers = [cluster.start(hold_and_identify), cluster.start(hold_and_identify)]
        cluster.await_state("running")
        late = cluster.start(join, init=False).result()
        assert late.kind == "UsageError"
        assert "complete with 2 worker(s)" in late.text
        results = sorted(worker.result() for worker in workers)
        assert results == [(0, 2, 0, 2), (1, 2, 1, 2)]


def hold_and_identify() -> tuple[int, int, int, int]:
    time.sleep(2)
    zps.barrier()
    return identify()


def test_a_rank_can_be_taken_once() -> None:
    with Cluster(workers=2, servers=1) as cluster:
        first = cluster.start(identify, rank=0)
        while not cluster.nodes("worker"):
            time.sleep(0.05)
        second = cluster.start(join, rank=0, init=False).result()
        assert second.kind == "UsageError"
        assert "rank 0 is taken by worker 0" in second.text
        beyond = cluster.start(join, rank=2, init=False).result()
        assert beyond.kind == "UsageError"
        assert "0 to 1" in beyond.text
        other = cluster.start(identify, rank=1)
        assert (first.result()[0], other.result()[0]) == (0, 1)


def test_settings_that_are_not_the_schedulers() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        error = cluster.start(join, init=False, settings={"sync.granule": 64, "sync.seed": 7}).result()
    assert error.kind == "MismatchError"
    assert "sync.granule is 64 here and 32 there" in error.text
    assert "sync.seed is 7" in error.text


def test_a_partition_that_does_not_exist() -> None:
    settings = {"sync.partition": "no.such:Strategy"}
    with Cluster(workers=1, servers=1, settings=settings) as cluster:
        error = cluster.start(join, init=False).result()
    assert error.kind == "ConfigError"
    assert "no.such:Strategy" in error.text


def test_rendezvous_names_who_is_missing() -> None:
    settings = {"cluster.rendezvous_seconds": 2}
    with Cluster(workers=3, servers=2, settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        error = cluster.start(join, rank=2, init=False).result()
        assert error.kind == "DeadlineError"
        assert "missing after 2 s: 2 of 3 worker(s) (rank 0, 1)" in error.text
        for process in (*cluster.servers, cluster.scheduler):
            assert process.wait() != 0
            assert "2 of 3 worker(s) (rank 0, 1)" in process.log


def test_no_scheduler_there() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        address = f"127.0.0.1:{unused_port()}"
        settings = {"cluster.scheduler": address, "cluster.rendezvous_seconds": 0.1}
        error = cluster.start(join, init=False, settings=settings).result()
    assert error.kind == "DeadlineError"
    assert f"no answer from the scheduler at {address}" in error.text


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ── deadlines ───────────────────────────────────────────────────────────────────────────────────


def miss() -> dict[str, Any]:
    """Rank 1 misses a barrier and a push; afterwards the ranks are in step again."""
    outcomes: dict[str, Any] = {}
    if zps.rank() == 1:
        time.sleep(4)
    else:
        outcomes["barrier"] = attempt(zps.barrier)
    outcomes["push"] = attempt(zps.push_pull, torch.ones(3), "x")
    if zps.rank() == 0:
        time.sleep(1.5)
    outcomes["next"] = attempt(zps.push_pull, torch.ones(3), "x")
    return outcomes


def test_deadlines_name_who_is_missing() -> None:
    with Cluster(settings={"cluster.deadline_seconds": 1}) as cluster:
        first, second = (cluster.start(miss, rank=rank) for rank in range(2))
        on_time, late = first.result(), second.result()
    assert on_time["barrier"].kind == "DeadlineError"
    assert "barrier 1: not reached within 1 s by worker 1 (host" in on_time["barrier"].text
    assert on_time["push"].kind == "DeadlineError"
    assert "tensor 'x', step 0: no push within 1 s from rank(s) 1" in on_time["push"].text
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


@pytest.mark.parametrize("wait", ["push", "barrier"])
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
        assert raised_at - killed_at < LEASE_SECONDS + 1
        for process in (*cluster.servers, cluster.scheduler):
            assert process.wait() != 0
            assert "worker 1 (host" in process.log


def push_forever() -> tuple[Any, float]:
    while True:
        outcome = attempt(zps.push_pull, torch.ones(100_003), "x")
        if isinstance(outcome, Raised):
            return outcome, time.time()


def test_a_killed_server_is_named_within_its_lease() -> None:
    with Cluster(lease_seconds=LEASE_SECONDS) as cluster:
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
            assert f"(host {socket.gethostname()}, pid {victim.pid}) is lost" in error.text
            assert raised_at - killed_at < LEASE_SECONDS + 1
        assert cluster.scheduler.wait() != 0


def leave_early() -> Any:
    if zps.rank() == 1:
        return None
    time.sleep(0.5)
    return attempt(zps.push_pull, torch.ones(3), "x"), attempt(zps.barrier)


def test_a_worker_that_left_is_named() -> None:
    with Cluster() as cluster:
        (push, barrier), _ = cluster.run(leave_early)
    assert push.kind == "PeerLostError"
    assert "worker 1 (host" in push.text
    assert "left the job" in push.text
    assert "worker 1 (host" in barrier.text


def test_a_script_that_crashes_takes_its_leave(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import zenps as zps\nzps.init()\nraise SystemExit(3)\n")
    with Cluster() as cluster:
        survivor = cluster.start(leave_early, rank=0)
        crashed = run_script(script, {"ZENPS_CLUSTER_SCHEDULER": cluster.address, "RANK": "1"})
        assert crashed.returncode == 3
        push, _ = survivor.result()
        assert push.kind == "PeerLostError"
        assert "left the job" in push.text


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


def run_script(script: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    return subprocess.run(
        [sys.executable, script], env=clean | environ, cwd=script.parent, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip


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
