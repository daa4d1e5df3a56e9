from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from zenps.config.settings import MAX_NAMES
from zenps.errors import UsageError
from zenps.observe import log
from zenps.observe.collectors import Tally
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.core.steps import Steps


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """How often a step began."""
    monkeypatch.setattr(log.here, "step", None)
    return WorkerMetrics(CollectorRegistry()).steps


@pytest.fixture
def steps(begun: Tally) -> Steps:
    return Steps(begun)


def test_each_tensor_counts_for_itself_and_the_first_at_a_step_begins_it(steps: Steps, begun: Tally) -> None:
    for step in range(3):
        for name in ("a", "b"):
            progress = steps.begin(name, 1)
            assert (progress.previous is None) == (step == 0)
            assert progress.step == step
            assert log.here.step == step
            progress.ended = True
    assert begun.total == 3


def test_a_round_may_skip_steps(steps: Steps) -> None:
    for step in (2, 5):
        progress = steps.begin("a", 1, step)
        assert progress.step == step
        progress.ended = True
    assert steps.begin("a", 1).step == 6


def test_a_round_expects_the_rows_that_were_pulled_in_the_one_before(steps: Steps) -> None:
    first = steps.begin("a", 1)
    assert first.expected_rows == 0
    first.pulled_rows, first.ended = 40, True
    second = steps.begin("a", 1)
    assert second.expected_rows == 40
    assert second.previous is first
    second.ended = True
    assert steps.begin("a", 1).expected_rows == 0
    assert second.previous is None, "the rounds before the last are forgotten"


def test_a_name_in_flight_is_refused_and_free_again_once_taken_back(steps: Steps) -> None:
    first = steps.begin("a", 1)
    assert (steps.is_in_flight("a"), steps.is_in_flight("b")) == (True, False)
    with pytest.raises(UsageError, match="'a' is in flight"):
        steps.begin("a", 1)
    steps.take_back("a", first)
    assert not steps.is_in_flight("a")
    again = steps.begin("a", 1)
    assert (again.previous, again.step) == (None, first.step)
    again.ended = True
    assert not steps.is_in_flight("a")
    second = steps.begin("a", 1)
    steps.take_back("a", second)
    assert steps.begin("a", 1).step == second.step == 1


def test_a_round_from_before_an_admission_is_not_taken_back_from_one_after_it(steps: Steps) -> None:
    before, other = steps.begin("a", 1), steps.begin("b", 1)
    steps.reset()  # while another thread encodes both
    after = steps.begin("a", 1)
    steps.take_back("a", before)
    steps.take_back("b", other)
    assert steps.is_in_flight("a")
    after.ended = True
    assert steps.begin("a", 1).step == 1


def test_names_are_bounded_and_what_is_taken_back_does_not_count(steps: Steps) -> None:
    streams = steps.begin("in streams", MAX_NAMES - 1)
    streams.ended = True
    last = steps.begin("last", 1)
    with pytest.raises(UsageError, match=f"{MAX_NAMES} different names were used"):
        steps.begin("one more", 1)
    steps.take_back("last", last)
    steps.begin("one more", 1)
    fewer = steps.begin("in streams", 1)
    assert fewer.previous is streams
    assert fewer.names == MAX_NAMES - 1, "names that were used are not given back"


def test_of_a_tensor_that_takes_more_names_than_before_only_these_count(steps: Steps) -> None:
    steps.begin("a", MAX_NAMES - 1).ended = True
    assert steps.begin("a", MAX_NAMES).names == MAX_NAMES


def test_joining_workers_count_from_0_and_so_do_all_then(steps: Steps, begun: Tally) -> None:
    steps.begin("a", MAX_NAMES)
    steps.reset()
    assert steps.begin("b", MAX_NAMES).step == 0
    assert begun.total == 2
