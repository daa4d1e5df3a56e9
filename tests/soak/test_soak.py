"""A short form of ``make soak``, and tests that growth is noticed."""

from __future__ import annotations

import pytest

from tests.soak.soak import Report, Sample, soak


@pytest.mark.long
def test_nothing_grows_in_a_thousand_steps() -> None:
    report = soak(1000, every_seconds=0.1)
    assert min(map(len, report.samples.values())) > 8
    assert report.faults() == []


@pytest.mark.parametrize(
    ("resident", "descriptors", "threads", "fault"),
    [
        (10, 0, 0, "p: resident memory grew by"),
        (0, 1, 0, "p: descriptors grew from"),
        (0, 0, 1, "p: threads grew from"),
    ],
)
def test_growth_is_a_fault(resident: int, descriptors: int, threads: int, fault: str) -> None:
    samples = [
        Sample(step, 1000 + resident * step, 5 + descriptors * step, 3 + threads * step) for step in range(40)
    ]
    (found,) = Report(40, 1, 1, 1.0, "", {"p": samples}).faults()
    assert found.startswith(fault)


def test_growth_during_the_warm_up_is_not_a_fault() -> None:
    samples = [Sample(step, min(1000 + 100 * step, 1900), 5, 3) for step in range(40)]
    assert Report(40, 1, 1, 1.0, "", {"p": samples}).faults() == []
