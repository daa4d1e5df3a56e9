"""Straggler detection from barriers and the reports of servers."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from zenps.observe.lateness import MAX_RANKS, latest
from zenps.scheduler.observe.stragglers import WINDOW_SECONDS, Straggler, Stragglers


def report(known: Stragglers, server: bytes, late: Mapping[int, float]) -> None:
    """A server reports the latest of all ranks."""
    known.report(server, dict(latest(late)), sum(late.values()))


def test_servers_wait_at_the_same_time_and_barriers_besides() -> None:
    known = Stragglers(2)
    report(known, b"server-0", {})
    report(known, b"server-1", {})
    report(known, b"server-0", {1: 2.0, 0: 0.5})
    report(known, b"server-1", {1: 3.0})
    report(known, b"server-1", {1: 4.0})
    known.barriers.wait([1], [0.0], 2, 1.5)
    assert known.seconds() == {0: 0.5, 1: 5.5}


def test_a_straggler_is_named_once_in_a_window() -> None:
    known = Stragglers(2)
    named = []
    for second in range(100):
        report(known, b"server", {1: second / 4})
        named += [(second, late) for late in known.newly_named(float(second))]
    assert [second for second, _ in named] == [12, 42, 72]
    assert named[1][1] == Straggler(1, 3.0, 12.0)


def test_a_little_lateness_is_not_named() -> None:
    known = Stragglers(2)
    for second in range(1000):
        report(known, b"server", {1: second * 0.09})
        assert known.newly_named(float(second)) == []


def test_lateness_before_a_window_does_not_count() -> None:
    known = Stragglers(2)
    assert known.newly_named(0.0) == []
    report(known, b"server", {})
    report(known, b"server", {1: 2.0})
    assert known.newly_named(1.0) == []
    assert known.newly_named(1.0 + WINDOW_SECONDS) == []
    report(known, b"server", {1: 4.0})
    assert known.newly_named(2.0 + WINDOW_SECONDS) == []


def test_the_first_report_of_a_server_is_a_baseline() -> None:
    known = Stragglers(2)
    assert known.newly_named(0.0) == []
    report(known, b"server", {1: 900.0})
    assert known.newly_named(1.0) == []
    report(known, b"server", {1: 904.0})
    assert known.newly_named(5.0) == [Straggler(1, 4.0, 5.0)]
    assert known.seconds() == {1: 4.0}


def test_so_are_ranks_that_a_full_first_report_leaves_out() -> None:
    known = Stragglers(100)
    report(known, b"server", {rank: 900.0 + rank for rank in range(MAX_RANKS)})
    assert known.newly_named(0.0) == []
    report(known, b"server", {rank: 901.0 + rank for rank in range(1, MAX_RANKS + 1)})
    assert known.newly_named(1.0) == [Straggler(MAX_RANKS, 17.0, 17.0)]


def test_a_server_that_replaces_another_goes_on_from_its_waits() -> None:
    known = Stragglers(2)
    report(known, b"server-0", {})
    report(known, b"server-0", {1: 900.0})
    assert known.newly_named(0.0) == []
    report(known, b"server-1", {})
    report(known, b"server-1", {1: 4.0})
    assert known.seconds() == {1: 904.0}
    assert known.newly_named(5.0) == [Straggler(1, 4.0, 5.0)]


def test_ranks_that_are_late_in_turn_are_no_stragglers_however_many_there_are() -> None:
    """The latest ranks that a server reports change; each has waits from long before."""
    known = Stragglers(64)
    late = dict.fromkeys(range(64), 0.0)
    draw = random.Random(1)
    for second in range(300):
        for rank in late:
            late[rank] += draw.uniform(0.0, 0.4)
        report(known, b"server", late)
        assert known.newly_named(float(second)) == []


def test_of_many_workers_the_straggler_is_named_even_if_none_is_in_time() -> None:
    known = Stragglers(64)
    late = dict.fromkeys(range(64), 1.0)
    report(known, b"server", late)
    assert known.newly_named(0.0) == []
    report(known, b"server", dict.fromkeys(range(64), 2.0) | {63: 8.0})
    assert known.newly_named(10.0) == [Straggler(63, 7.0, 10.0)]
    assert known.total_seconds() == 70.0
    assert known.seconds_of_all() == pytest.approx([1.0] * 63 + [7.0], abs=0.05)
