"""Every scheme through real processes: the same sums, bit for bit, on whichever way they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.cluster import Cluster
from tests.integration.reference import assert_same_bits
from tests.integration.test_push_pull import CASES, ROUNDS, expected, push_all
from zenps.schemes import SCHEMES, SchemeName

WORKERS, SERVERS = 3, 2

Outcome = tuple[SchemeName, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[name for name in SCHEMES if name != "zenps"])
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    with Cluster(WORKERS, SERVERS, {"sync.scheme": request.param}) as cluster:
        yield request.param, cluster.run(push_all)


def as_sent(scheme: SchemeName, expected: Tensor) -> Tensor:
    """What is left of a union that travels dense: no row of zeros, and no -0.0, to which others add 0."""
    if SCHEMES[scheme].keys != "none" or not expected.is_sparse:
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


@pytest.mark.parametrize("name", CASES)
def test_result_is_the_sum_in_rank_order(outcome: Outcome, name: str) -> None:
    scheme, ranks = outcome
    for results in ranks:
        for number in range(ROUNDS):
            wanted = as_sent(scheme, expected(name, WORKERS, number))
            assert_same_bits(results[f"{name}/{number}"], wanted)


@pytest.mark.parametrize(("way", "number"), [("out of order", 0), ("own order", 1)])
def test_asynchronous_handles(outcome: Outcome, way: str, number: int) -> None:
    scheme, ranks = outcome
    for results in ranks:
        for name in CASES:
            assert_same_bits(results[way][name], as_sent(scheme, expected(name, WORKERS, number)))
