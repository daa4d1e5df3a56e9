"""Rounds before which the ranks meet: how they begin, what comes of a meeting, and how all of them end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.errors import DeadlineError, MismatchError, PeerLostError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.backends.negotiated_rounds import NegotiatedRound, NegotiatedRounds
from zenps.worker.backends.negotiation import Entry, entries, entry_of, table_of
from zenps.worker.core.spans import Spans

TENSOR = torch.zeros(3)


class Negotiation:
    """As its handle: ends when the test says what came of it."""

    step = 7

    def __init__(self) -> None:
        self.outcome: Tensor | ZenPSError | None = None

    @property
    def has_ended(self) -> bool:
        return self.outcome is not None

    def wait(self) -> Tensor:
        if isinstance(self.outcome, ZenPSError):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


class WorkerRounds(NegotiatedRounds[NegotiatedRound]):
    """Of rank 1 of 2. Rounds that have met are done at once, with the rows of both."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.said: list[tuple[str, list[Entry]]] = []
        self.negotiations: dict[str, Negotiation] = {}
        self.refuses: BaseException | None = None
        self.shut_down = 0
        metrics = WorkerMetrics(self.registry)
        super().__init__(1, 2, self.begin_negotiation, lambda *_: None, lambda: None, metrics)

    def begin_negotiation(self, table: Tensor, name: str) -> Negotiation:
        if self.refuses is not None:
            raise self.refuses
        self.said.append((name, entries(table)))
        return self.negotiations.setdefault(name, Negotiation())

    def begin(self, name: str, rows: int = 0) -> NegotiatedRound:
        return self._begin(
            name, TENSOR, rows, True, lambda _: NegotiatedRound(name, 0.1, lambda _: None, Spans())
        )

    def hear(self, round_: NegotiatedRound, outcome: Tensor | ZenPSError) -> None:
        self.negotiations[round_.name].outcome = outcome
        self._hear(round_)

    @property
    def failed(self) -> float | None:
        return self.registry.get_sample_value("zenps_rounds_total", {"outcome": "failed"})

    def _shut_down(self) -> None:
        self.shut_down += 1

    def _on_negotiated(self, round_: NegotiatedRound, said: Sequence[Entry]) -> None:
        self._end(round_, torch.tensor([entry.rows for entry in said]))


def both(mine: Tensor, others: Tensor) -> Tensor:
    """What servers make of the two ranks' tables."""
    own, theirs = entry_of(mine, 0, 4, True), entry_of(others, 0, 9, True)
    return table_of(theirs, 0, 2) + table_of(own, 1, 2)


def test_ranks_say_what_they_have_and_go_on_once_they_agree() -> None:
    rounds = WorkerRounds()
    round_ = rounds.begin("a", rows=4)
    rounds.begin("b", rows=5)
    assert [name for name, _ in rounds.said] == ["a", "b"]
    own = [said[1] for _, said in rounds.said]
    assert own == [entry_of(TENSOR, 0, 4, True), entry_of(TENSOR, 1, 5, True)]
    assert not round_.is_negotiated

    rounds.hear(round_, both(TENSOR, TENSOR))
    assert round_.is_negotiated
    assert round_.is_heard
    assert round_.wait().tolist() == [9, 4]
    assert rounds.failed == 0
    rounds.begin("a")


def test_a_name_is_in_flight_once() -> None:
    rounds = WorkerRounds()
    rounds.begin("a")
    with pytest.raises(UsageError, match="'a'"):
        rounds.begin("a")


def test_disagreement_ends_a_round_alone() -> None:
    rounds = WorkerRounds()
    one, other = rounds.begin("a"), rounds.begin("b")
    rounds.hear(one, both(TENSOR, torch.zeros(4)))
    with pytest.raises(MismatchError, match=r"'a', step 7: ranks disagree.*\(4,\).*\(3,\)"):
        one.wait()
    assert rounds.failed == 1
    assert not other.done()
    assert not rounds.is_over


def test_meeting_that_failed_ends_its_round() -> None:
    rounds = WorkerRounds()
    round_ = rounds.begin("a")
    rounds.hear(round_, DeadlineError("worker 0 is late"))
    with pytest.raises(DeadlineError, match="worker 0 is late"):
        round_.wait()
    assert rounds.failed == 1


def test_first_failure_ends_all_rounds_and_those_that_begin_later() -> None:
    rounds = WorkerRounds()
    before = [rounds.begin("a"), rounds.begin("b")]
    rounds.fail(PeerLostError("worker 0 is lost"))
    rounds.fail(PeerLostError("worker 2 is lost"))
    assert rounds.shut_down == 1
    met = len(rounds.said)
    for round_ in (*before, rounds.begin("a"), rounds.begin("c")):
        assert round_.done()
        with pytest.raises(PeerLostError, match="worker 0"):
            round_.wait()
    assert rounds.is_over
    assert len(rounds.said) == met, "nobody may wait for a meeting to which this rank comes for nothing"
    assert rounds.failed == 4


def test_name_is_free_again_where_a_meeting_could_not_begin() -> None:
    rounds = WorkerRounds()
    rounds.refuses = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rounds.begin("a")
    rounds.refuses = None
    assert rounds.begin("a").negotiation is not None


def test_whoever_leaves_is_told() -> None:
    rounds = WorkerRounds()
    round_ = rounds.begin("a")
    rounds.close()
    with pytest.raises(UsageError, match="has left the cluster"):
        round_.wait()
