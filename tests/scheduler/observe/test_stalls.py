"""Stalls: what each worker waits for."""

from __future__ import annotations

from zenps.config.settings import ClusterConfig
from zenps.scheduler.observe.stalls import MAX_CHARACTERS, MAX_SHOWN, Stalls, Wait
from zenps.scheduler.service import TICK_SECONDS
from zenps.wire.scheduler_link import BEATS_PER_LEASE


def stalled() -> Stalls:
    """At second 100, rank 0 has waited for 70 s, and rank 2 for 10 s; rank 1 computes."""
    stalls = Stalls(60.0)
    stalls.report(0, "tensor 'x', step 12", 65.0, 95.0)
    stalls.report(1, "", 0.0, 100.0)
    stalls.report(2, "barrier", 9.0, 99.0)
    return stalls


def test_a_stall_names_what_every_rank_waits_for() -> None:
    stalls = stalled()
    text = "rank 0: tensor 'x', step 12; rank 1: nothing; rank 2: barrier"
    assert stalls.text([0, 1, 2], 100.0) == text
    assert stalls.newly_named([0, 1, 2], 100.0) == f"workers have waited for one another for 70 s: {text}"
    assert stalls.longest == [Wait(0, "tensor 'x', step 12", 30.0)]


def test_by_default_a_stall_is_named_within_a_minute() -> None:
    """Although the wait began just after a heartbeat."""
    cluster = ClusterConfig()
    stalls = Stalls(cluster.stall_seconds)
    beat_seconds = cluster.lease_seconds / BEATS_PER_LEASE
    ticks = [number * TICK_SECONDS for number in range(round(60.0 / TICK_SECONDS))]
    named = []
    for now in ticks:
        if beats := now // beat_seconds:
            stalls.report(0, "barrier", beats * beat_seconds, beats * beat_seconds)
        named += [message] if (message := stalls.newly_named([0, 1], now)) else []
    assert len(named) == 1


def test_there_is_none_before_the_limit_nor_after_the_wait_nor_of_a_rank_that_left() -> None:
    stalls = stalled()
    assert stalls.text([0, 1, 2], 89.0) == ""
    assert stalls.text([1, 2], 100.0) == ""
    stalls.report(0, "tensor 'x', step 13", 1.0, 100.0)
    assert stalls.text([0, 1, 2], 100.0) == ""
    assert stalls.newly_named([0, 1, 2], 100.0) == ""
    assert not stalls.longest


def test_it_is_named_once_and_again_when_it_changes() -> None:
    stalls = stalled()
    named = []
    for second in range(100, 400):
        if second == 130:
            stalls.report(1, "barrier", 0.0, 130.0)
        if message := stalls.newly_named([0, 1, 2], float(second)):
            named.append((second, "ranks 1, 2: barrier" in message))
    assert named == [(100, False), (160, True)]


def test_it_is_named_again_when_it_comes_again() -> None:
    """The text is the same: it does not have the number of a barrier."""
    stalls = Stalls(60.0)
    for second in (100.0, 300.0):
        stalls.report(0, "barrier", 70.0, second)
        assert "rank 0: barrier; rank 1: nothing" in stalls.newly_named([0, 1], second)
        stalls.report(0, "", 0.0, second + 50.0)
        assert stalls.newly_named([0, 1], second + 50.0) == ""


def test_without_a_limit_there_is_none() -> None:
    stalls = Stalls(0.0)
    stalls.report(0, "barrier", 1e9, 0.0)
    assert stalls.text([0], 1e9) == ""


def test_what_a_hostile_node_reports_is_harmless_and_a_text_is_bounded() -> None:
    stalls = Stalls(60.0)
    for rank, seconds in enumerate((float("nan"), float("inf"), float("-inf"), -1.0)):
        stalls.report(rank, "barrier", seconds, 100.0)
    for rank in range(4, 5000):
        stalls.report(rank, f"tensor {rank % 100}", 70.0, 100.0)
    assert stalls.newly_named(range(5000), 100.0)
    text = stalls.text(range(5000), 100.0)
    assert text.endswith("85 other waits")
    assert "ranks 4, 104," in text
    assert "and 34 more" in text
    assert len(stalls.longest) == MAX_SHOWN
    for rank in range(5000):
        stalls.report(rank, f"{rank}{'x' * 1000}", 70.0, 100.0)
    assert len(stalls.text(range(5000), 100.0)) == MAX_CHARACTERS
