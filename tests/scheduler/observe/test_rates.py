"""Rates of the counters in heartbeats."""

from __future__ import annotations

import math

import pytest

from zenps.scheduler.observe.rates import Rates


def test_a_rate_is_between_two_heartbeats() -> None:
    rates = Rates()
    rates.update({"rounds": 10.0, "sent_bytes": 1000.0}, 5.0)
    assert rates.per_second == {}
    rates.update({"rounds": 15.0, "sent_bytes": 4000.0}, 7.5)
    assert rates.per_second == {"rounds": 2.0, "sent_bytes": 1200.0}
    rates.update({"rounds": 15.0, "sent_bytes": 4000.0}, 10.0)
    assert rates.per_second == {"rounds": 0.0, "sent_bytes": 0.0}


def test_the_seconds_of_late_workers_are_a_counter() -> None:
    rates = Rates()
    rates.update({"late_seconds": 1.0}, 0.0)
    rates.update({"late_seconds": 2.0}, 2.0)
    assert rates.per_second == {"late_seconds": 0.5}


def test_close_heartbeats_are_taken_together() -> None:
    rates = Rates()
    for beat in range(9):
        rates.update({"step": float(beat)}, beat / 4)
        assert rates.per_second == ({} if beat < 4 else {"step": 4.0})


def test_gauges_have_no_rate() -> None:
    rates = Rates()
    rates.update({"held_bytes": 1.0, "open_rounds": 1.0}, 0.0)
    rates.update({"held_bytes": 9.0, "open_rounds": 9.0, "rounds": 9.0}, 2.0)
    assert rates.per_second == {}


@pytest.mark.parametrize("count", [3.0, math.nan, -math.inf])
def test_no_rate_is_below_zero(count: float) -> None:
    rates = Rates()
    rates.update({"step": 100.0}, 0.0)
    rates.update({"step": count}, 2.0)
    assert rates.per_second == {"step": 0.0}
