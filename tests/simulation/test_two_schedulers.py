"""Two schedulers on one job's name: however nodes are divided, one half at most trains on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zenps.scheduler.membership.quorum import Quorum
from zenps.scheduler.membership.tracker import Membership

from .nodes import Violation
from .partition import Partition

RUNS = 80


class _AnyQuorum(Quorum):
    def may_continue(self) -> bool:
        return True


class GoesOnWithAny(Membership):
    """Goes on with whoever is there."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._job.quorum = _AnyQuorum(self._job.members)


def run(runs: int, **parts: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(runs):
        partition = Partition(seed, **parts)
        partition.run()
        counts += partition.counts
        failures = [s.membership.failure for s in partition.schedulers if s is not None]
        counts["without a quorum"] += any("another scheduler may have these" in each for each in failures)
        counts["went on"] += bool(partition.rounds) and max(partition.rounds) > 300
    return counts


def test_one_half_at_most_trains_on() -> None:
    counts = run(RUNS)
    assert counts["rounds"] > 100 * RUNS
    assert counts["without a quorum"] > RUNS / 20
    assert counts["went on"] > RUNS / 20


def test_without_a_quorum_both_halves_train_on() -> None:
    with pytest.raises(Violation, match="has ended with"):
        run(RUNS, membership=GoesOnWithAny)
