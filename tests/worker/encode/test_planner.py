"""Sizes that the planner chooses, and buffers of its transfers."""

from __future__ import annotations

import torch

from tests.worker.encode.test_quantizer import begin, planner_of
from zenps.config.settings import ClusterConfig, Config, SyncConfig
from zenps.schemes.registry import scheme_of
from zenps.worker.core.request import Request
from zenps.worker.encode.planner import Planner


def test_a_broadcast_leaves_nothing_in_the_pool() -> None:
    planner = planner_of("same")
    for purpose in ("broadcast", "value"):
        for count in (70_000, 200_000):
            begin(planner, torch.ones(count), purpose)  # type: ignore[arg-type]
        kept_bytes = planner._pool.kept_bytes
        assert (kept_bytes > 0) == (purpose == "value"), (purpose, kept_bytes)


def test_a_message_of_blocks_is_no_larger_than_two_chunks() -> None:
    """The page on encoding has the rule: every implementation has to make the same streams."""
    for chunk_bytes, workers, columns in ((64 << 10, 1, 127), (8 << 20, 1, 256), (8 << 20, 4096, 254)):
        config = Config(
            sync=SyncConfig(scheme="omnireduce", chunk_bytes=chunk_bytes),
            cluster=ClusterConfig(workers=workers),
        )
        planner = Planner(config, scheme_of("omnireduce"), sharder=None)  # type: ignore[arg-type]
        plan = planner._plan(Request(torch.empty(10**7, device="meta"), "weight"))
        assert plan is not None
        assert plan.columns == columns
