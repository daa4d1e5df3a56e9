"""Joining again after leaving, and forks: no call waits for ever, and nothing is left open."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, Cluster, attempt
from tests.zenps.conftest import Command
from zenps.errors import TensorError
from zenps.wire.shared_memory.arena import Arena

LEASE_SECONDS = 2.0

REJOIN = """
import sys, time
import zenps, zenps.errors
import zenps as zps

zps.init()
zps.push_pull(__import__("torch").ones(3), "x")
zps.shutdown()
time.sleep(float(sys.argv[1]))
try:
    zps.init()
except zenps.errors.UsageError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    "seconds", [0.0, pytest.param(1.0, marks=pytest.mark.long)], ids=["at once", "later"]
)
def test_init_after_shutdown_under_launch_is_refused(zenps: Command, tmp_path: Path, seconds: float) -> None:
    script = tmp_path / "train.py"
    script.write_text(REJOIN)
    began = time.monotonic()
    result = zenps(
        "launch",
        "--workers=1",
        "--servers=1",
        f"--set=cluster.lease_seconds={LEASE_SECONDS}",
        *("--", sys.executable, str(script), str(seconds)),
    )
    assert time.monotonic() - began < DEADLINE_SECONDS / 2
    assert result.returncode == 0, result.stderr
    assert "refused: " in result.stdout
    assert "all its workers have left" in result.stdout


def in_a_fork() -> list[str]:
    """What a fork of a worker reads of its errors, before the worker's next round."""
    zps.push_pull(torch.ones(3), "x")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        with os.fdopen(writer, "w") as out:
            for call in (lambda: zps.push_pull(torch.ones(3), "x"), zps.barrier, zps.rank, zps.init):
                raised = attempt(call)
                out.write(f"{raised.kind}: {raised.text}\n")
            zps.shutdown()
            out.write(f"{zps.is_initialized()}\n")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        read = lines.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert zps.push_pull(torch.ones(3), "x").tolist() == [1, 1, 1]
    return read


def test_a_fork_of_a_worker_is_refused_and_leaves_the_worker_alone() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        ((*errors, is_initialized),) = cluster.run(in_a_fork)
    assert len(errors) == 4
    assert all(error.startswith("UsageError: this process is a fork of a worker") for error in errors), errors
    assert is_initialized == "False"


def without_memory() -> Any:
    """Pushes while there is no shared memory, and again when there is."""
    tensor = torch.ones(200_000)
    zps.push_pull(tensor, "x")

    def full(arena: Arena, data: memoryview, *, is_pooled: bool = True) -> memoryview:
        raise TensorError("no memory")

    copy, Arena.copy = Arena.copy, full  # type: ignore[method-assign]
    failed = attempt(zps.push_pull, tensor, "x")
    Arena.copy = copy  # type: ignore[method-assign]
    return failed, zps.push_pull(2 * tensor, "x")


def test_a_name_is_free_after_a_failed_copy_into_shared_memory() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        ((failed, result),) = cluster.run(without_memory)
    assert (failed.kind, failed.text) == ("TensorError", "no memory")
    assert torch.equal(result, torch.full((200_000,), 2.0))


def with_a_dropped_handle(seconds: float) -> Any:
    zps.push_pull_async(torch.ones(3), "x")
    time.sleep(seconds)
    return zps.push_pull(torch.ones(3), "x").tolist()


def test_a_name_whose_handle_was_dropped_is_free_once_its_answer_has_come() -> None:
    with Cluster(workers=1, servers=1) as cluster:
        assert cluster.run(with_a_dropped_handle, 0.2) == [[1, 1, 1]]


def open_files(addresses: list[str]) -> list[list[str]]:
    """The descriptors that are left after leaving each cluster."""
    before = set(os.listdir("/proc/self/fd"))
    found = []
    for address in addresses:
        os.environ["ZENPS_CLUSTER_SCHEDULER"] = address
        zps.init()
        zps.push_pull(torch.ones(100_000), "dense")
        zps.push_pull(torch.ones(100, 2).to_sparse(1), "sparse")
        zps.shutdown()
        gc.collect()
        left = set(os.listdir("/proc/self/fd")) - before
        files = []
        for number in left:
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        # libzmq's: pyzmq keeps one context, from the first frame on that is sent without a copy.
        found.append([file for file in files if "eventfd" not in file and "eventpoll" not in file])
    return found


@pytest.mark.parametrize("settings", [{}, {"sync.scheme": "allreduce"}], ids=["servers", "peers"])
def test_nothing_stays_open_after_shutdown(settings: dict[str, object]) -> None:
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(Cluster(2, 1, settings)) for _ in range(2)]
        addresses = [cluster.address for cluster in clusters]
        workers = [clusters[0].start(open_files, addresses, rank=rank, init=False) for rank in range(2)]
        for worker in workers:
            assert worker.result() == [[], []]
