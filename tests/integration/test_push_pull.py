"""push_pull through real processes: every kind of tensor, bit for bit what the sum in rank order is."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster
from tests.integration.reference import assert_same_bits, reduce_in_rank_order

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ROUNDS = 3
"""The second is pushed and awaited in inference mode."""
NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """A tensor for each rank, from a generator seeded by case, round and rank."""

    make: Callable[[torch.Generator, int], Tensor]
    average: bool = True


def dense(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, rank: _values(generator, shape, dtype)


def sparse(
    *shape: int, nnz: int, sparse_dim: int = 1, dtype: torch.dtype = torch.float32
) -> Callable[[torch.Generator, int], Tensor]:
    """Unsorted indices, a third of them duplicates."""

    def make(generator: torch.Generator, rank: int) -> Tensor:
        limits = torch.tensor(shape[:sparse_dim]).unsqueeze(1)
        indices = (torch.rand((sparse_dim, nnz), generator=generator, dtype=torch.float64) * limits).long()
        repeats = nnz // 3
        indices[:, :repeats] = indices[:, nnz - repeats :].flip(1)
        values = _values(generator, (nnz, *shape[sparse_dim:]), dtype)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)

    return make


def rows(
    size: int, *per_rank: dict[int, list[float]], columns: int = 2
) -> Callable[[torch.Generator, int], Tensor]:
    """Sparse rows written out: rank r pushes ``per_rank[r]``, and a rank beyond them nothing."""

    def make(generator: torch.Generator, rank: int) -> Tensor:
        given = per_rank[rank] if rank < len(per_rank) else {}
        values = torch.tensor(list(given.values()), dtype=torch.float32).reshape(len(given), columns)
        indices = torch.tensor([list(given)], dtype=torch.int64)
        return torch.sparse_coo_tensor(indices, values, (size, columns), check_invariants=True)

    return make


def _values(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def written(*per_rank: list[float]) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, rank: torch.tensor(per_rank[rank % len(per_rank)])


def transposed(generator: torch.Generator, rank: int) -> Tensor:
    return _values(generator, (40, 30), torch.float32).t()


def strided(generator: torch.Generator, rank: int) -> Tensor:
    return _values(generator, (40, 30), torch.float32)[::3, 1::2]


def expanded(generator: torch.Generator, rank: int) -> Tensor:
    return _values(generator, (1, 30), torch.float32).expand(20, 30)


def parameter(generator: torch.Generator, rank: int) -> Tensor:
    return torch.nn.Parameter(_values(generator, (4, 4), torch.float32))


def coalesced(generator: torch.Generator, rank: int) -> Tensor:
    return sparse(500, 4, nnz=60)(generator, rank).coalesce()


def only_rank_0(generator: torch.Generator, rank: int) -> Tensor:
    return sparse(500, 4, nnz=0 if rank else 60)(generator, rank)


def sparse_non_contiguous(generator: torch.Generator, rank: int) -> Tensor:
    indices = torch.randint(300, (50, 2), generator=generator).t()[:1]
    values = _values(generator, (4, 50), torch.float32).t()
    return torch.sparse_coo_tensor(indices, values, (300, 4), check_invariants=True)


def sparse_scalar(generator: torch.Generator, rank: int) -> Tensor:
    return _values(generator, (), torch.float32).to_sparse()


CASES: dict[str, Case] = {
    **{f"dense {dtype} average": Case(dense(7, 5, dtype=dtype)) for dtype in FLOATS},
    **{f"dense {dtype} sum": Case(dense(7, 5, dtype=dtype), False) for dtype in (*FLOATS, torch.int64)},
    **{f"sparse {dtype} average": Case(sparse(1000, 8, nnz=60, dtype=dtype)) for dtype in FLOATS},
    **{
        f"sparse {dtype} sum": Case(sparse(1000, 8, nnz=60, dtype=dtype), False)
        for dtype in (*FLOATS, torch.int64)
    },
    "dense 0-dim": Case(dense()),
    "dense 5-dim": Case(dense(2, 3, 1, 4, 5)),
    "dense empty": Case(dense(0)),
    "dense empty 3-dim": Case(dense(3, 0, 2)),
    "dense transposed": Case(transposed),
    "dense strided": Case(strided),
    "dense expanded": Case(expanded),
    "dense parameter": Case(parameter),
    "dense 64 KiB": Case(dense(16384)),
    "dense below 64 KiB": Case(dense(16383)),
    "dense large": Case(dense(100_003)),
    "dense large bfloat16": Case(dense(333, 301, dtype=torch.bfloat16), False),
    "dense large int64": Case(dense(20_001, dtype=torch.int64), False),
    "dense special": Case(written([-0.0, NAN, INF, -INF, 0.0], [-0.0, 1.0, INF, INF, -0.0]), False),
    "dense special average": Case(written([-0.0, NAN, INF, -INF, 0.0], [-0.0, 1.0, INF, INF, -0.0])),
    "sparse bitmap": Case(sparse(2000, 4, nnz=600)),
    "sparse coo": Case(sparse(100_000, 4, nnz=50)),
    "sparse large": Case(sparse(60_000, 16, nnz=3000)),
    "sparse one row": Case(sparse(1, 4, nnz=3)),
    "sparse two rows": Case(sparse(2, 4, nnz=5)),
    "sparse column": Case(sparse(5000, 1, nnz=200)),
    "sparse elements": Case(sparse(5001, nnz=200)),
    "sparse elements float16": Case(sparse(5001, nnz=200, dtype=torch.float16)),
    "sparse 2+0 dims": Case(sparse(70, 90, nnz=100, sparse_dim=2)),
    "sparse 2+1 dims": Case(sparse(70, 90, 3, nnz=100, sparse_dim=2)),
    "sparse 2+2 dims": Case(sparse(70, 90, 3, 2, nnz=100, sparse_dim=2)),
    "sparse 1+2 dims": Case(sparse(70, 3, 2, nnz=30)),
    "sparse 3+0 dims": Case(sparse(7, 9, 11, nnz=100, sparse_dim=3)),
    "sparse 0-dim": Case(sparse_scalar),
    "sparse coalesced": Case(coalesced),
    "sparse non-contiguous": Case(sparse_non_contiguous),
    "sparse no columns": Case(sparse(50, 0, nnz=7)),
    "sparse no rows": Case(sparse(0, 4, nnz=0)),
    "sparse nothing on one rank": Case(only_rank_0),
    "sparse nothing at all": Case(sparse(500, 4, nnz=0)),
    "sparse ends": Case(rows(999, {998: [1.0, 2.0], 0: [3.0, 4.0]}, {0: [5.0, 6.0], 998: [7.0, 8.0]})),
    "sparse special": Case(
        rows(9, {1: [-0.0, NAN], 4: [INF, -0.0]}, {4: [-INF, -0.0], 7: [-INF, 0.1]}), False
    ),
    "sparse cancelling": Case(rows(9, {3: [1.5, -2.0]}, {3: [-1.5, 2.0]})),
}


def inputs(name: str, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}/{number}".encode()))
    return CASES[name].make(generator, rank)


# ── on the workers ──────────────────────────────────────────────────────────────────────────────


def push_all() -> dict[str, Any]:
    """Every case in every round, and the ways of asking for several at once.

    The second round is in inference mode, which the threads that continue it are not in.
    """
    results: dict[str, Any] = {}
    for number in range(ROUNDS):
        with torch.inference_mode(number == 1):
            for name, case in CASES.items():
                given = inputs(name, zps.rank(), number)
                result = results[f"{name}/{number}"] = zps.push_pull(given, name, case.average)
                assert not result.is_inference(), "it could not be changed outside"
    results["out of order"] = ask_out_of_order()
    results["own order"] = declare_in_own_order()
    results["in flight"] = keep_many_in_flight()
    results["overwritten"] = overwrite_after_push()
    results["threads"] = push_from_threads()
    results["polled"] = poll_until_done()
    return results


def ask_out_of_order() -> dict[str, Tensor]:
    handles = {
        name: zps.push_pull_async(inputs(name, zps.rank(), 0), f"late {name}", CASES[name].average)
        for name in CASES
    }
    order = list(reversed(handles)) if zps.rank() else list(handles)
    return {name: zps.synchronize(handles[name]) for name in order}


def declare_in_own_order() -> dict[str, Tensor]:
    """Each rank begins with another tensor; it must not wait for one before it pushes the next."""
    names = list(CASES)
    begin = zps.rank() * len(names) // zps.size()
    handles = {
        name: zps.push_pull_async(inputs(name, zps.rank(), 1), f"own {name}", CASES[name].average)
        for name in names[begin:] + names[:begin]
    }
    results = {}
    for name, handle in handles.items():
        results[name] = handle.wait()
        assert zps.poll(handle)
        assert handle.wait() is results[name]
    return results


def keep_many_in_flight() -> Tensor:
    handles = [
        zps.push_pull_async(torch.full((3,), float(number)), f"many/{number}", average=False)
        for number in range(500)
    ]
    return torch.stack([handle.wait() for handle in handles])


def overwrite_after_push() -> list[Tensor]:
    """A tensor may be changed as soon as push_pull_async has returned."""
    table = inputs("sparse large", zps.rank(), 0).coalesce()
    vector = inputs("dense large", zps.rank(), 0)
    handles = [zps.push_pull_async(table, "overwritten table"), zps.push_pull_async(vector, "overwritten")]
    table.values().fill_(NAN)
    vector.fill_(NAN)
    return [handle.wait() for handle in handles]


def push_from_threads() -> list[Tensor]:
    """Four threads with tensors of their own; and two more that wait for one handle."""

    def push(thread: int) -> Tensor:
        rounds = [torch.full((5,), float(number)) for number in range(30)]
        return torch.stack([zps.push_pull(tensor, f"thread/{thread}", False) for tensor in rounds])

    with ThreadPoolExecutor(6) as pool:
        pushed = [pool.submit(push, thread) for thread in range(4)]
        handle = zps.push_pull_async(torch.ones(3), "two waiters", average=False)
        waiting = [pool.submit(handle.wait) for _ in range(2)]
        assert waiting[0].result() is waiting[1].result()
        return [future.result() for future in pushed]


def poll_until_done() -> Tensor:
    """Polling alone must bring the answer: nobody waits."""
    handle = zps.push_pull_async(inputs("sparse large", zps.rank(), 0), "polled")
    until = time.monotonic() + 20
    while not zps.poll(handle):
        assert time.monotonic() < until, "polled in vain"
    return zps.synchronize(handle)


# ── in the test process ─────────────────────────────────────────────────────────────────────────

CLUSTERS: dict[str, tuple[int, int, dict[str, object]]] = {
    "balanced": (2, 2, {}),
    "centralized": (3, 2, {"sync.partition": "centralized"}),
    "plug-in": (2, 2, {"sync.partition": "examples.hot_rows_partition:HotRows"}),
    "chunked": (2, 3, {"sync.chunk_bytes": 4096}),
    "computed positions": (2, 1, {"sync.table_bytes": 0, "sync.granule": 1}),
    "parallel": (
        2,
        2,
        {"sync.partition": "parallel", "sync.chunk_bytes": 65536, "cluster.max_message_bytes": 65536},
    ),
}


class Outcome(NamedTuple):
    size: int
    ranks: list[dict[str, Any]]


SHORT = ("balanced", "plug-in", "chunked")
"""Those in the default suite."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CLUSTERS],
)
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    workers, servers, settings = CLUSTERS[request.param]
    with Cluster(workers, servers, settings) as cluster:
        yield Outcome(workers, cluster.run(push_all))


_expected: dict[tuple[str, int, int], Tensor] = {}


def expected(name: str, size: int, number: int) -> Tensor:
    key = (name, size, number)
    if key not in _expected:
        tensors = [inputs(name, rank, number) for rank in range(size)]
        _expected[key] = reduce_in_rank_order(tensors, CASES[name].average)
    return _expected[key]


@pytest.mark.parametrize("name", CASES)
def test_result_is_the_sum_in_rank_order(outcome: Outcome, name: str) -> None:
    for results in outcome.ranks:
        for number in range(ROUNDS):
            assert_same_bits(results[f"{name}/{number}"], expected(name, outcome.size, number))


@pytest.mark.parametrize(("way", "number"), [("out of order", 0), ("own order", 1)])
def test_asynchronous_handles(outcome: Outcome, way: str, number: int) -> None:
    for results in outcome.ranks:
        for name in CASES:
            assert_same_bits(results[way][name], expected(name, outcome.size, number))


def test_many_in_flight(outcome: Outcome) -> None:
    wanted = torch.arange(500.0).mul(outcome.size).unsqueeze(1).expand(500, 3)
    for results in outcome.ranks:
        assert_same_bits(results["in flight"], wanted)


def test_threads(outcome: Outcome) -> None:
    wanted = torch.arange(30.0).mul(outcome.size).unsqueeze(1).expand(30, 5)
    for results in outcome.ranks:
        for pushed in results["threads"]:
            assert_same_bits(pushed, wanted)


def test_polling(outcome: Outcome) -> None:
    for results in outcome.ranks:
        assert_same_bits(results["polled"], expected("sparse large", outcome.size, 0))


def test_tensors_may_change_after_the_push(outcome: Outcome) -> None:
    for results in outcome.ranks:
        table, vector = results["overwritten"]
        tables = [inputs("sparse large", rank, 0).coalesce() for rank in range(outcome.size)]
        assert_same_bits(table, reduce_in_rank_order(tables, average=True))
        assert_same_bits(vector, expected("dense large", outcome.size, 0))


def test_result_needs_no_gradient(outcome: Outcome) -> None:
    assert not any(results["dense parameter/0"].requires_grad for results in outcome.ranks)


def push_beyond_32_bits() -> Tensor:
    make = sparse(3_000_000_000, 2, nnz=50)
    return zps.push_pull(make(torch.Generator().manual_seed(zps.rank()), zps.rank()), "huge")


def test_more_rows_than_fit_in_32_bits() -> None:
    with Cluster() as cluster:
        results = cluster.run(push_beyond_32_bits)
    make = sparse(3_000_000_000, 2, nnz=50)
    tensors = [make(torch.Generator().manual_seed(rank), rank) for rank in range(2)]
    for result in results:
        assert_same_bits(result, reduce_in_rank_order(tensors, average=True))
