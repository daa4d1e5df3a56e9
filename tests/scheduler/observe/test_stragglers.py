"""Straggler detection from barriers and the reports of servers."""

from __future__ import annotations

from zenps.observe.lateness import MAX_RANKS
from zenps.scheduler.observe.stragglers import WINDOW_SECONDS, Straggler, Stragglers


def test_servers_wait_at_the_same_time_and_barriers_besides() -> None:
    known = Stragglers(2)
    known.report(b"server-0", {})
    known.report(b"server-1", {})
    known.report(b"server-0", {1: 2.0, 0: 0.5})
    known.report(b"server-1", {1: 3.0})
    known.report(b"server-1", {1: 4.0})
    known.barriers.wait([1], [0.0], 2, 1.5)
    assert known.seconds() == {0: 0.5, 1: 5.5}


def test_a_straggler_is_named_once_in_a_window() -> None:
    known = Stragglers(2)
    named = []
    for second in range(100):
        known.report(b"server", {1: second / 4})
        named += [(second, late) for late in known.newly_named(float(second))]
    assert [second for second, _ in named] == [12, 42, 72]
    assert named[1][1] == Straggler(1, 3.0, 12.0)


def test_a_little_lateness_is_not_named() -> None:
    known = Stragglers(2)
    for second in range(1000):
        known.report(b"server", {1: second * 0.09})
        assert known.newly_named(float(second)) == []


def test_lateness_before_a_window_does_not_count() -> None:
    known = Stragglers(2)
    assert known.newly_named(0.0) == []
    known.report(b"server", {})
    known.report(b"server", {1: 2.0})
    assert known.newly_named(1.0) == []
    assert known.newly_named(1.0 + WINDOW_SECONDS) == []
    known.report(b"server", {1: 4.0})
    assert known.newly_named(2.0 + WINDOW_SECONDS) == []


def test_the_first_report_of_a_server_is_a_baseline() -> None:
    known = Stragglers(2)
    assert known.newly_named(0.0) == []
    known.report(b"server", {1: 900.0})
    assert known.newly_named(1.0) == []
    known.report(b"server", {1: 904.0})
    assert known.newly_named(5.0) == [Straggler(1, 4.0, 5.0)]
    assert known.seconds() == {1: 4.0}


def test_so_are_ranks_that_a_full_first_report_leaves_out() -> None:
    known = Stragglers(100)
    known.report(b"server", {rank: 900.0 + rank for rank in range(MAX_RANKS)})
    assert known.newly_named(0.0) == []
    known.report(b"server", {rank: 901.0 + rank for rank in range(1, MAX_RANKS + 1)})
    assert known.newly_named(1.0) == [Straggler(MAX_RANKS, 17.0, 17.0)]


def test_a_server_that_replaces_another_goes_on_from_its_waits() -> None:
    known = Stragglers(2)
    known.report(b"server-0", {})
    known.report(b"server-0", {1: 900.0})
    assert known.newly_named(0.0) == []
    known.report(b"server-1", {})
    known.report(b"server-1", {1: 4.0})
    assert known.seconds() == {1: 904.0}
    assert known.newly_named(5.0) == [Straggler(1, 4.0, 5.0)]
