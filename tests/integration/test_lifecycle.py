"""Joining again after leaving, and forks: no call waits for ever, and nothing is left open."""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster, attempt, await_file
from tests.integration.test_interrupts import soon
from tests.zenps.conftest import Command
from zenps.errors import PeerLostError, TensorError
from zenps.wire.shared_memory.arena import Arena

REJOIN = """
import sys, time
import torch
import zenps as zps

rank = None
for joined in range(3):
    zps.init()
    zps.init()
    assert rank in (None, zps.rank())
    rank = zps.rank()
    zps.barrier()
    total = zps.push_pull(torch.full((70_000,), 10.0 * joined + rank), "x", average=False)
    print(joined, total.unique().tolist(), zps.allgather_object([joined, rank]))
    if joined == 0:
        model = torch.nn.EmbeddingBag(50, 4, sparse=True)
        zps.broadcast_parameters(model.state_dict())
        optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    for step in range(2):
        model(torch.tensor([[rank, 2 * joined + step]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = zps.allgather(model.weight.detach().unsqueeze(0), "weights")
    assert torch.equal(weights[0], weights[1])
    # Rank 1 leaves last, and only once rank 0 does not wait for it any more.
    time.sleep(float(sys.argv[1]) * rank)
    zps.shutdown()
    assert not zps.is_initialized()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "seconds", [0.0, pytest.param(3.0, marks=pytest.mark.long)], ids=["at once", "one after the other"]
)
def test_workers_join_again_under_launch(zenps: Command, tmp_path: Path, seconds: float) -> None:
    script = tmp_path / "train.py"
    script.write_text(REJOIN)
    command = (sys.executable, str(script), str(seconds))
    result = zenps("launch", "--workers=2", "--servers=2", "--", *command)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        said = [
            line.split("| ")[1] for line in result.stdout.splitlines() if line.startswith(f"worker {rank}")
        ]
        assert said == [f"{n} [{20.0 * n + 1}] [[{n}, 0], [{n}, 1]]" for n in range(3)]
    assert "Traceback" not in result.stderr
    assert "launch " not in result.stderr.replace("launch    | zenps status", ""), "all ended by themselves"


def join_twice(seconds: float) -> list[Any]:
    """What two jobs of one process sum; or why there is no second."""
    results = []
    for tensor in (torch.ones(3), torch.full((3,), 2.0)):
        zps.init()
        results.append(zps.push_pull(tensor, "x", average=False).tolist())
        zps.shutdown()
        time.sleep(seconds)
    return results


def test_workers_join_again_where_the_scheduler_waits_for_them() -> None:
    with Cluster(settings={"cluster.rejoin_seconds": 8}) as cluster:
        workers = [cluster.start(join_twice, 0.5, rank=rank, init=False) for rank in range(2)]
        assert [worker.result() for worker in workers] == [[[2.0] * 3, [4.0] * 3]] * 2
        cluster.drain()


def go_on_after_an_uneven_end() -> list[Tensor]:
    """Rank 0 fails in the middle of backward, and leaves. Both go on with their optimizer in a new job."""
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.Linear(6, 6), nn.Linear(6, 6))

    def fail(gradient: Tensor) -> Tensor:
        if zps.rank() == 0 and failing:
            raise ValueError("a bad batch")
        return gradient

    def step(number: int) -> None:
        optimizer.zero_grad()
        torch.manual_seed(10 * number + zps.rank())
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()

    failing = False
    first.weight.register_hook(fail)
    zps.init()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for number in range(3):
        step(number)
    saved = optimizer.state_dict()
    step(3)
    failing = True
    try:
        while True:  # under ssp, rank 1 learns of it some steps later
            step(4)
    except (ValueError, PeerLostError):
        zps.shutdown()
    failing = False
    optimizer.load_state_dict(saved)
    zps.init()
    zps.broadcast_parameters(model.state_dict())
    for number in range(3):
        step(number)
    optimizer.drain()
    zps.shutdown()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("consistency", ["bsp", "ssp"])
@pytest.mark.parametrize("values", ["same", "int8"])
def test_an_optimizer_goes_on_in_a_new_job_though_the_last_one_has_ended_unevenly(
    consistency: str, values: str
) -> None:
    """What was left of the old job's step was pushed into the new one, for ever another step than others'."""
    settings = {
        "cluster.rejoin_seconds": 10,
        "cluster.deadline_seconds": 10,
        "sync.bucket_bytes": 1024,
        "sync.consistency": consistency,
        "sync.values": values,
    }
    with Cluster(settings=settings) as cluster:
        workers = [cluster.start(go_on_after_an_uneven_end, rank=rank, init=False) for rank in range(2)]
        first, second = (worker.result() for worker in workers)
        assert all(torch.equal(*each) for each in zip(first, second, strict=True))
        cluster.drain()


def leave() -> None:
    zps.init()
    zps.shutdown()


@pytest.mark.long
def test_a_server_that_came_when_all_workers_had_left_ends_with_the_job() -> None:
    with Cluster(1, 1, {"cluster.rejoin_seconds": 10}) as cluster:
        cluster.start(leave, init=False).result()
        cluster.await_state("draining")
        late = cluster.add_server()
        assert late.wait() == 1
        assert "UsageError: this job has ended" in late.log
        cluster.servers.remove(late)
        cluster.drain()


def leave_and_wait(until: Path) -> None:
    zps.init()
    zps.shutdown()
    await_file(until)


@pytest.mark.long
def test_a_scheduler_that_is_killed_when_all_have_left_ends_as_if_it_were_not(tmp_path: Path) -> None:
    with Cluster(1, 2, {"cluster.rejoin_seconds": 10}, LEASE_SECONDS) as cluster:
        worker = cluster.start(leave_and_wait, tmp_path / "end", init=False)
        cluster.await_state("draining")
        cluster.scheduler.kill()
        cluster.restart_scheduler()
        cluster.await_state("draining")
        (tmp_path / "end").touch()
        worker.result()
        cluster.drain()


@pytest.mark.parametrize(
    "seconds", [0.0, pytest.param(1.0, marks=pytest.mark.long)], ids=["at once", "later"]
)
def test_where_nobody_waits_a_second_init_says_what_to_do(seconds: float) -> None:
    with Cluster(lease_seconds=LEASE_SECONDS) as cluster:
        began = time.monotonic()
        workers = [cluster.start(attempt, join_twice, seconds, rank=rank, init=False) for rank in range(2)]
        for worker in workers:
            error = worker.result()
            assert error.kind == "UsageError"
            assert "all its workers have left" in error.text
            assert "cluster.rejoin_seconds" in error.text
        assert time.monotonic() - began < DEADLINE_SECONDS / 2
        cluster.drain()


def fork(refused: Sequence[Callable[[], object]], last: Callable[[], object]) -> list[str]:
    """The errors of a fork's calls that are refused, and what its last call returns."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with os.fdopen(writer, "w") as out:
            for call in refused:
                raised = attempt(call)
                out.write(f"{raised.kind}: {raised.text}\n")
            out.write(f"{last()}\n")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        read = lines.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    return read


def in_a_fork() -> list[str]:
    """What a fork of a worker reads of its errors, before the worker's next round."""

    def leave() -> bool:
        zps.shutdown()
        return zps.is_initialized()

    zps.push_pull(torch.ones(3), "x")
    read = fork([lambda: zps.push_pull(torch.ones(3), "x"), zps.barrier, zps.rank, zps.init], leave)
    assert zps.push_pull(torch.ones(3), "x").tolist() == [1, 1, 1]
    return read


def test_a_fork_of_a_worker_is_refused_and_leaves_the_worker_alone() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        ((*errors, is_initialized),) = cluster.run(in_a_fork)
    assert len(errors) == 4
    assert all(error.startswith("UsageError: this process is a fork of a worker") for error in errors), errors
    assert is_initialized == "False"


def in_a_fork_with_handles(go_on: Path) -> list[str]:
    """What rank 0's fork reads of a handle in flight and of one with its result; then its own result."""
    if zps.rank():
        own = zps.push_pull(torch.ones(3), "there")
        await_file(go_on)
        return [str(own.tolist()), str(zps.push_pull(torch.ones(3), "in flight").tolist())]
    there = zps.push_pull_async(torch.ones(3), "there")
    zps.synchronize(there)
    handle = zps.push_pull_async(torch.ones(3), "in flight")
    refused: list[Callable[[], object]] = [
        lambda: zps.synchronize(handle),
        handle.wait,
        lambda: zps.poll(handle),
    ]
    read = fork(refused, lambda: zps.synchronize(there).tolist())
    go_on.touch()
    return [*read, str(zps.synchronize(handle).tolist())]


def test_a_handle_in_flight_is_refused_in_a_fork_at_once(tmp_path: Path) -> None:
    with Cluster(workers=2, servers=1) as cluster:
        (*errors, there, own), others = cluster.run(in_a_fork_with_handles, tmp_path / "go on")
    assert len(errors) == 3
    said = "UsageError: tensor 'in flight': this process is a fork of a worker"
    assert all(error.startswith(said) for error in errors), errors
    assert there == own == "[1.0, 1.0, 1.0]"
    assert others == [own, own]


def without_memory() -> Any:
    """Pushes while there is no shared memory, and again when there is."""
    tensor = torch.ones(200_000)
    zps.push_pull(tensor, "x")

    def full(arena: Arena, data: memoryview, *, is_pooled: bool = True) -> memoryview:
        raise TensorError("no memory")

    copy, Arena.copy = Arena.copy, full  # type: ignore[assignment]
    failed = attempt(zps.push_pull, tensor, "x")
    Arena.copy = copy  # type: ignore[method-assign]
    return failed, zps.push_pull(2 * tensor, "x")


def test_a_name_is_free_after_a_failed_copy_into_shared_memory() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        ((failed, result),) = cluster.run(without_memory)
    assert (failed.kind, failed.text) == ("TensorError", "no memory")
    assert torch.equal(result, torch.full((200_000,), 2.0))


def with_a_dropped_handle() -> Any:
    zps.push_pull_async(torch.ones(3), "x")
    return soon(torch.ones(3), "x").tolist()


def test_a_name_whose_handle_was_dropped_is_free_once_its_answer_has_come() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        assert cluster.run(with_a_dropped_handle) == [[1, 1, 1]]


def left_over(addresses: list[str]) -> list[list[str]]:
    """What is left after leaving each cluster, before a collection: descriptors, and threads of gloo."""
    gc.disable()
    before = set(os.listdir("/proc/self/fd"))
    found = []
    for address in addresses:
        os.environ["ZENPS_CLUSTER_SCHEDULER"] = address
        zps.init()
        zps.push_pull(torch.ones(100_000), "dense")
        zps.push_pull(torch.ones(100, 2).to_sparse(1), "sparse")
        zps.shutdown()
        left = set(os.listdir("/proc/self/fd")) - before
        files = []
        for number in left:
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        # libzmq's: pyzmq keeps one context, from the first frame on that is sent without a copy.
        found.append([file for file in files if "eventfd" not in file and "eventpoll" not in file])
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                found[-1] += [name for name in [(thread / "comm").read_text()] if "gloo" in name]
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sync.scheme": "allreduce"},
        {"sync.scheme": "auto"},
        {"sync.consistency": "ds-sync"},
        {"sync.levels": 2},
    ],
    ids=["servers", "peers", "auto", "ds-sync", "hosts"],
)
def test_nothing_stays_open_after_shutdown(settings: dict[str, object]) -> None:
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(Cluster(2, 1, settings)) for _ in range(2)]
        addresses = [cluster.address for cluster in clusters]
        workers = [clusters[0].start(left_over, addresses, rank=rank, init=False) for rank in range(2)]
        for worker in workers:
            assert worker.result() == [[], []]


def threads_after_shutdown(lingering: str) -> list[str]:
    """The threads of ZenPS that live when it returns, where one takes a while to end."""
    run = threading.Thread.run

    def run_and_linger(thread: threading.Thread) -> None:
        run(thread)
        if thread.name == lingering:
            time.sleep(0.5)

    threading.Thread.run = run_and_linger  # type: ignore[assignment]
    zps.init()
    zps.push_pull(torch.ones(100_000), "dense")
    names = [thread.name for thread in threading.enumerate()]
    assert lingering in names or (lingering == "zenps-sum_0" and zps.rank() > 0), "only a leader adds"
    zps.shutdown()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zenps")]


@pytest.mark.parametrize(
    ("lingering", "settings"),
    [
        ("zenps-lease", {}),
        ("zenps-events", {}),
        ("zenps-pusher", {"sync.scheme": "byteps"}),
        ("zenps-peers", {"sync.scheme": "allreduce"}),
        ("zenps-averager", {"sync.consistency": "ds-sync"}),
        ("zenps-host", {"sync.levels": 2}),
        ("zenps-host-link", {"sync.levels": 2}),
        ("zenps-sum_0", {"sync.levels": 2}),
    ],
)
def test_no_thread_outlives_shutdown(lingering: str, settings: dict[str, object]) -> None:
    """One that frees the last tensor while the interpreter ends would abort the process."""
    with Cluster(2, 1, settings) as cluster:
        workers = [
            cluster.start(threads_after_shutdown, lingering, rank=rank, init=False) for rank in range(2)
        ]
        assert [worker.result() for worker in workers] == [[], []]


def threads_after_an_interrupt_of_init(opens: str) -> list[str]:
    """The threads of ZenPS that live if Ctrl-C comes as ``opens`` returns."""
    open_ = pkgutil.resolve_name(opens)

    def open_and_interrupt(*args: Any, **kwargs: Any) -> Any:
        opened = open_(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return opened

    signal.signal(signal.SIGINT, signal.default_int_handler)
    pytest.MonkeyPatch().setattr(opens, open_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        zps.init()
    assert not zps.is_initialized()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zenps")]


@pytest.mark.parametrize(
    "opens",
    ["zenps.worker.bootstrap.Channel", "zenps.worker.bootstrap.Lease", "zenps.worker.process.join_cluster"],
)
def test_an_interrupt_of_init_leaves_no_worker_behind(opens: str) -> None:
    with Cluster(2, 1, {"sync.consistency": "ds-sync"}) as cluster:
        workers = [
            cluster.start(threads_after_an_interrupt_of_init, opens, rank=rank, init=False)
            for rank in range(2)
        ]
        assert [worker.result() for worker in workers] == [[], []]
        cluster.drain()
