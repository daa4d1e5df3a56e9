"""Two levels: the ranks of a host reduce in shared memory, and one of them speaks to the servers."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import (
    LEASE_SECONDS,
    Cluster,
    Process,
    Raised,
    attempt,
    await_file,
    await_ranks,
)
from tests.integration.embedding_model import assert_same
from tests.integration.reference import assert_same_bits
from tests.integration.test_losses import SLACK_SECONDS
from tests.integration.test_push_pull import CASES, ROUNDS, expected, push_all
from tests.integration.test_training import train, train_in_one_process
from zenps.cli.doctor import Check, examine
from zenps.config.sources import load
from zenps.observe.timeline import merge
from zenps.worker.process import PROCESS
from zenps.worker.transport.host_link import Listener

WORKERS = 3
AT_ONCE_SECONDS = 10.0
ROWS, COLUMNS = 50_000, 8

# Under a name, for an address of loopback would tell that all hosts are one.
REACHED = {"cluster.host": socket.gethostname()}


def table(first: int, count: int = 10_000) -> Tensor:
    """Rows ``first`` and following, of ones."""
    rows = torch.arange(first, first + count).unsqueeze(0)
    return torch.sparse_coo_tensor(rows, torch.ones(count, COLUMNS), (ROWS, COLUMNS), check_invariants=True)


def on_host(name: str, function: Any, *args: Any) -> Any:
    """Joins as if this machine were called ``name``, and calls ``function``."""
    socket.gethostname = lambda: name
    zps.init()
    try:
        return function(*args)
    finally:
        zps.shutdown()


def start_on_two_hosts(cluster: Cluster, workers: int, function: Any, *args: Any) -> list[Process]:
    """Ranks 0 and 1 on the first."""
    return [
        cluster.start(on_host, f"host{rank // 2}", function, *args, rank=rank, init=False)
        for rank in range(workers)
    ]


@pytest.fixture(scope="module")
def sums() -> Iterator[list[dict[str, Any]]]:
    with Cluster(WORKERS, 2, {"sync.levels": 2}) as cluster:
        yield cluster.run(push_all)


@pytest.mark.parametrize("name", CASES)
def test_on_one_host_it_is_the_sum_in_rank_order(sums: Sequence[dict[str, Any]], name: str) -> None:
    for number in range(ROUNDS):
        for results in sums:
            assert_same_bits(results[f"{name}/{number}"], expected(name, WORKERS, number))
    for way, number in (("out of order", 0), ("own order", 1)):
        for results in sums:
            assert_same_bits(results[way][name], expected(name, WORKERS, number))


def test_many_in_flight_from_several_threads(sums: Sequence[dict[str, Any]]) -> None:
    for results in sums:
        assert_same_bits(results["in flight"], torch.arange(500.0).mul(WORKERS).unsqueeze(1).expand(500, 3))
        for pushed in results["threads"]:
            assert_same_bits(pushed, torch.arange(30.0).mul(WORKERS).unsqueeze(1).expand(30, 5))


def drop_and_repeat() -> dict[str, Any]:
    """What is refused for residuals; and whether a layer that is unused from then on has a gradient."""
    layer = torch.nn.Linear(200, 100, bias=False)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1), layer.named_parameters())

    def backward() -> None:
        layer(torch.arange(200.0)).square().sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    backward()
    found: dict[str, Any] = {"thrown away": attempt(optimizer.zero_grad)}
    optimizer.zero_grad()
    backward()
    found["again"] = attempt(backward)
    optimizer.zero_grad()
    found["has gradient"] = []
    for _ in range(4):
        optimizer.step()
        found["has gradient"].append(layer.weight.grad is not None)
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("settings", "later"),
    [
        ({"sync.sparsifier": "topk", "sync.density": 0.4}, [True, True, False, False]),
        pytest.param({"sync.values": "int8"}, [False] * 4, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_all_ranks_know_that_leaders_keep_residuals(settings: dict[str, Any], later: list[bool]) -> None:
    levels = {"sync.levels": 2, "cluster.deadline_seconds": 10}
    with Cluster(4, 1, levels | settings, server_settings=REACHED) as cluster:
        outcomes = [worker.result() for worker in start_on_two_hosts(cluster, 4, drop_and_repeat)]
    for found in outcomes:
        assert {found["thrown away"].kind, found["again"].kind} == {"UsageError"}
        assert found["has gradient"] == later


def push_and_count() -> tuple[list[Tensor], int, int]:
    """Sums whose order shows in float32, and what crossed the network for this rank."""
    values = torch.full((40_000,), [1.0, 2.0**-24, 2.0**-24, -1.0][zps.rank()])
    sums = [zps.push_pull(table(10_000 * zps.rank()), "table", average=False)]
    sums += [zps.push_pull(values, "dense", average=False), zps.push_pull(values, "mean")]
    stats = zps.stats()
    return sums, stats.pushed_bytes, stats.pulled_bytes


def test_hosts_are_added_in_order_and_only_leaders_push() -> None:
    with Cluster(4, 2, {"sync.levels": 2}, server_settings=REACHED) as cluster:
        outcomes = [worker.result() for worker in start_on_two_hosts(cluster, 4, push_and_count)]
    dense = torch.tensor((1 + 2.0**-24) + (2.0**-24 - 1), dtype=torch.float32).expand(40_000)
    for (sparse, summed, mean), *_ in outcomes:
        assert_same_bits(
            sparse,
            torch.sparse_coo_tensor(
                torch.arange(40_000).unsqueeze(0),
                torch.ones(40_000, COLUMNS),
                (ROWS, COLUMNS),
                is_coalesced=True,
            ),
        )
        assert_same_bits(summed, outcomes[0][0][1])
        assert_same_bits(mean, summed / 4)
        torch.testing.assert_close(summed, dense)
    pushed = [outcome[1] for outcome in outcomes]
    pulled = [outcome[2] for outcome in outcomes]
    values_bytes = 20_000 * COLUMNS * 4 + 2 * 40_000 * 4
    assert pushed[0] >= values_bytes
    assert pushed[2] >= values_bytes
    assert pulled[0] == pulled[2] >= 2 * 20_000 * COLUMNS * 4
    assert pushed[1] == pushed[3] == pulled[1] == pulled[3] == 0


def test_on_one_host_no_gradient_goes_to_servers() -> None:
    with Cluster(2, 1, {"sync.levels": 2}) as cluster:
        outcomes = cluster.run(push_and_count)
    for (sparse, summed, mean), pushed, pulled in outcomes:
        assert torch.equal(sparse._indices()[0], torch.arange(20_000))
        assert torch.equal(summed, torch.full((40_000,), 1 + 2.0**-24))
        assert_same_bits(mean, summed / 2)
        assert pushed == pulled == 0


def diagnose() -> Check:
    """What ``zenps doctor`` says of the levels while all are here."""
    (check,) = [each for each in examine(load(environ=os.environ).config) if each.name == "sync.levels"]
    zps.barrier()
    return check


@pytest.mark.parametrize(
    ("settings", "found", "advised"),
    [
        ({}, "1, with 2 worker(s) on 1 host(s)", True),
        ({"sync.levels": 2}, "2, with 2 worker(s) on 1 host(s): they reduce there, not at servers", False),
        *(
            pytest.param(settings, "1, with 2 worker(s) on 1 host(s)", False, marks=pytest.mark.long)
            for settings in ({"cluster.on_worker_loss": "continue"}, {"sync.scheme": "agsparse"})
        ),
    ],
)
def test_the_doctor_knows_who_could_reduce_first(
    settings: dict[str, object], found: str, advised: bool
) -> None:
    with Cluster(2, 1, settings) as cluster:
        for check in cluster.run(diagnose):
            assert (check.verdict, check.found) == ("ok", found)
            assert bool(check.advice) is advised


def test_the_doctor_advises_nothing_to_lone_workers() -> None:
    with Cluster(2, 1, server_settings=REACHED) as cluster:
        workers = [
            cluster.start(on_host, f"host{rank}", diagnose, rank=rank, init=False) for rank in range(2)
        ]
        for worker in workers:
            assert worker.result() == Check("sync.levels", "ok", "1, with 2 worker(s) on 2 host(s)")


def push_and_rest() -> bool:
    """Whether the channel is free once a sum is here: a thread that had it would pass every answer on."""
    world: Any = PROCESS.world
    channel = world._session.channel
    for _ in range(5):
        zps.push_pull(table(0), "t")
    until = time.monotonic() + AT_ONCE_SECONDS
    free_looks = 0  # in a row: between two rounds it is free for a moment, too
    while free_looks < 20 and time.monotonic() < until:
        free_looks = 0 if channel._lock.is_taken else free_looks + 1
        time.sleep(0.01)
    return free_looks == 20


def test_nobody_waits_for_servers_once_the_sum_is_there() -> None:
    with Cluster(WORKERS, 2, {"sync.levels": 2}) as cluster:
        assert cluster.run(push_and_rest) == [True] * WORKERS


STEPS = 20


def keep_and_change(path: Path) -> bool:
    """Sums lie in memory that all ranks see; to each they are its own, for as long as it has them."""
    parts = [table(0, 40_000) * (step + 1) for step in range(STEPS)]
    wanted = torch.full((40_000, COLUMNS), float(WORKERS))
    kept = {}
    for step, part in enumerate(parts):
        total = zps.push_pull(part, "kept", average=False)
        if step % WORKERS == zps.rank():  # and no other rank
            kept[step] = total.values()
        if step % 2:
            total.values().mul_(zps.rank() + 2)
    zps.barrier()  # all ranks have changed theirs
    used_bytes = []
    world: Any = PROCESS.world
    for part in parts:
        zps.push_pull(part, "dropped", average=False)
        used_bytes.append(os.fstat(world._backend._arena.fd).st_blocks * 512)
    factor = torch.tensor([1.0, zps.rank() + 2.0])
    leads = zps.rank() == 0
    zps.shutdown()
    if not leads:
        await_file(path)  # the leader, in whose memory they lie, is no more
    # There is one more at times, by when sums are dropped; if none were used again, 17 of 1.6 MB.
    assert used_bytes[-1] - used_bytes[2] < 4 << 20, f"what was dropped is not used again: {used_bytes}"
    return all(torch.equal(values, wanted * (step + 1) * factor[step % 2]) for step, values in kept.items())


def test_sums_are_each_rank_s_own(tmp_path: Path) -> None:
    with Cluster(WORKERS, 2, {"sync.levels": 2}) as cluster:
        workers = [cluster.start(keep_and_change, tmp_path / "over", rank=rank) for rank in range(WORKERS)]
        assert workers[0].result() is True
        (tmp_path / "over").touch()
        assert [worker.result() for worker in workers[1:]] == [True] * (WORKERS - 1)


def test_the_leaders_sum_is_on_the_timeline(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    with Cluster(2, 1, {"sync.levels": 2, "sync.trace": parts / "trace.json"}) as cluster:
        cluster.run(push_and_count)
        merge(sorted(parts.iterdir()), tmp_path / "whole.json")
    events = json.loads((tmp_path / "whole.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    sums = [event for event in events if event.get("cat") == "aggregate"]
    of_workers = {(names[event["pid"]], event["args"]["tensor"]) for event in sums}
    expected = {("worker 0", tensor) for tensor in ("table", "dense", "mean")}
    assert {each for each in of_workers if each[0].startswith("worker")} == expected


def push_forever(begun: Path) -> tuple[Raised, float]:
    """What a push raises in the end, and when; says once the first one is done."""
    while True:
        outcome = attempt(zps.push_pull, table(0), "table")
        begun.with_name(f"{begun.name}{zps.rank()}").touch()
        if isinstance(outcome, Raised):
            raised_at = time.time()
            time.sleep(1)  # until all threads know
            assert isinstance(attempt(zps.push_pull, table(0), "afterwards"), Raised)
            assert time.time() - raised_at < 1 + AT_ONCE_SECONDS
            return outcome, raised_at


@pytest.mark.parametrize(
    ("lost", "end"),
    [
        (0, signal.SIGKILL),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.long),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_lost_is_named(tmp_path: Path, lost: int, end: signal.Signals) -> None:
    with Cluster(WORKERS, 1, {"sync.levels": 2}, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_forever, tmp_path / "begun", rank=rank) for rank in range(WORKERS)]
        for rank in range(WORKERS):
            await_file(tmp_path / f"begun{rank}")
        victim = workers.pop(lost)
        os.kill(victim.pid, end)
        lost_at = time.time()
        for worker in workers:
            error, raised_at = worker.result()
            assert error.kind == "PeerLostError"
            assert f"worker {lost} (host {socket.gethostname()}, pid {victim.pid}) is lost" in error.text
            assert raised_at - lost_at < LEASE_SECONDS + SLACK_SECONDS
        victim.kill()


def push_until(path: Path) -> list[Tensor]:
    """A fresh sum of each step; rank 0 makes the file after some."""
    results = []
    for step in range(40):
        results.append(zps.push_pull(table(1000 * step), "table", average=False))
        if step == 10 and zps.rank() == 0:
            path.touch()
        time.sleep(0.02)
    return [results[step]._values().sum() for step in range(40)]


@pytest.mark.long
def test_a_server_that_is_lost(tmp_path: Path) -> None:
    settings = {"sync.levels": 2}
    with Cluster(WORKERS, 2, settings, lease_seconds=LEASE_SECONDS, server_settings=REACHED) as cluster:
        workers = start_on_two_hosts(cluster, WORKERS, push_until, tmp_path / "half")
        await_file(tmp_path / "half")
        cluster.servers[1].kill()
        for worker in workers:
            assert worker.result() == [torch.tensor(WORKERS * 10_000.0 * COLUMNS)] * 40


def disagree() -> list[object]:
    """Another shape on rank 1, then another kind; then all is well."""
    shapes = ((ROWS, COLUMNS), (ROWS, COLUMNS + 1))
    mine = shapes[zps.rank() == 1]
    other = torch.ones(mine) if zps.rank() == 1 else table(0)
    outcomes: list[object] = [attempt(zps.push_pull, torch.ones(mine), "shape")]
    outcomes += [attempt(zps.push_pull, other, "kind")]
    # 64 KB go to the servers without a negotiation.
    outcomes += [attempt(zps.push_pull, torch.ones(16_000 if zps.rank() == 1 else 32_000), "size")]
    return [*outcomes, zps.push_pull(torch.ones(shapes[0]), "shape", average=False)]


def test_ranks_that_disagree_are_named_on_all() -> None:
    with Cluster(WORKERS, 1, {"sync.levels": 2}) as cluster:
        for shape, kind, size, well in cluster.run(disagree):
            assert shape.kind == kind.kind == size.kind == "MismatchError"
            assert "rank(s) 0, 2 pushed dense float32 (32000,), averaged" in size.text
            assert "rank(s) 1 pushed dense float32 (16000,), averaged" in size.text
            assert "tensor 'shape', step 0: ranks disagree: rank(s) 0, 2 pushed" in shape.text
            assert "rank(s) 1 pushed dense float32 (50000, 9), averaged" in shape.text
            assert "rank(s) 0, 2 pushed sparse float32 (50000, 8)" in kind.text
            assert torch.equal(well, torch.full((ROWS, COLUMNS), 3.0))


def push_late(missed: Path) -> tuple[object, Tensor]:
    """Rank 1 comes late to one tensor. The ranks are in step again with the next."""
    if zps.rank() == 1:
        await_file(missed)
    late = attempt(zps.push_pull, table(0), "late")
    missed.touch()
    await_ranks(missed.with_name("ready"))
    return late, zps.push_pull(table(0), "x", average=False)


def test_a_rank_that_is_late_is_named(tmp_path: Path) -> None:
    with Cluster(WORKERS, 1, {"sync.levels": 2, "cluster.deadline_seconds": LEASE_SECONDS}) as cluster:
        for late, well in cluster.run(push_late, tmp_path / "missed"):
            assert late.kind == "DeadlineError"
            text = f"tensor 'late', step 0: no push within {LEASE_SECONDS:g} s from rank(s) 1; see"
            assert late.text.startswith(text)
            assert well._values().sum() == 3 * 10_000 * COLUMNS


def test_training_is_that_of_one_process() -> None:
    with Cluster(2, 1, {"sync.levels": 2, "sync.bucket_bytes": 1024}) as cluster:
        first, second = cluster.run(train, "adagrad")
    assert_same(first, train_in_one_process("adagrad"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_hosts_of_one_name_that_share_no_memory_are_refused() -> None:
    """As two containers with one name: the leader's socket is not to be found from the other one."""
    with Cluster(2, 1, {"sync.levels": 2}) as cluster:
        hidden, other = (cluster.start(join_apart, rank=rank, init=False) for rank in range(2))
        error = other.result()
        hidden.kill()
    assert error.kind == "PeerLostError"
    assert "workers 0, 1 have the host name" in error.text
    assert error.text.endswith("or set sync.levels = 1")


def join_apart() -> object:
    """What init raises, where the leader says another address than its own."""
    made = Listener.__init__

    def make(self: Listener, own: int, fd: int) -> None:
        made(self, own, fd)
        self.address = b"\0zenps-nobody"

    Listener.__init__ = make  # type: ignore[method-assign]
    return attempt(zps.init)


# ── limits of a process ─────────────────────────────────────────────────────────────────────────


def push_many_tensors(descriptors: int) -> list[float]:
    """More results than there are descriptors, all of which are kept; every tenth is large."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    pending = [
        zps.push_pull_async(table(number, 4000 if number % 10 else 1), f"table{number}", average=False)
        for number in range(2 * descriptors)
    ]
    results = [zps.synchronize(each) for each in pending]
    return [float(result.values().sum()) for result in results]


def test_results_hold_no_descriptors() -> None:
    with Cluster(2, 1, {"sync.levels": 2}) as cluster:
        sums = cluster.run(push_many_tensors, 128)
        cluster.drain()
    expected_sums = [2.0 * COLUMNS * (4000 if number % 10 else 1) for number in range(256)]
    assert sums == [expected_sums] * 2


def push_under_limit(limited: int) -> tuple[Tensor, int]:
    """Joins with a limit of address space on one rank; the sum, and how many rounds its ranks exchanged."""
    if int(os.environ["RANK"]) == limited:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 38, resource.RLIM_INFINITY))
    zps.init()
    try:
        total = zps.push_pull(table(10_000 * zps.rank()), "table", average=False)
        return total, zps.stats().pushed_bytes
    finally:
        zps.shutdown()


@pytest.mark.parametrize("limited", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_limit_of_address_space_leaves_one_level(limited: int) -> None:
    with Cluster(2, 1, {"sync.levels": 2}) as cluster:
        workers = [cluster.start(push_under_limit, limited, rank=rank, init=False) for rank in range(2)]
        outcomes = [worker.result() for worker in workers]
        logs = [worker.log for worker in workers]
        cluster.drain()
    for total, pushed_bytes in outcomes:
        assert pushed_bytes > 10_000 * COLUMNS * 4
        assert total.coalesce().indices().numel() == 20_000
    assert all("sync.levels = 1 instead of 2, on all ranks: 1 of them" in log for log in logs)
    assert "raise ulimit -v, or set sync.levels = 1" in logs[limited]
    assert "ulimit" not in logs[1 - limited]


# ── names ───────────────────────────────────────────────────────────────────────────────────────


def push_names(names: Sequence[str]) -> dict[str, Tensor]:
    """Large and small tensors by turns, all in flight at once, in three steps."""
    results: dict[str, Tensor] = {}
    for step in range(3):
        pending = {
            name: zps.push_pull_async(
                torch.full((70_000 if number % 2 == 0 else 3,), float(number + step)), name, average=False
            )
            for number, name in enumerate(names)
        }
        results |= {f"{name} {step}": each.wait() for name, each in pending.items()}
    broadcast = torch.full((3,), float(zps.rank()))
    zps.broadcast_parameters({"x#0": broadcast}, root_rank=3)
    return results | {"broadcast": broadcast}


NAMES = ("x", "x@hosts", "x@hosts@hosts", "x#0", "broadcast/x", "x@@hosts", "x@", "@hosts/addresses")


@pytest.mark.parametrize("settings", [{"sync.levels": 2}, {"sync.scheme": "omnireduce"}], ids=str)
def test_no_name_of_a_tensor_is_one_of_ours(settings: dict[str, object]) -> None:
    with Cluster(4, 1, settings, server_settings=REACHED) as cluster:
        outcomes = [worker.result(20) for worker in start_on_two_hosts(cluster, 4, push_names, NAMES)]
    for results in outcomes:
        assert results["broadcast"].tolist() == [3.0] * 3
        for step in range(3):
            for number, name in enumerate(NAMES):
                assert set(results[f"{name} {step}"].tolist()) == {4.0 * (number + step)}
