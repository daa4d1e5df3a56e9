"""Ticks of the channel, in a time that the test gives; and errors of its events."""

from __future__ import annotations

import pytest

from zenps.errors import ConfigError
from zenps.worker.transport.commands import TICK_SECONDS, Ticks, event_error


def test_a_tick_that_is_late_is_left_out_once() -> None:
    ticks = Ticks()
    assert ticks.is_due(100.0), "the first is never late"
    assert not ticks.is_due(100.0 + TICK_SECONDS / 2)
    assert ticks.is_due(100.0 + TICK_SECONDS)
    assert not ticks.is_due(110.0), "what has come meanwhile is read before deadlines expire"
    assert ticks.next == 110.0 + TICK_SECONDS
    assert ticks.is_due(120.0), "where no thread polls for long, deadlines expire all the same"
    assert not ticks.is_due(130.0)


def test_only_an_unexpected_error_is_wrapped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    expected = ConfigError("security.keys", "keys.toml", "a list that has the public key of server-1")
    assert event_error(expected) is expected
    assert not caplog.records
    assert str(event_error(KeyError("x"))).startswith("an event of the channel failed (KeyError('x'))")
    (record,) = caplog.records
    assert record.exc_info
