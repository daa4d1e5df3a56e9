"""What one rank alone refuses to reduce: the others learn it at once, under every way of reducing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from tests.integration.test_collectives import SETTINGS


def refuse_on_rank_0() -> tuple[list[Raised], list[float]]:
    first = zps.rank() == 0
    ones = torch.ones(40, 3)
    graph = (torch.nn.Parameter(ones) * 2).sum()
    cases = {
        "graph": (graph if first else torch.tensor(1.0), "sum"),
        "complex": (ones.to(torch.complex64) if first else ones, "average"),
        "sparse": (ones.to(torch.complex64) if first else ones.to_sparse(1), "average"),
        "dtype": (ones.bool() if first else ones, "sum"),
        "operation": (ones, "mean" if first else "average"),
        "operation, gathered": (ones, "mean" if first else "min"),
        "all": (ones.to(torch.complex64), "average"),
    }
    raised = [attempt(zps.allreduce, tensor, name, op) for name, (tensor, op) in cases.items()]
    # The names are free, and rounds are counted alike.
    return raised, [zps.allreduce(ones, name, "sum").unique().item() for name in cases if name != "graph"]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_others_learn_at_once_what_one_rank_refuses(settings: dict[str, Any]) -> None:
    with Cluster(settings=settings) as cluster:
        (first, sums), (second, sums_too) = cluster.run(refuse_on_rank_0)
    kinds = ["TensorError"] * 4 + ["UsageError"] * 2 + ["TensorError"]
    assert [each.kind for each in first] == kinds, first
    assert [each.kind for each in second] == ["MismatchError"] * 6 + ["TensorError"], second
    assert all("rank(s) 0 pushed nothing: " in each.text for each in second[:6]), second
    assert sums == sums_too == [2.0] * 6
