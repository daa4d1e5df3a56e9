"""Parameter-server backend: how many rows the chunks of a sparsified gradient are formed for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.worker.encode.test_reshard import view_of
from tests.worker.sparsify.test_sparsification import gradient, options
from zenps.config.sources import load
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import scheme_of
from zenps.worker.backends.base import Session
from zenps.worker.backends.servers import ServerBackend
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.encode.sharder import Sharder
from zenps.worker.sparsify.sparsification import make_sparsification

SIZE = 400_000


def make_backend(sparsifier: str) -> ServerBackend:
    """Without a cluster: nothing is sent."""
    sets = [f"sync.sparsifier={sparsifier}", "sync.density=0.1"]
    config, metrics = load(sets=sets, environ={}).config, WorkerMetrics(CollectorRegistry())
    statistics, scheme = Statistics(metrics), scheme_of("zenps")
    session = SimpleNamespace(
        config=config,
        channel=SimpleNamespace(arena=lambda: None, submit=Pending.begin),
        statistics=statistics,
        metrics=metrics,
        spans=Spans(),
        timeout_seconds=20.0,
        sparsification=make_sparsification(config, 0, statistics),
    )
    sharder = Sharder(config, scheme.wire, view_of([0, 1]))
    return ServerBackend(cast(Session, session), scheme, sharder, Steps(metrics.steps))


def push(backend: ServerBackend, tensor: Tensor, residuals: Residuals) -> Pending:
    return backend.begin(Request(tensor, "layer", options(residuals)))


@pytest.mark.parametrize("pulled_rows", [12_345, 67_890])
def test_what_was_selected_is_sharded_for_as_many_rows_as_were_pulled_last(pulled_rows: int) -> None:
    backend, residuals = make_backend("topk"), Residuals()
    pending = push(backend, gradient(0, SIZE), residuals)
    pending.progress.pulled_rows, pending.progress.ended = pulled_rows, True
    (encoded,) = push(backend, gradient(1, SIZE), residuals).transfer.begin()
    assert encoded.expected_rows == pulled_rows


def test_what_ranks_have_agreed_on_is_sharded_for_what_they_expect() -> None:
    (encoded,) = push(make_backend("exdyna"), gradient(0, SIZE), Residuals()).transfer.begin()
    assert encoded.expected_rows == SIZE // 10
