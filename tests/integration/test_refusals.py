"""Tensors, names and calls that are refused, and ranks that disagree: an error on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt


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
    "sum of bool": (lambda: zps.push_pull(torch.ones(3).bool(), "x", average=False), "TensorError", "bool"),
    "complex": (lambda: zps.push_pull(torch.ones(3, dtype=torch.complex64), "x"), "TensorError", "complex64"),
    "meta": (lambda: zps.push_pull(torch.ones(3, device="meta"), "x"), "TensorError", "meta"),
    "csr": (lambda: zps.push_pull(torch.eye(3).to_sparse_csr(), "x"), "TensorError", "sparse_csr"),
    "list": (lambda: zps.push_pull([1.0, 2.0], "x"), "TensorError", "list"),  # type: ignore[arg-type]
    "index beyond the table": (lambda: zps.push_pull(without_check(10), "x"), "TensorError", "0 to 9"),
    "negative index": (lambda: zps.push_pull(without_check(-1), "x"), "TensorError", "0 to 9"),
    "index beyond its dimension": (
        lambda: zps.push_pull(beyond_a_dimension(), "x"),
        "TensorError",
        "(70, 90)",
    ),
    "too many rows": (lambda: zps.push_pull(table(2**62, 1), "x"), "TensorError", "; divide the table"),
    "second init": (
        lambda: zps.init(sets=["sync.seed=7"]),
        "UsageError",
        "with sync.seed = 5915982, and is now with 7",
    ),
    "empty name": (lambda: zps.push_pull(torch.ones(3), ""), "UsageError", "1 to 1024"),
    "long name": (lambda: zps.push_pull(torch.ones(3), "x" * 1025), "UsageError", "1 to 1024"),
    "priority": (
        lambda: zps.push_pull_async(torch.ones(3), "x", priority="high"),  # type: ignore[arg-type]
        "UsageError",
        "priority 'high': expected an integer",
    ),
    "name not text": (lambda: zps.push_pull(torch.ones(3), 7), "UsageError", "string"),  # type: ignore[arg-type]
    "name not Unicode": (lambda: zps.push_pull(torch.ones(3), "\ud800"), "UsageError", "UTF-8"),
    "no such root": (
        lambda: zps.broadcast_parameters({"x": torch.ones(3)}, root_rank=2),
        "UsageError",
        "0 to 1",
    ),
    "sparse broadcast": (lambda: zps.broadcast_parameters({"x": table(3)}), "TensorError", "strided"),
    "broadcast without memory": (
        lambda: zps.broadcast_parameters({"x": torch.ones(3, device="meta")}),
        "TensorError",
        "meta device",
    ),
    "broadcast of what cannot be written": (
        lambda: zps.broadcast_parameters({"x": torch.inference_mode()(torch.ones)(3)}),
        "TensorError",
        "clone it",
    ),
    "object not plain": (
        lambda: zps.broadcast_object({"x": object()}),
        "UsageError",
        "expected plain data: None, bool, int, float, str, bytes, and lists and dicts of these",
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


# Over servers, and among workers.
@pytest.fixture(scope="module", params=["zenps", "sparcml"])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    with Cluster(servers=3, settings={"sync.scheme": request.param}) as cluster:
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


# ── kinds ───────────────────────────────────────────────────────────────────────────────────────

SPARSE = torch.ones(6, 4).to_sparse(1)
KINDS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "dense and sparse": (torch.ones(6, 4), SPARSE),
    "rows and elements": (SPARSE, torch.ones(6, 4).to_sparse(2)),
    "large": (torch.ones(600, 40), torch.ones(600, 40).to_sparse(1)),
}
"""Tensors of equal shape and dtype, of rank 0 and of rank 1."""


def push_kinds() -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for name, tensors in KINDS.items():
        outcomes[name] = attempt(zps.push_pull, tensors[zps.rank()], name)
        outcomes[f"after {name}"] = zps.push_pull(tensors[1], name).to_dense()
    return outcomes


@pytest.mark.parametrize(
    "settings",
    [
        {"sync.scheme": "omnireduce"},
        pytest.param({"sync.scheme": "byteps", "sync.levels": 2}, marks=pytest.mark.long),
        *(
            pytest.param({"sync.scheme": name}, marks=pytest.mark.long)
            for name in ("zenps", "allreduce", "auto")
        ),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_ranks_that_differ_in_kind_are_refused_by_every_scheme(settings: dict[str, object]) -> None:
    with Cluster(settings=settings) as cluster:
        outcomes = cluster.run(push_kinds)
        cluster.drain()
    for outcome in outcomes:
        for name, (first, second) in KINDS.items():
            refused = outcome[name]
            assert isinstance(refused, Raised), (name, refused)
            assert refused.kind == "MismatchError"
            assert "ranks disagree" in refused.text
            assert "sparse" in refused.text
            assert torch.equal(outcome[f"after {name}"], second.to_dense())
            assert torch.equal(first.to_dense(), second.to_dense())


def step_with_a_tied_table(uses: Sequence[tuple[bool, bool]]) -> list[Any]:
    """For each step the error, or whether the table's average is sparse; it uses the table sparse, dense."""
    table, results = torch.nn.Embedding(4, 2, sparse=True), list[Any]()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    for is_sparse, is_dense in uses:
        optimizer.zero_grad()
        rows = [table(torch.tensor([0]))] if is_sparse else []
        torch.cat([*rows, table.weight] if is_dense else rows).sum().backward()
        stepped = attempt(optimizer.step)
        if stepped:
            results.append(stepped.text)
        else:
            assert table.weight.grad is not None
            results.append(table.weight.grad.is_sparse)
    return results


def tie() -> dict[str, list[Any]]:
    sparse, dense, both = (True, False), (False, True), (True, True)
    other = dense if zps.rank() else sparse
    return {
        "at first": step_with_a_tied_table([other]),
        "later": step_with_a_tied_table([sparse, other, sparse, both]),
        "dense by then": step_with_a_tied_table([both, other]),
    }


def test_a_table_that_is_tied_on_some_ranks_only_is_an_error_with_advice() -> None:
    with Cluster() as cluster:
        for results in cluster.run(tie):
            (refused,) = results["at first"]
            assert "dense on 1 rank(s), sparse by 1 dimension(s) on 1 rank(s)" in refused
            assert refused.endswith("and sparse=False for a table that is tied to a dense layer")
            first, refused, *others = results["later"]
            assert (first, *others) == (True, True, False)
            assert "rank(s) 1 pushed dense at present (use sparse=False for a tied table)" in refused
            assert results["dense by then"] == [False, False]
