from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from tests.server.rounds.test_tracker import (
    FixedOutcome,
    complete,
    make_held,
    make_rounds,
    memory_of,
    peer_of,
    push_all,
)
from zenps.errors import ProtocolError
from zenps.server.reducers.base import FailedRound
from zenps.server.rounds import history
from zenps.server.rounds.admission import ROUND_BYTES
from zenps.server.rounds.history import FORGOTTEN_BYTES, NAME_BYTES, RANK_BYTES, History
from zenps.server.rounds.states import Forgotten, Key, Reply, ServerRound
from zenps.wire.messages import Busy, Failure

RANKS = 8


class Pinned(FixedOutcome):
    """The outcome of a reducer that has changed its own state."""

    kept = "until the next result"


def ended(
    key: Key,
    excluded: frozenset[int] = frozenset(),
    kind: type[FixedOutcome] = FixedOutcome,
    push_bytes: int = 0,
) -> ServerRound:
    return ServerRound(
        key,
        state="answered",
        size_bytes=ROUND_BYTES,
        push_bytes=push_bytes,
        excluded=excluded,
        outcome=kind(key),
    )


def failure_of(key: Key) -> ServerRound:
    outcome = FailedRound(Failure(1, *key, "mismatch", "disagree"))
    return ServerRound(key, state="failed", size_bytes=ROUND_BYTES, outcome=outcome)


def test_its_memory_is_counted() -> None:
    tracemalloc.start()
    past, before = History(), tracemalloc.get_traced_memory()[0]
    for number in range(5000):
        for rank in range(RANKS):
            past.note(f"loss-{number}", rank, (1 << 40) + rank, 3000 + rank)
        past.keep(ended(Key(f"loss-{number}", 1 << 40, 0), push_bytes=(1 << 40) + number))
        past.forget_oldest()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.4 * past.size_bytes < taken < past.size_bytes
    past.clear()
    assert past.size_bytes == 0


def test_ranks_are_looked_through_only_if_one_has_passed() -> None:
    """A tick asks for each open round."""

    class Ranks(list[int]):
        looked_through = 0

        def __iter__(self) -> Iterator[int]:
            self.looked_through += 1
            return super().__iter__()

    past, ranks = History(), Ranks(range(RANKS))
    for rank in ranks:
        past.note("a", rank, 3, 2)
    ranks.looked_through = 0
    assert past.passed(Key("a", 3, 0), ranks) == past.passed(Key("a", 3, 1), ranks) == set()
    assert past.passed(Key("a", 4, 0), ranks) == past.passed(Key("other", 0, 0), ranks) == set()
    assert ranks.looked_through == 0
    assert past.passed(Key("a", 3, 2), ranks) == past.passed(Key("a", 2, 0), ranks) == {*range(RANKS)}
    past.note("a", 1, 3, 1)
    past.note("a", 2, 3, 0)
    assert past.passed(Key("a", 3, 0), ranks) == {2}
    assert past.passed(Key("a", 3, 1), ranks) == {1, 2}
    past.clear()
    assert past.passed(Key("a", 3, 1), ranks) == set()


def test_a_name_counts_once_and_what_is_known_again_does_not() -> None:
    past, key = History(), Key("a", 3, 0)
    past.note(key.tensor, 0, key.step, 1)
    size = past.size_bytes
    assert size > NAME_BYTES + RANK_BYTES
    past.note(key.tensor, 0, key.step, 1)
    assert past.passed(key, [0, 1]) == set()
    assert not past.has_passed(key, 0)
    past.note("a", 0, 4, 2)
    past.note(key.tensor, 0, key.step, 1)
    assert past.passed(key, [0, 1]) == {0}
    assert past.has_passed(key, 0)
    assert not past.has_passed(key, 1)
    assert past.size_bytes == size
    past.keep(ended(key, frozenset({2})))
    assert past.size_bytes == size + ROUND_BYTES
    past.forget_oldest()
    assert past.forgotten(key) == Forgotten(key.step, {2})
    assert past.size_bytes == size + FORGOTTEN_BYTES + RANK_BYTES
    past.keep(ended(key))
    assert past.forgotten(key) is None
    assert past.size_bytes == size + ROUND_BYTES
    assert past.kept_bytes == ROUND_BYTES


def test_evictable_bytes_are_what_forgetting_frees() -> None:
    past = History()
    for chunk in range(3):
        past.keep(ended(Key("a", 0, chunk)))
    past.keep(ended(Key("pinned", 0, 0), kind=Pinned))
    to_gain, before = past.evictable_bytes, past.size_bytes
    while past.evictable:
        past.forget_oldest()
    assert before - past.size_bytes == to_gain


def test_the_next_step_takes_the_place_of_what_is_kept_until_then() -> None:
    past = History()
    for step, kind in enumerate((Pinned, Pinned, FixedOutcome, FixedOutcome, Pinned)):
        past.keep(ended(Key("a", step, 0), kind=kind))
        assert (past.size_bytes, past.kept_bytes) == (ROUND_BYTES, ROUND_BYTES)
        assert past.evictable_bytes == (0 if kind is Pinned else ROUND_BYTES - FORGOTTEN_BYTES)
        last = past.kept(Key("a", step, 0))
        assert last is not None
        assert last.key.step == step
        assert [*past] == [last]


@pytest.mark.parametrize("kind", [FixedOutcome, Pinned])
def test_a_result_and_the_last_failure_since_are_kept_until_the_next_result(kind: type[FixedOutcome]) -> None:
    past = History()
    first, *failures, last = (Key("a", step, 0) for step in range(4))
    past.keep(ended(first, kind=kind))
    for failed in failures:
        past.keep(failure_of(failed))
        assert {round_.key for round_ in past} == {first, failed}
        assert (past.size_bytes, past.kept_bytes) == (2 * ROUND_BYTES, 2 * ROUND_BYTES)
    past.keep(failure_of(failures[0]))
    assert past.kept(failures[0]) is None
    past.keep(ended(last, kind=kind))
    assert [round_.key for round_ in past] == [last]
    assert (past.size_bytes, past.kept_bytes) == (ROUND_BYTES, ROUND_BYTES)


def test_a_forgotten_result_is_known_until_the_next_result() -> None:
    past = History()
    first, failed, last = (Key("a", step, 0) for step in range(3))
    past.keep(ended(first, frozenset({2})))
    past.forget_oldest()
    past.keep(failure_of(failed))
    past.forget_oldest()
    assert past.forgotten(first) == Forgotten(0, {2})
    assert past.forgotten(failed) == Forgotten(1, frozenset())
    assert past.size_bytes == 2 * FORGOTTEN_BYTES + RANK_BYTES
    past.keep(ended(last))
    assert past.forgotten(first) is past.forgotten(failed) is None
    assert past.size_bytes == ROUND_BYTES


def test_the_largest_push_is_that_of_the_last_result_even_if_it_is_forgotten() -> None:
    past = History()
    first, failed, last = (Key("a", step, 0) for step in range(3))
    assert past.last_push_bytes(first, 0) == 0
    past.keep(ended(first, push_bytes=300))
    past.keep(failure_of(failed))
    assert past.last_push_bytes(last, 0) == 300
    past.forget_oldest()
    assert past.last_push_bytes(last, 0) == 300
    assert past.last_push_bytes(Key("a", 2, 1), 0) == past.last_push_bytes(Key("b", 2, 0), 0) == 0
    assert past.last_push_bytes(last, 10) == 0, "with more chunks, each of them has less"
    past.keep(ended(last, push_bytes=20))
    assert past.last_push_bytes(Key("a", 3, 0), 0) == 20
    past.clear()
    assert past.last_push_bytes(Key("a", 3, 0), 0) == 0


def test_nothing_is_known_under_a_new_ring() -> None:
    past, name = History(), "".join(["a", "b"])
    past.note(name, 0, 3, 1)
    assert past.shared("".join(["a", "b"])) is name
    for chunk in range(2):
        past.keep(ended(Key(name, 3, chunk)))
    past.keep(ended(Key("pinned", 3, 0), kind=Pinned))
    past.forget_oldest()
    past.clear()
    again = "".join(["a", "b"])
    assert past.shared(again) is again
    assert [*past] == []
    assert past.forgotten(Key(name, 3, 0)) is None
    assert past.kept(Key(name, 3, 1)) is past.kept(Key("pinned", 3, 0)) is None
    assert past.size_bytes == past.kept_bytes == past.evictable_bytes == 0


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_NAMES", 3)
    rounds = make_rounds(2)
    for name in "abc":
        push_all(rounds, Key(name, 0, 0), [0])
    used = rounds._admission.used_bytes
    with pytest.raises(ProtocolError, match="unexpected: another tensor name, expected 3 at most"):
        rounds.on_push(make_held(0, Key("d", 0, 0)), 0.0)
    assert rounds._admission.used_bytes == used
    # Known names can still be pushed.
    complete(rounds, Key("a", 0, 0), [0, 1])
    rounds.on_view(2, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    assert rounds._admission.used_bytes == 0
    assert rounds.on_push(make_held(0, Key("d", 0, 0), ring_epoch=2), 0.0) == []


def test_forgotten_outcomes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_FORGOTTEN", 3)
    past = History()
    for chunk in range(5):
        past.keep(ended(Key("a", 0, chunk)))
        past.forget_oldest()
    assert [past.forgotten(Key("a", 0, chunk)) is None for chunk in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert past.size_bytes == 3 * FORGOTTEN_BYTES


def test_names_take_from_the_budget() -> None:
    """After thousands of them a round is refused that fitted before; one at a time is always admitted."""
    rounds = make_rounds(1, budget_bytes=1 << 20)
    for number in range(2000):
        complete(rounds, Key(f"loss-{number}", 0, 0), [0])
    assert memory_of(rounds) == ROUND_BYTES, "the last outcome alone is kept"
    assert rounds._admission.used_bytes > rounds._admission.budget_bytes
    rounds.on_view(1, {rank: peer_of(rank) for rank in range(2)}, {}, 0.0)
    assert rounds.on_push(make_held(0, Key("a", 0, 0)), 0.0) == []
    assert rounds.on_push(make_held(0, Key("b", 0, 0)), 0.0) == [Reply([peer_of(0)], Busy(1, "b", 0, 0))]
