"""Backward passes: after how many of them a gradient is pushed, by the steps before."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from zenps.worker.training.gradients.passes import BackwardPasses


@pytest.fixture
def parameter() -> Parameter:
    return Parameter(torch.ones(1))


def run_step(passes: BackwardPasses, parameter: Parameter, times: int, least: int = 1) -> list[bool]:
    """Returns after which passes the parameter is pushed."""
    are_last = []
    for number in range(1, times + 1):
        assert passes.count(parameter) == number
        are_last.append(passes.is_last(parameter, least))
    assert passes.have_begun == (times > 0)
    passes.end_step()
    assert not passes.have_begun
    return are_last


def test_as_many_passes_are_expected_as_any_step_had(parameter: Parameter) -> None:
    passes = BackwardPasses()
    assert run_step(passes, parameter, 3) == [True, True, True], "nothing is known"
    assert run_step(passes, parameter, 2) == [False, False], "counted anew in each step"
    assert run_step(passes, parameter, 4) == [False, False, True, True]
    assert run_step(passes, Parameter(torch.ones(1)), 4) == [False, False, False, True], "as others had"


def test_there_are_at_least_as_many_as_the_script_says(parameter: Parameter) -> None:
    passes = BackwardPasses()
    assert run_step(passes, parameter, 1, least=2) == [False]
    assert run_step(passes, parameter, 3, least=2) == [False, True, True]
    assert run_step(passes, parameter, 3, least=2) == [False, False, True]
    assert run_step(passes, parameter, 4, least=4) == [False, False, False, True], "it may change"


def test_a_new_parameter_is_not_pushed_before_a_step_has_counted_its_passes(parameter: Parameter) -> None:
    """Also if earlier steps have counted it: it may have been frozen meanwhile."""
    passes = BackwardPasses()
    run_step(passes, parameter, 2)
    passes.uncounted.add(parameter)
    run_step(passes, Parameter(torch.ones(1)), 1)
    assert run_step(passes, parameter, 3) == [False, False, False]
    assert run_step(passes, parameter, 3) == [False, False, True]


@pytest.mark.parametrize(("others", "most"), [(2, 3), (5, 5)])
def test_what_another_rank_has_learned_is_added_and_the_step_begins_anew(
    parameter: Parameter, others: int, most: int
) -> None:
    new, passes = Parameter(torch.ones(1)), BackwardPasses()
    run_step(passes, parameter, 3)
    passes.count(parameter)
    passes.adopt(others, [new])
    assert not passes.have_begun
    assert passes.count(parameter) == 1
    assert passes.most == most
    assert run_step(passes, new, 9) == [False] * 9
