"""What a push among workers takes from residuals, and in which step, also if it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.worker.backends.test_negotiated_rounds import Servers, Silent, TwoWorkers
from zenps.config.sources import load
from zenps.errors import TensorError, UsageError
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import scheme_of
from zenps.sparsifiers.base import Sparsifier, Step
from zenps.worker.backends.base import Session
from zenps.worker.backends.peers import backend
from zenps.worker.backends.peers.backend import PeerBackend
from zenps.worker.backends.peers.exchange import PeerExchange
from zenps.worker.backends.peers.transfer import DensePeerTransfer, SparsePeerTransfer
from zenps.worker.core.request import Options, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Statistics
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.sparsify.sparsification import make_sparsification

SIZE = 20_000
TENSOR = torch.arange(1.0, SIZE + 1)


class Failing(Sparsifier):
    """Selects the first three elements; fails as often as the test wants."""

    failures = 0

    def select(self, values: Tensor, step: Step) -> Tensor:
        if type(self).failures:
            type(self).failures -= 1
            raise MemoryError
        return torch.arange(3)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> PeerBackend:
    """Of rank 1 of 2, which exchanges nothing."""
    monkeypatch.setattr(backend, "connect_workers", lambda *_: None)
    monkeypatch.setattr(PeerExchange, "start", lambda _: None)
    sets = ("cluster.workers=2", f"sync.sparsifier={__name__}:Failing", "sync.density=0.01")
    config, spans = load(sets=[*sets, "sync.scheme=agsparse"], environ={}).config, Spans()
    metrics = WorkerMetrics(CollectorRegistry())
    statistics = Statistics(metrics)
    sparsification = make_sparsification(config, 1, statistics)
    session = Session(config, TwoWorkers(), Silent(), statistics, metrics, spans, sparsification)
    servers = Servers(Waiting(Notifier(), 0.1, statistics, spans))
    return PeerBackend(session, scheme_of("agsparse"), servers)


def begin(peers: PeerBackend, residuals: Residuals) -> Any:
    """Pushes; returns the feedback."""
    options = Options(purpose="gradient", residuals=residuals, is_sparsifiable=True)
    peers.begin(Request(TENSOR, "layer", options))
    return residuals.feedback("layer", SIZE, torch.float32)


def test_a_push_that_is_repeated_after_an_error_counts_once(
    peers: PeerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its step, too: what ranks select in a step fits together."""
    monkeypatch.setattr(Failing, "failures", 2)
    residuals = Residuals()
    for _ in range(2):
        with pytest.raises(TensorError, match="tensor 'layer': no memory for Failing in"):
            begin(peers, residuals)
    feedback = begin(peers, residuals)
    assert not feedback.residual[:3].any()
    assert torch.equal(feedback.residual[3:], TENSOR[3:])
    assert (feedback.next_step, feedback.added_step) == (1, None)


def test_a_name_in_flight_takes_nothing_from_the_residual(peers: PeerBackend) -> None:
    residuals = Residuals()
    left = begin(peers, residuals).residual.clone()
    with pytest.raises(UsageError, match="in flight"):
        begin(peers, residuals)
    feedback = residuals.feedback("layer", SIZE, torch.float32)
    assert torch.equal(feedback.residual, left)
    assert feedback.next_step == 1


def test_each_kind_of_tensor_gets_its_transfer_and_the_step_of_its_name(
    peers: PeerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, steps = list[tuple[type, int]](), list[int]()

    def select(_: Failing, values: Tensor, step: Step) -> Tensor:
        steps.append(step.number)
        return torch.arange(3)

    def begin_exchange(_: Request, transfer: object, __: object, transforms: Sequence[object]) -> str:
        begun.append((type(transfer), len(transforms)))
        return "pending"

    monkeypatch.setattr(Failing, "select", select)
    monkeypatch.setattr(peers._exchange, "begin", begin_exchange)
    options = Options(purpose="gradient", residuals=Residuals(), is_sparsifiable=True)
    values = Request(TENSOR, "value", Options())
    rows = values._replace(tensor=TENSOR.view(-1, 4).to_sparse(1))
    for request in (values, rows, *[values._replace(name="layer", options=options)] * 3):
        pending: object = peers.begin(request)
        assert pending == "pending"
    assert begun == [(DensePeerTransfer, 0), (SparsePeerTransfer, 0), *[(SparsePeerTransfer, 1)] * 3]
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("where", ["_transfer", "_exchange.begin"])
def test_what_was_selected_and_not_exchanged_stays_in_the_residual(
    where: str, peers: PeerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    residuals = Residuals()
    owner, _, method = ("", "", where) if "." not in where else where.partition(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(peers, owner) if owner else peers, method, Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            begin(peers, residuals)
    feedback = residuals.feedback("layer", SIZE, torch.float32)
    assert torch.equal(feedback.residual, TENSOR)
    assert begin(peers, residuals).residual.sum() == TENSOR[3:].sum(), "added once, and then pushed"
