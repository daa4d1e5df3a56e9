"""A script that makes up tensor names is told so, and what it has used is bounded on all nodes."""

from __future__ import annotations

import torch

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from zenps.worker.core import steps

MAX_NAMES = 2000


def make_up_names() -> tuple[object, float]:
    """What comes of one name too many, and the sum of the first name's second round."""
    steps.MAX_NAMES = MAX_NAMES  # type: ignore[attr-defined]
    one = torch.ones(1)
    handles = [zps.push_pull_async(one, f"loss-{step}", average=False) for step in range(MAX_NAMES)]
    assert all(handle.wait().item() == zps.size() for handle in handles)
    refused = attempt(zps.push_pull, one, f"loss-{MAX_NAMES}")
    return refused, zps.push_pull(one, "loss-0", average=False).item()


def test_one_name_too_many_is_refused_and_the_others_go_on() -> None:
    with Cluster() as cluster:
        for refused, total in cluster.run(make_up_names):
            assert isinstance(refused, Raised)
            assert refused.kind == "UsageError"
            assert "tensor 'loss-2000': 2000 different names were used before it" in refused.text
            assert "use one name for a tensor in all steps" in refused.text
            assert total == 2
