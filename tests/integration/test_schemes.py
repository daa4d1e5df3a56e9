"""Every scheme through real processes: the same sums, bit for bit, on whichever way they come.

Dense tensors that workers exchange among themselves are summed by gloo, in an order of its own: the same bits
on all ranks, and within rounding those in rank order. Rows are added in pairs under some schemes, which of
three ranks gives (0 + 1) + 2, and so the same bits again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.cluster import Cluster
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.integration.test_push_pull import CASES, ROUNDS, expected, inputs, push_all
from zenps.schemes.registry import scheme_names, scheme_of

WORKERS, SERVERS = 3, 2

SHORT = ("zen", "omnireduce", "sparcml")
"""Those in the default suite: one of each exchange."""

Outcome = tuple[str, list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in SHORT else pytest.mark.long)
        for name in scheme_names()
        if name != "zenps"
    ],
)
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    with Cluster(WORKERS, SERVERS, {"sync.scheme": request.param}) as cluster:
        yield request.param, cluster.run(push_all)


def as_sent(scheme: str, expected: Tensor) -> Tensor:
    """What is left of a union that travels dense: no row of zeros, and no -0.0, to which others add 0."""
    if scheme_of(scheme).wire.keys != "none" or not expected.is_sparse:
        return expected
    values = expected.values()
    columns = expected.shape[expected.sparse_dim() :].numel()
    kept = (values != 0).reshape(len(values), columns).any(1)
    return torch.sparse_coo_tensor(
        expected.indices()[:, kept],
        values[kept] + 0,
        expected.shape,
        is_coalesced=True,
        check_invariants=True,
    )


def assert_is_sum(scheme: str, results: Sequence[Tensor], wanted: Tensor) -> None:
    """What each rank has got of one tensor."""
    declared = scheme_of(scheme)
    in_rank_order = declared.engine != "peers" or (wanted.is_sparse and declared.wire.keys != "none")
    wanted = as_sent(scheme, wanted)
    for result in results:
        assert_same_bits(result, wanted if in_rank_order else results[0])
    torch.testing.assert_close(results[0], wanted, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_result_is_the_sum_in_rank_order(outcome: Outcome, name: str) -> None:
    scheme, ranks = outcome
    for number in range(ROUNDS):
        results = [rank[f"{name}/{number}"] for rank in ranks]
        assert_is_sum(scheme, results, expected(name, WORKERS, number))


@pytest.mark.parametrize(("way", "number"), [("out of order", 0), ("own order", 1)])
def test_asynchronous_handles(outcome: Outcome, way: str, number: int) -> None:
    scheme, ranks = outcome
    for name in CASES:
        assert_is_sum(scheme, [rank[way][name] for rank in ranks], expected(name, WORKERS, number))


def test_many_in_flight_from_several_threads(outcome: Outcome) -> None:
    _, ranks = outcome
    for results in ranks:
        assert_same_bits(results["in flight"], torch.arange(500.0).mul(WORKERS).unsqueeze(1).expand(500, 3))
        for pushed in results["threads"]:
            assert_same_bits(pushed, torch.arange(30.0).mul(WORKERS).unsqueeze(1).expand(30, 5))


def test_tensors_may_change_after_the_push(outcome: Outcome) -> None:
    scheme, ranks = outcome
    tables = [inputs("sparse large", rank, 0).coalesce() for rank in range(WORKERS)]
    table = reduce_in_rank_order(tables, average=True)
    assert_is_sum(scheme, [results["overwritten"][0] for results in ranks], table)
    vector = expected("dense large", WORKERS, 0)
    assert_is_sum(scheme, [results["overwritten"][1] for results in ranks], vector)
    assert_is_sum(scheme, [results["polled"] for results in ranks], expected("sparse large", WORKERS, 0))
