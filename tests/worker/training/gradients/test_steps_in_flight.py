"""Which averages are due, and what is forgotten, as steps begin and end."""

from __future__ import annotations

import pytest

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
