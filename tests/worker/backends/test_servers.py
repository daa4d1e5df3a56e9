"""Parameter-server backend: for how many rows chunks are formed, and rounds that cannot begin."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
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
from zenps.worker.core.statistics import Counted, Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.encode.sharder import Sharder
from zenps.worker.sparsify.sparsification import make_sparsification
from zenps.worker.transport.commands import GiveUpAhead

SIZE = 400_000
GIVEN_UP = Mock()


def make_backend(sparsifier: str, values: str = "same") -> ServerBackend:
    """Without a cluster: nothing is sent, and :data:`GIVEN_UP` notes what is given up."""
    GIVEN_UP.reset_mock()
    sets = [f"sync.sparsifier={sparsifier}", "sync.density=0.1", f"sync.values={values}"]
    config, metrics = load(sets=sets, environ={}).config, WorkerMetrics(CollectorRegistry())
    statistics, scheme = Statistics(metrics), scheme_of("zenps")
    session = SimpleNamespace(
        config=config,
        channel=SimpleNamespace(arena=lambda: None, submit=Pending.begin, post=GIVEN_UP, failure=None),
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


def test_a_gradient_takes_as_many_names_as_it_has_rounds() -> None:
    for sparsifier, names in (("none", 1), ("topk", 1), ("exdyna", 3)):
        assert push(make_backend(sparsifier), gradient(0, SIZE), Residuals()).progress.names == names


def test_waiting_for_a_device_is_no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as such until the script's next call, with all that the device had to do before."""

    class Staged(SuppliedTransfer):
        is_staged, is_prepared, rows_given = True, False, 0

        def prepared(self) -> bool:
            return self.is_prepared

    backend, transfer = make_backend("none"), Staged()
    monkeypatch.setattr(backend._planner, "begin", lambda *_: transfer)
    progress = backend.begin(Request(torch.ones(3), "layer")).progress
    compacted_seconds = progress.compacted_seconds
    assert compacted_seconds > 0
    transfer.is_prepared = True
    backend.flush(math.inf)
    assert progress.compacted_seconds == compacted_seconds


def test_what_was_pushed_is_added_again_if_it_is_pushed_again() -> None:
    backend, residuals = make_backend("topk"), Residuals()
    push(backend, gradient(0, SIZE), residuals)
    assert residuals.feedback("layer", SIZE, torch.float32).added_step is None


@pytest.mark.parametrize("values", ["same", "bfloat16"])
@pytest.mark.parametrize("sparsifier", ["topk", "exdyna"])
@pytest.mark.parametrize("fails", ["encoding", "submission"])
def test_what_was_selected_and_not_sent_stays_in_the_residual(
    fails: str, sparsifier: str, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory; the script catches it, and pushes again in this step or the next."""
    backend, other, residuals, others = (
        *(make_backend(sparsifier, values) for _ in range(2)),
        Residuals(),
        Residuals(),
    )
    target, name = (backend._planner, "begin") if fails == "encoding" else (backend._queue, "submit")
    with monkeypatch.context() as patch:
        patch.setattr(target, name, Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            push(backend, gradient(0, SIZE), residuals)
    feedback = residuals.feedback("layer", SIZE, torch.float32)
    if (sparsifier, values, fails) != ("topk", "bfloat16", "submission"):  # there rounding errors were added
        assert torch.equal(feedback.residual, gradient(0, SIZE))
    torch.testing.assert_close(feedback.residual, gradient(0, SIZE), rtol=2**-8, atol=0)
    pushed = [push(made, gradient(0, SIZE), own) for made, own in ((backend, residuals), (other, others))]
    assert [pending.progress.pushed_rows for pending in pushed] == [0, 0]
    again, straight = (each.feedback("layer", SIZE, torch.float32).residual for each in (residuals, others))
    torch.testing.assert_close(again, straight, rtol=0, atol=2**-8 * 5 if values == "bfloat16" else 0)


@pytest.mark.parametrize(
    ("sparsifier", "values", "leaves"),
    [("none", "same", False), ("none", "int8", True), ("topk", "same", True)],
)
def test_a_residual_has_the_name_of_what_is_not_pushed_exactly(
    sparsifier: str, values: str, leaves: bool
) -> None:
    backend, request = make_backend(sparsifier, values), Request(gradient(0), "layer", options(Residuals()))
    assert backend.residual_name(request) == ("layer" if leaves else None)
    for exact in (Request(gradient(0), "layer"), request._replace(tensor=torch.ones(3, dtype=torch.int64))):
        assert backend.residual_name(exact) is None


def push_for_once_without_memory(
    backend: ServerBackend, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> Pending:
    """A push that fails, then one that does not, of the same name."""
    request = Request(gradient(0, SIZE), "layer")
    with monkeypatch.context() as patch:
        patch.setattr(backend._planner, "begin", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            backend.begin(request, counted)
    return backend.begin(request, counted)


def test_a_round_that_cannot_begin_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert push_for_once_without_memory(make_backend("none"), "round", monkeypatch).progress.step == 0
    GIVEN_UP.assert_not_called()


def test_one_on_which_ranks_have_agreed_fails_on_all_and_has_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert push_for_once_without_memory(make_backend("none"), "rows", monkeypatch).progress.step == 1
    GIVEN_UP.assert_called_once_with(GiveUpAhead("layer", 0))


def test_a_round_that_is_given_up_before_it_begins_has_its_step() -> None:
    backend, request = make_backend("none"), Request(gradient(0, SIZE), "layer")
    backend.give_up(request, 3)
    GIVEN_UP.assert_called_once_with(GiveUpAhead("layer", 3))
    assert backend.begin(request).progress.step == 4
