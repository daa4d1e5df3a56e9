"""A reducer that keeps rows, replies to each rank differently, and computes the reply again for a repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tests.server.reducers.reduction import OrdinaryMemory
from tests.server.rounds.test_tracker import FixedOutcome, make_held, make_rounds, memory_of, peer_of
from zenps.buffers import BufferPool
from zenps.kernels.factory import make_kernels
from zenps.server.reducers.base import Answer, Kept, Outcome, Payload, Reducer
from zenps.server.rounds.states import Action, HeldPush, Key, Reduce, Reply
from zenps.server.rounds.tracker import ServerRounds
from zenps.wire.messages import Push, Result

ROWS = 8
Table = NDArray[np.float32]
Numbers = NDArray[np.int64]


class Gradients(Payload, frozen=True):
    """A gradient for every row, and the rows that the rank wants to have next."""

    wanted: Numbers
    values: Table


class NextRows(Outcome):
    """The rows that each rank wants, taken from the table for every reply."""

    kept: ClassVar[Kept] = "until the next result"

    def __init__(self, push: Push, table: Table, wanted: dict[int, Numbers]) -> None:
        self._push, self._table, self._wanted = push, table, wanted
        self.computed = 0
        self.size_bytes = sum(numbers.nbytes for numbers in wanted.values())

    def reply(self, rank: int) -> Sequence[Answer]:
        self.computed += 1
        push, wanted = self._push, self._wanted[rank]
        result = Result(push.ring_epoch, push.tensor, push.step, push.chunk, len(wanted), "none")
        return [Answer(result, (wanted.data.cast("B"), self._table[wanted].data.cast("B")))]


class TableReducer(Reducer[Gradients]):
    """Owns the rows of a table: a round subtracts the gradients of all ranks from them."""

    def __init__(self) -> None:
        memory = OrdinaryMemory(BufferPool(1 << 20))
        super().__init__(make_kernels(memory.pool), memory, 1 << 20)
        self.table = np.zeros(ROWS, np.float32)

    def read(self, push: Push, frames: Sequence[memoryview]) -> Gradients:
        wanted, values = np.frombuffer(frames[0], np.int64), np.frombuffer(frames[1], np.float32)
        return Gradients(push, wanted.nbytes + values.nbytes, wanted, values)

    def reduce(self, payloads: Sequence[Gradients]) -> NextRows:
        for payload in payloads:
            self.table -= payload.values
        wanted = {payload.push.rank: payload.wanted for payload in payloads}
        return NextRows(payloads[0].push, self.table, wanted)


def push_of(reducer: TableReducer, rank: int, step: int, wanted: list[int], gradient: float) -> HeldPush:
    push = make_held(rank, Key("table", step, 0)).push
    numbers, values = np.array(wanted), np.full(ROWS, gradient, np.float32)
    payload = reducer.read(push, (numbers.data.cast("B"), values.data.cast("B")))
    return HeldPush(peer_of(rank), push, payload, payload.size_bytes)


def run_step(rounds: ServerRounds, reducer: TableReducer, step: int) -> tuple[NextRows, list[Action]]:
    """Rank 0 wants the rows 1 and 2, rank 1 wants row 7. The outcome, and what the rounds ask for."""
    assert rounds.on_push(push_of(reducer, 1, step, [7], 0.5), 0.0) == []
    (action,) = rounds.on_push(push_of(reducer, 0, step, [1, 2], 1.0), 0.0)
    assert isinstance(action, Reduce)
    payloads: list[Any] = [held.payload for held in action.pushes]
    outcome = reducer.reduce(payloads)
    return outcome, [*rounds.replies(action.key, outcome), *rounds.finish(action.key, outcome, 0.0)]


def rows_in(action: Action) -> tuple[Sequence[bytes], list[int], list[float]]:
    """The peers of a reply, the numbers of the rows in it, and their values."""
    assert isinstance(action, Reply)
    assert isinstance(action.message, Result)
    numbers, values = np.frombuffer(action.frames[0], np.int64), np.frombuffer(action.frames[1], np.float32)
    assert action.message.rows == len(numbers)
    return action.peers, numbers.tolist(), values.tolist()


def test_each_rank_gets_its_own_reply() -> None:
    rounds, reducer = make_rounds(2), TableReducer()
    _, replies = run_step(rounds, reducer, 0)
    assert sorted(map(rows_in, replies)) == [
        ([peer_of(0)], [1, 2], [-1.5, -1.5]),
        ([peer_of(1)], [7], [-1.5]),
    ]


def test_a_repeated_push_is_answered_by_computing_again() -> None:
    rounds, reducer = make_rounds(2), TableReducer()
    outcome, replies = run_step(rounds, reducer, 0)
    (first,) = [reply for reply in map(rows_in, replies) if reply[0] == [peer_of(1)]]
    assert outcome.computed == 2
    (again,) = rounds.on_push(push_of(reducer, 1, 0, [7], 0.5), 1.0)
    assert outcome.computed == 3
    assert rows_in(again) == first
    assert reducer.table.tolist() == [-1.5] * ROWS, "gradients count once"


def test_an_outcome_that_cannot_be_reduced_again_is_not_forgotten_for_want_of_room() -> None:
    rounds, reducer = make_rounds(2, budget_bytes=1), TableReducer()
    run_step(rounds, reducer, 0)
    for number in range(3):
        key = Key(f"gradient-{number}", 0, 0)
        rounds.on_push(make_held(0, key), 0.0)
        rounds.on_push(make_held(1, key), 0.0)
        rounds.finish(key, FixedOutcome(key), 0.0)
    assert [round_.key.tensor for round_ in rounds._history] == ["gradient-2", "table"]
    (again,) = rounds.on_push(push_of(reducer, 1, 0, [7], 0.5), 1.0)
    assert rows_in(again) == ([peer_of(1)], [7], [-1.5])


def test_it_is_kept_until_the_next_result() -> None:
    rounds, reducer = make_rounds(2), TableReducer()
    run_step(rounds, reducer, 0)
    held = memory_of(rounds)
    _, replies = run_step(rounds, reducer, 1)
    assert sorted(map(rows_in, replies))[1] == ([peer_of(1)], [7], [-3.0])
    assert memory_of(rounds) == held
    assert rounds.on_push(push_of(reducer, 1, 0, [7], 0.5), 1.0) == [], (
        "rank 1 has shown that it got its reply"
    )
    rounds.on_view(2, {0: peer_of(0)}, {}, 1.0)
    assert rounds._admission.used_bytes == 0
