"""Allgather, broadcast and allreduce of real ranks: bit for bit, for every dtype, and errors on all ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, attempt
from zenps.schemes.registry import scheme_names

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8)
RANKS = 3
OPS: tuple[Any, ...] = ("average", "sum", "min", "max", "product")


def parts(rank: int) -> dict[str, Tensor]:
    """What a rank gathers: its first dimension is its own, and may be 0."""
    torch.manual_seed(rank)
    numbers = 9 * torch.randn(2 + 3 * rank, 5)
    # A NaN with a payload, the other zero, a denormal number.
    special = torch.tensor([0x7FC12345 + rank, -0x80000000, 1], dtype=torch.int32).view(torch.float32)
    return {str(dtype): numbers.abs().to(dtype) for dtype in DTYPES} | {
        "no dimensions": torch.tensor(float(rank)),
        "one rank": torch.ones(rank % 2, 3),
        "nobody": torch.empty(0, 4),
        "no elements": torch.empty(rank, 0),
        "zeros": torch.zeros(1000 * rank, 2),
        "special": special,
        "large": torch.randn(30_001 + rank, 7),
        "transposed": torch.randn(4, rank + 1, 2).transpose(0, 1),
        "conjugate": torch.randn(rank + 1, 2, dtype=torch.complex64).conj(),
        "expanded": torch.tensor([float(rank)]).expand(4),
        "parameter": torch.nn.Parameter(torch.full((1, 2), float(rank))),
        # Rank 0 has one element, which is contiguous with any stride.
        "column": torch.randn(1 + rank, 5)[:, 1],
    }


def alike(rank: int) -> dict[str, Tensor]:
    """What a rank reduces and broadcasts: the same shapes on all ranks."""
    torch.manual_seed(10 + rank)
    numbers = 9 * torch.randn(6, 5)
    numbers[rank, 0] = float("nan")
    return {str(dtype): numbers.nan_to_num().to(dtype) for dtype in DTYPES} | {
        "nan": numbers,
        "no dimensions": torch.tensor(rank - 1.5),
        "empty": torch.empty(0, 3),
        "column of one": torch.randn(1, 5)[:, 1],
        "large": torch.randn(50_003),
    }


def combine() -> dict[str, Any]:
    """Every collective, and what ranks that differ get."""
    rank = zps.rank()
    given = alike(rank)
    results: dict[str, Any] = {
        "gather": {name: zps.allgather(part, name) for name, part in parts(rank).items()}
    }
    results["objects"] = [
        zps.allgather_object(value) for value in ({"rank": rank, "x": "é" * 400}, None, [[rank]])
    ]
    results["broadcast"] = {name: zps.broadcast(tensor, 2, name) for name, tensor in given.items()}
    handles = [zps.broadcast_async(tensor, 1, name) for name, tensor in given.items()]
    results["async"] = dict(zip(given, map(zps.synchronize, handles), strict=True))
    for op in OPS:
        results[op] = {name: attempt(zps.allreduce, tensor, name, op) for name, tensor in given.items()}
    overflow = torch.tensor([100, -100, 7])
    results["narrow"] = {
        kind: [zps.push_pull(each.to(dtype), f"{kind} {dtype}", average=False) for dtype in NARROW]
        for kind, each in {"dense": overflow, "sparse": overflow.unsqueeze(1).to_sparse(1)}.items()
    }
    results["errors"] = differ()
    results["afterwards"] = zps.allgather(torch.tensor(rank), "afterwards").tolist()
    return results


def differ() -> dict[str, Any]:
    """Rank 0 differs from the others, in each case in one way."""
    first = zps.rank() == 0
    ones, other = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.float64)
    graph = (torch.nn.Parameter(ones) * 2).sum()
    large = torch.ones(300_000)
    return {
        "gather dtype": attempt(zps.allgather, other if first else ones, "x"),
        "gather shape": attempt(zps.allgather, ones if first else torch.ones(3, 3), "x"),
        "gather sparse": attempt(zps.allgather, ones.to_sparse(1) if first else ones, "x"),
        "gather graph": attempt(zps.allgather, graph if first else graph.detach(), "x"),
        "gather no plain data": attempt(zps.allgather_object, object() if first else 1),
        "broadcast dtype": attempt(zps.broadcast, other if first else ones),
        "broadcast shape": attempt(zps.broadcast, torch.ones(50_000) if first else ones),
        "broadcast list": attempt(zps.broadcast, [1.0] if first else ones),
        "two roots": attempt(zps.broadcast, ones, int(first)),
        "no root": attempt(zps.broadcast, ones, 5000 if first else 0),
        "no root at all": attempt(zps.broadcast, ones, -1),
        "no number": attempt(zps.broadcast, ones, "0"),
        "reduce dtype": attempt(zps.allreduce, other if first else ones, "x", "max"),
        "reduce rows": attempt(zps.allreduce, torch.ones(4, 2) if first else ones, "x", "max"),
        "two operations": attempt(zps.allreduce, ones, "x", "min" if first else "max"),
        "a sum and a maximum": attempt(zps.allreduce, ones, "x", "sum" if first else "max"),
        "a large sum and a maximum": attempt(zps.allreduce, large, "x", "sum" if first else "max"),
        "an average and a sum": attempt(zps.allreduce, ones, "x", "average" if first else "sum"),
        "no operation": attempt(zps.allreduce, ones, "x", "mean"),
        "sparse maximum": attempt(zps.allreduce, ones.to_sparse(1), "x", "max"),
        "complex maximum": attempt(zps.allreduce, ones.to(torch.complex64), "x", "max"),
        "push_pull graph": attempt(zps.push_pull, graph, "x"),
        "sum graph": attempt(zps.allreduce, graph, "x", "sum"),
        "narrow and wide": attempt(
            zps.push_pull, torch.ones(3, dtype=torch.int64 if first else torch.int8), "x", False
        ),
        "bool": attempt(zps.push_pull, ones.bool(), "x", False),
        "average of complex numbers": attempt(zps.allreduce, ones.to(torch.complex64), "x"),
        "averages of integers and of floats": attempt(
            zps.allreduce, ones.int() if first else ones.double(), "x"
        ),
    }


TENSOR, MISMATCH, USAGE = "TensorError", "MismatchError", "UsageError"
ERRORS: dict[str, tuple[str, str, str]] = {
    "gather dtype": (MISMATCH, MISMATCH, "rows of float64 (2,), gathered;"),
    "gather shape": (MISMATCH, MISMATCH, "rows of float32 (3,)"),
    "gather sparse": (TENSOR, MISMATCH, ""),
    "gather graph": (TENSOR, MISMATCH, ""),
    "gather no plain data": (USAGE, USAGE, "expected plain data"),
    "broadcast dtype": (MISMATCH, MISMATCH, "dense float64 (3, 2) from rank 0"),
    "broadcast shape": (MISMATCH, MISMATCH, "dense float32 (50000,)"),
    "broadcast list": (
        TENSOR,
        MISMATCH,
        "expected a tensor, got list; leave it out, or send plain data by broadcast_object()",
    ),
    "two roots": (MISMATCH, MISMATCH, "rank(s) 0 pushed dense float32 (3, 2) from rank 1; rank(s)"),
    "no root": (USAGE, MISMATCH, "root_rank 5000: expected 0 to"),
    "no root at all": (USAGE, USAGE, "root_rank -1: expected 0 to"),
    "no number": (USAGE, USAGE, "root_rank '0'"),
    "reduce dtype": (MISMATCH, MISMATCH, "dense float64 (3, 2) for its max"),
    "reduce rows": (MISMATCH, MISMATCH, "dense float32 (4, 2)"),
    "two operations": (MISMATCH, MISMATCH, "for its min"),
    "a sum and a maximum": (MISMATCH, MISMATCH, "for its max"),
    "a large sum and a maximum": (MISMATCH, MISMATCH, "for its max"),
    "an average and a sum": (MISMATCH, MISMATCH, "averaged"),
    "no operation": (USAGE, USAGE, "expected average, sum, min, max or product"),
    "sparse maximum": (TENSOR, TENSOR, "use .to_dense()"),
    "complex maximum": (TENSOR, TENSOR, "complex numbers have no max"),
    "push_pull graph": (TENSOR, TENSOR, "pass tensor.detach()"),
    "sum graph": (TENSOR, TENSOR, "pass tensor.detach()"),
    "narrow and wide": (MISMATCH, MISMATCH, "dense int8 (3,)"),
    "bool": (TENSOR, TENSOR, "allreduce(op='max')"),
    "average of complex numbers": (TENSOR, TENSOR, "expected one of float16"),
    "averages of integers and of floats": (MISMATCH, MISMATCH, "dense int32 (3, 2), averaged"),
}
"""What rank 0 gets, what the others get, and what all of their messages say."""


def same_bits(got: Any, other: Tensor) -> bool:
    assert isinstance(got, Tensor), got
    flat = [as_bytes(each.resolve_conj()) for each in (got, other.detach())]
    return (got.dtype, got.shape) == (other.dtype, other.shape) and torch.equal(*flat)


def as_bytes(tensor: Tensor) -> Tensor:
    """A copy has a stride of 1, which a contiguous tensor of one element need not have."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


SETTINGS: list[Any] = [
    {"sync.scheme": "zenps"},
    *(
        pytest.param(settings, marks=pytest.mark.long)
        for settings in (
            *({"sync.scheme": name} for name in scheme_names() if name != "zenps"),
            {"sync.levels": 2},
            {"cluster.on_worker_loss": "continue"},
        )
    ),
]


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda settings: " ".join(map(str, settings.values())))
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    with Cluster(RANKS, 2, request.param) as cluster:
        return cluster.run(combine)


def test_allgather_concatenates_in_order_of_rank(results: list[dict[str, Any]]) -> None:
    by_rank = [parts(rank) for rank in range(RANKS)]
    for name in by_rank[0]:
        whole = torch.cat([part[name] if part[name].dim() else part[name].unsqueeze(0) for part in by_rank])
        for outcome in results:
            got = outcome["gather"][name]
            assert same_bits(got, whole), name
            assert not got.requires_grad


def test_allgather_object(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        first, second, third = outcome["objects"]
        assert first == [{"rank": rank, "x": "é" * 400} for rank in range(RANKS)]
        assert second == [None] * RANKS
        assert third == [[[rank]] for rank in range(RANKS)]


@pytest.mark.parametrize(("how", "root"), [("broadcast", 2), ("async", 1)])
def test_broadcast_returns_the_tensor_of_the_root(results: list[dict[str, Any]], how: str, root: int) -> None:
    for outcome in results:
        for name, sent in alike(root).items():
            assert same_bits(outcome[how][name], sent), name


def wanted(op: str, stacked: Tensor) -> Tensor | None:
    """What torch computes of the tensors of all ranks; None if ZenPS refuses them."""
    dtype = stacked.dtype
    match op:
        case "average":
            if dtype.is_complex:
                return None
            return stacked.double().mean(0).to(dtype if dtype.is_floating_point else torch.float64)
        case "sum":
            is_refused = dtype == torch.bool or dtype.is_complex
            return (
                None
                if is_refused
                else stacked.sum(0, dtype=torch.float64 if dtype.is_floating_point else dtype).to(dtype)
            )
        case "product":
            return stacked.prod(0, dtype=dtype)
    return None if dtype.is_complex else (stacked.amin(0) if op == "min" else stacked.amax(0))


@pytest.mark.parametrize("op", OPS)
def test_allreduce(results: list[dict[str, Any]], op: str) -> None:
    by_rank = [alike(rank) for rank in range(RANKS)]
    for name in by_rank[0]:
        expected = wanted(op, torch.stack([tensors[name] for tensors in by_rank]))
        for outcome in results:
            got = outcome[op][name]
            if expected is None:
                assert got.kind == TENSOR
            else:
                torch.testing.assert_close(got, expected, equal_nan=True, msg=name)
                assert same_bits(got, results[0][op][name]), name


def test_sums_of_narrow_integers_wrap_as_in_torch(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        for kind, sums in outcome["narrow"].items():
            for dtype, got in zip(NARROW, sums, strict=True):
                total = RANKS * torch.tensor([100, -100, 7])
                assert got.dtype == dtype
                assert got.is_sparse == (kind == "sparse")
                assert got.to_dense().view(-1).tolist() == total.to(dtype).tolist()


@pytest.mark.parametrize("case", ERRORS)
def test_what_differs_is_an_error_on_every_rank(results: list[dict[str, Any]], case: str) -> None:
    first, others, text = ERRORS[case]
    for rank, outcome in enumerate(results):
        error = outcome["errors"][case]
        assert isinstance(error, Raised), error
        assert error.kind == (others if rank else first)
        assert text in error.text
        assert outcome["afterwards"] == [0, 1, 2]


def gather_until_alone() -> list[list[int]]:
    """Rank 1 ends without a word; what the others gather meanwhile."""
    gathered = [zps.allgather(torch.tensor(zps.rank()), "rank").tolist()]
    if zps.rank() == 1:
        os._exit(1)
    while len(gathered[-1]) == RANKS:
        gathered.append(zps.allgather(torch.tensor(zps.rank()), "rank").tolist())
    return gathered


@pytest.mark.long
def test_an_elastic_job_gathers_without_a_worker_that_is_lost() -> None:
    with Cluster(RANKS, 2, {"cluster.on_worker_loss": "continue"}, LEASE_SECONDS) as cluster:
        workers = [cluster.start(gather_until_alone, rank=rank) for rank in range(RANKS)]
        first, third = workers[0].result(), workers[2].result()
        cluster.drain()
    assert first == third == [[0, 1, 2], [0, 2]]
