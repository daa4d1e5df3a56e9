"""Buffers of the planner's transfers."""

from __future__ import annotations

import torch

from tests.worker.encode.test_quantizer import begin, planner_of


def test_a_broadcast_leaves_nothing_in_the_pool() -> None:
    planner = planner_of("same")
    for purpose in ("broadcast", "value"):
        for count in (70_000, 200_000):
            begin(planner, torch.ones(count), purpose)  # type: ignore[arg-type]
        kept_bytes = planner._pool.kept_bytes
        assert (kept_bytes > 0) == (purpose == "value"), (purpose, kept_bytes)
