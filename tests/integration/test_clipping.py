"""Clipped averages: however clipping is asked for, ranks step as one process does with all of their data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zenps as zps
from tests.integration.cluster import Cluster
from tests.integration.embedding_model import assert_same, loss_of, make_model, state_of

STEPS = 3
MAX_NORM = 0.05
"""Below the norm of each step's gradients, which the tests check."""

WAYS = ("hook of the wrapper", "hook of the wrapped", "between synchronize and step", "value in a hook")


def train(way: str) -> dict[str, Any]:
    """This rank's weights at the end, and the norm of each step."""
    model = make_model()
    norms: list[float] = []

    def clip(*_: object) -> None:
        if way == "value in a hook":
            zps.clip_grad_value_(model.parameters(), MAX_NORM / 10)
        else:
            norms.append(float(zps.clip_grad_norm_(model.parameters(), MAX_NORM)))

    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    if way == "hook of the wrapped":
        inner.register_step_pre_hook(clip)
    optimizer = zps.DistributedOptimizer(inner, model.named_parameters())
    if way in ("hook of the wrapper", "value in a hook"):
        optimizer.register_step_pre_hook(clip)
    for step in range(STEPS):
        loss_of(model, step, zps.rank()).backward()
        if way == "between synchronize and step":
            optimizer.synchronize()
            clip()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return {"weights": state_of(model), "norms": norms}


def train_in_one_process(way: str) -> dict[str, Any]:
    """Gradients are made dense, which torch can clip."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    norms = []
    for step in range(STEPS):
        (sum((loss_of(model, step, rank) for rank in range(2)), torch.zeros(())) / 2).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if way == "value in a hook":
            torch.nn.utils.clip_grad_value_(model.parameters(), MAX_NORM / 10)
        else:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": state_of(model), "norms": norms}


def train_in_all_ways() -> dict[str, Any]:
    return {way: train(way) for way in WAYS}


def test_averages_are_clipped_as_in_one_process() -> None:
    with Cluster() as cluster:
        results = cluster.run(train_in_all_ways)
    for way in WAYS:
        wanted = train_in_one_process(way)
        assert way == "value in a hook" or min(wanted["norms"]) > MAX_NORM
        for result in results:
            assert result[way]["norms"] == pytest.approx(wanted["norms"])
            assert result[way]["norms"] == results[0][way]["norms"]
            assert_same(result[way]["weights"], wanted["weights"])
