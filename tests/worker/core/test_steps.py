from __future__ import annotations

import pytest

from zenps.config.settings import MOST_NAMES
from zenps.errors import UsageError
from zenps.observe import log
from zenps.worker.core.steps import Steps


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a step began, as the elements of a list."""
    monkeypatch.setattr(log.here, "step", None)
    return []


@pytest.fixture
def steps(begun: list[int]) -> Steps:
    return Steps(lambda: begun.append(1))


def test_each_tensor_counts_for_itself_and_the_first_at_a_step_begins_it(
    steps: Steps, begun: list[int]
) -> None:
    for step in range(3):
        for name in ("a", "b"):
            previous, progress = steps.begin(name, 1)
            assert (previous is None) == (step == 0)
            assert progress.step == step
            assert log.here.step == step
            progress.ended = True
    assert len(begun) == 3


def test_a_name_in_flight_is_refused_and_free_again_once_taken_back(steps: Steps) -> None:
    previous, first = steps.begin("a", 1)
    with pytest.raises(UsageError, match="'a' is in flight"):
        steps.begin("a", 1)
    steps.take_back("a", previous)
    previous, again = steps.begin("a", 1)
    assert (previous, again.step) == (None, first.step)
    again.ended = True
    previous, second = steps.begin("a", 1)
    steps.take_back("a", previous)
    assert steps.begin("a", 1)[1].step == second.step == 1


def test_names_are_bounded_and_what_is_taken_back_does_not_count(steps: Steps) -> None:
    _, streams = steps.begin("in streams", MOST_NAMES - 1)
    streams.ended = True
    previous, _ = steps.begin("last", 1)
    with pytest.raises(UsageError, match=f"{MOST_NAMES} different names were used"):
        steps.begin("one more", 1)
    steps.take_back("last", previous)
    steps.begin("one more", 1)
    previous, fewer = steps.begin("in streams", 1)
    assert previous is streams
    assert fewer.names == MOST_NAMES - 1, "names that were used are not given back"


def test_newcomers_count_from_0_and_so_do_all_then(steps: Steps, begun: list[int]) -> None:
    steps.begin("a", MOST_NAMES)
    steps.reset()
    assert steps.begin("b", MOST_NAMES)[1].step == 0
    assert len(begun) == 2
