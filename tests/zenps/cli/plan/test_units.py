"""Units of a plan: options in them are parsed or refused, and numbers are written in them."""

from __future__ import annotations

import pytest

from zenps.cli.plan.units import parse_bandwidth, parse_latency, show_bytes, show_seconds
from zenps.errors import ConfigError


def test_units() -> None:
    assert parse_bandwidth("10Gbit") == 1.25e9
    assert parse_bandwidth("0.5 Mbit") == 62_500
    assert parse_latency("50us") == pytest.approx(50e-6)
    assert parse_latency("0") == 0
    assert [show_seconds(s) for s in (5e-5, 0.0123, 2.0, 4000.0)] == ["50 us", "12.3 ms", "2 s", "4000 s"]
    assert [show_bytes(b) for b in (999, 1.5e6, 2e12)] == ["999 B", "1.5 MB", "2 TB"]


def test_numbers_that_are_rounded_up_have_the_next_unit() -> None:
    shown = [show_seconds(s) for s in (0.0, 9.994e-4, 9.996e-4, 0.9996, 999.6, 12_345.6)]
    assert shown == ["0 us", "999 us", "1 ms", "1 s", "1000 s", "12346 s"]
    shown = [show_bytes(b) for b in (999.4, 999.6, 999_600.0, 9.996e11, 9.996e14)]
    assert shown == ["999 B", "1 kB", "1 MB", "1 TB", "1000 TB"]


@pytest.mark.parametrize("text", ["", "10", "10Gbps", "-1Gbit", "0Gbit", "nanGbit", "1e400Gbit"])
def test_a_bad_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--bandwidth = .*10Gbit or 500Mbit"):
        parse_bandwidth(text)
