"""Workers and servers of one host read large values in each other's memory."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import (
    DEADLINE_SECONDS,
    LEASE_SECONDS,
    Cluster,
    await_file,
    copies_to_shared_memory,
    shared_bytes,
)
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.ports import free_port
from zenps.kernels.native.library import find_library

ROUNDS = 8
ROWS, COLUMNS = 50_000, 16


def make(kind: str, number: int, rank: int) -> Tensor:
    """Some 500 KB, other rows and values in each round, and of each rank."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    if kind == "dense":
        return torch.randn(200_000, generator=generator)
    rows = torch.randint(ROWS, (1, 8000), generator=generator)
    return torch.sparse_coo_tensor(
        rows, torch.randn((8000, COLUMNS), generator=generator), (ROWS, COLUMNS), check_invariants=True
    )


def push_and_keep(number_of_rounds: int = ROUNDS, first: int = 0) -> tuple[list[dict[str, Tensor]], float]:
    """All results, none of which may change while later ones are computed; and what was shared."""
    results = []
    for number in range(first, first + number_of_rounds):
        handles = {
            kind: zps.push_pull_async(make(kind, number, zps.rank()), kind) for kind in ("sparse", "dense")
        }
        results.append({kind: handle.wait() for kind, handle in handles.items()})
    return results, shared_bytes()


@functools.cache
def expected(kind: str, number: int, ranks: int) -> Tensor:
    return reduce_in_rank_order([make(kind, number, rank) for rank in range(ranks)], average=True)


def check(results: list[dict[str, Tensor]], ranks: int = 2, first: int = 0) -> None:
    for number, by_kind in enumerate(results, first):
        for kind, result in by_kind.items():
            assert_same_bits(result, expected(kind, number, ranks))


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"sync.chunk_bytes": 100_000}, marks=pytest.mark.long)]
)
def test_values_do_not_travel_and_are_the_same(settings: dict[str, object]) -> None:
    outcomes = {}
    for how in ("memory", "tcp"):
        with Cluster(settings={**settings, "cluster.same_host": how}) as cluster:
            outcomes[how] = cluster.run(push_and_keep)
    for (near, near_bytes), (far, far_bytes) in zip(outcomes["memory"], outcomes["tcp"], strict=True):
        assert far_bytes == 0
        assert near_bytes > ROUNDS * 2 * 400_000
        check(near)
        for one, other in zip(near, far, strict=True):
            for kind, result in one.items():
                assert_same_bits(result, other[kind])


def count_copies() -> int:
    """How often values of a sparse tensor are copied into shared memory once they are compacted."""
    copies = copies_to_shared_memory()
    for number in range(3):
        zps.push_pull(make("sparse", number, zps.rank()), "sparse")
    assert shared_bytes() > 3 * 400_000
    return len(copies)


@pytest.mark.skipif(find_library() is None, reason="native kernels were not built")
def test_rows_are_compacted_into_shared_memory() -> None:
    with Cluster(settings={"kernels.backend": "native"}) as cluster:
        assert cluster.run(count_copies) == [0, 0]


@pytest.mark.long
def test_a_server_that_shares_nothing_gets_all_by_tcp() -> None:
    with Cluster(server_settings={"cluster.same_host": "tcp"}) as cluster:
        for results, shared in cluster.run(push_and_keep):
            assert shared == 0
            check(results)


def push_around_a_loss(done: Path) -> list[tuple[list[dict[str, Tensor]], float]]:
    """Half of the rounds, and the other half once a server is gone."""
    before = push_and_keep(ROUNDS // 2)
    (done / f"pushed{zps.rank()}").touch()
    await_file(done / "killed")
    return [before, push_and_keep(ROUNDS // 2, first=ROUNDS // 2)]


def test_kill_9_of_a_server(tmp_path: Path) -> None:
    with Cluster(lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_around_a_loss, tmp_path, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"pushed{rank}")
        cluster.servers[0].kill()
        (tmp_path / "killed").touch()
        for worker in workers:
            (before, shared_before), (after, shared_after) = worker.result()
            check(before)
            check(after, first=ROUNDS // 2)
            assert shared_after > shared_before + ROUNDS // 2 * 400_000


@pytest.mark.long
def test_kill_9_of_the_only_server_which_comes_back_at_its_address(tmp_path: Path) -> None:
    port = {"cluster.server_port": free_port()}
    with Cluster(servers=1, lease_seconds=LEASE_SECONDS, server_settings=port) as cluster:
        workers = [cluster.start(push_around_a_loss, tmp_path, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"pushed{rank}")
        cluster.servers[0].kill()
        cluster.await_epoch(2)
        cluster.add_server()
        (tmp_path / "killed").touch()
        for worker in workers:
            (before, shared_before), (after, shared_after) = worker.result()
            check(before)
            check(after, first=ROUNDS // 2)
            assert shared_after > shared_before + ROUNDS // 2 * 400_000, "the new one has no worker's memory"


def push_without(done: Path) -> list[tuple[list[dict[str, Tensor]], float]]:
    """Half of the rounds; then rank 1 is killed with results that it was lent, and rank 0 goes on."""
    before = push_and_keep(ROUNDS // 2)
    held = zps.push_pull_async(make("dense", 0, zps.rank()), "held")
    while not held.done():
        pass
    (done / f"pushed{zps.rank()}").touch()
    await_file(done / "killed")
    await_world_of(1)
    return [before, push_and_keep(ROUNDS // 2, first=ROUNDS // 2)]


def await_world_of(size: int) -> None:
    """Waits until this worker knows that there are no more."""
    until = time.monotonic() + DEADLINE_SECONDS
    while zps.size() != size:
        assert time.monotonic() < until, f"{zps.size()} workers, expected {size}"
        time.sleep(0.01)


@pytest.mark.long
def test_kill_9_of_a_worker_that_was_lent_results(tmp_path: Path) -> None:
    is_elastic = {"cluster.on_worker_loss": "continue"}
    with Cluster(settings=is_elastic, lease_seconds=LEASE_SECONDS) as cluster:
        stays, goes = (cluster.start(push_without, tmp_path, rank=rank) for rank in range(2))
        for rank in range(2):
            await_file(tmp_path / f"pushed{rank}")
        goes.kill()
        (tmp_path / "killed").touch()
        (before, shared_before), (after, shared_after) = stays.result()
        check(before)
        check(after, ranks=1, first=ROUNDS // 2)
        assert shared_after > shared_before + ROUNDS // 2 * 400_000


def read_after_leaving(done: Path) -> list[dict[str, Tensor]]:
    """Rank 1 leaves with results that it has not read; rank 0 trains on, and then rank 1 reads them."""
    handles = {kind: zps.push_pull_async(make(kind, 0, zps.rank()), kind) for kind in ("sparse", "dense")}
    if zps.rank() == 0:
        results = [{kind: handle.wait() for kind, handle in handles.items()}]
        await_world_of(1)
        push_and_keep(ROUNDS, first=1)
        (done / "trained").touch()
        return results
    while not all(handle.done() for handle in handles.values()):
        pass
    assert shared_bytes() > 2 * 400_000
    zps.shutdown()
    await_file(done / "trained")
    return [{kind: handle.wait() for kind, handle in handles.items()}]


def test_results_that_are_read_after_leaving_are_right(tmp_path: Path) -> None:
    with Cluster(settings={"cluster.on_worker_loss": "continue"}) as cluster:
        for results in cluster.run(read_after_leaving, tmp_path):
            check(results)
