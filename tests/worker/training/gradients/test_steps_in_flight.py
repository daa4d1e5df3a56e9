"""Which averages are due, and what is forgotten, as steps begin and end."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.worker.core.test_pending import make_pending
from zenps.errors import DeadlineError
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier
from zenps.worker.training.gradients.averages import Averages, StepsInFlight


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_averages_are_due_some_steps_later(staleness: int) -> None:
    steps, pushed = StepsInFlight(staleness), [Averages() for _ in range(6)]
    for number, averages in enumerate(pushed):
        steps.add(averages)
        assert steps.newest is averages
        assert steps.due is (pushed[number - staleness] if number >= staleness else None)
        if steps.due is not None:
            steps.take_oldest()
        assert steps.due is None
        assert steps.later == min(number + 1, staleness)


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_an_interrupted_step_has_waited_for_is_forgotten(staleness: int) -> None:
    steps, pushed = StepsInFlight(staleness), [Averages() for _ in range(1 + staleness)]
    for averages in pushed:
        steps.add(averages)
    assert steps.due is pushed[0]
    steps.forget_due()
    assert steps.due is None
    steps.forget_due()
    assert steps.oldest is (pushed[1] if staleness else None)


def test_the_dense_average_of_a_table_has_its_layout() -> None:
    table, averages = Parameter(torch.ones(3, 4).t()), Averages()
    handle: Any = SimpleNamespace(wait=torch.arange(12.0).view(4, 3).to_sparse(1).coalesce)
    averages.handles[table] = handle
    averages.dense.add(table)
    averages.take()
    assert table.grad is not None
    assert table.grad.stride() == table.stride() == (1, 4)
    assert torch.equal(table.grad, torch.arange(12.0).view(4, 3))


def test_averages_that_have_failed_are_freed_with_their_error() -> None:
    steps, averages, transfer = StepsInFlight(0), Averages(), SuppliedTransfer()
    is_kept, handle = weakref.ref(transfer), make_pending(transfer, Notifier())
    handle.fail(DeadlineError("gone"))
    averages.handles[Parameter(torch.ones(3))] = handle
    steps.add(averages)
    del averages, handle, transfer
    gc.disable()
    try:
        with contextlib.suppress(DeadlineError):
            steps.take_oldest()
        assert is_kept() is None
    finally:
        gc.enable()
