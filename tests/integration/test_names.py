"""Tensor names: those that a script makes up are bounded, and a parameter may have any name."""

from __future__ import annotations

import torch
from torch.nn import Parameter
from torch.nn.functional import embedding

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


def train_parameters_with_the_names_of_what_ranks_ask() -> list[float]:
    """In the second step, the gradients are in flight while ranks agree on one parameter, and add another."""
    named = {name: Parameter(torch.ones(6, 2)) for name in ("kinds", "differing", "unused", "later")}
    first = [named["kinds"], named["differing"], named["unused"]]
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(first, lr=1.0), named.items())
    for step in range(3):
        optimizer.zero_grad()
        ids = torch.tensor([zps.rank(), 2])
        losses = [embedding(ids, named[name], sparse=True).sum() for name in ("kinds", "differing")]
        sum(losses, torch.zeros(())).backward()
        if step == 1:
            optimizer.add_param_group({"params": [named["later"]]})
        optimizer.step()
    return [named[name].sum().item() for name in ("kinds", "differing")]


def test_a_parameter_may_have_the_name_of_what_ranks_ask_each_other() -> None:
    with Cluster() as cluster:
        for sums in cluster.run(train_parameters_with_the_names_of_what_ranks_ask):
            assert sums == [0.0, 0.0], "3 steps, in which each rank's two rows lose 1 of each element"
