"""Clock offset: estimates stay within their error."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zenps.observe.clock import ROUND_TRIPS, ClockFilter, Offset

SECOND = 10**9

# The time of sending, and the durations of the way there and back.
trips = st.tuples(st.integers(0, 10**15), st.integers(0, SECOND), st.integers(0, SECOND))


@settings(deadline=None)
@given(st.lists(trips, min_size=1, max_size=20), st.integers(-(10**15), 10**15))
def test_offset_is_never_more_wrong_than_it_says(trips: list[tuple[int, int, int]], ahead: int) -> None:
    clock = ClockFilter()
    for sent, there, back in trips:
        clock.add(sent, sent + there + ahead, sent + there + back)
        assert clock.offset is not None
        assert abs(clock.offset.offset_ns - ahead) <= 2 * clock.offset.error_ns + 1
    shortest = min(there + back for _, there, back in trips[-ROUND_TRIPS:])
    assert clock.offset is not None
    assert clock.offset.error_ns == (shortest + 1) // 2


@settings(deadline=None)
@given(st.lists(trips, min_size=1))
def test_a_common_clock_has_offset_0(trips: list[tuple[int, int, int]]) -> None:
    clock = ClockFilter()
    for sent, there, back in trips:
        clock.add(sent, sent + there, sent + there + back)
        assert clock.offset is not None
        assert clock.offset.offset_ns == 0


def test_nothing_is_known_before_an_answer() -> None:
    clock = ClockFilter()
    clock.add(5, 100, 4)  # an answer that came before its heartbeat was sent
    assert clock.offset is None


def test_another_scheduler_has_another_clock() -> None:
    clock = ClockFilter()
    clock.add(0, 7 * SECOND, 10)
    clock.reset()
    clock.add(SECOND, 3 * SECOND, SECOND + 1000)
    assert clock.offset == Offset(2 * SECOND - 500, 500)
