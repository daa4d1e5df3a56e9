"""What the server expects of every reducer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch

from tests.server.reducers.reduction import (
    REDUCERS,
    Frames,
    OrdinaryMemory,
    blocks_push,
    dense_push,
    outcome_of,
    read,
    sparse_push,
)
from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.server.reducers.base import Kept, Outcome
from zenps.server.reducers.registry import make_reducers
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import RECEIVE_BUFFER_BYTES

VALUES = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
FLAT = VALUES.view(-1)
Pushes = Sequence[tuple[Push, Frames]]

SAMPLES: dict[str, Pushes] = {
    "dense": [dense_push(rank, FLAT * (rank + 1), FLAT, average=True) for rank in range(3)],
    "sparse": [
        sparse_push(rank, [0, 2, 5, 7 + rank], VALUES * (rank + 1), 11, average=True) for rank in range(3)
    ],
    "blocks": [
        blocks_push(rank, {0: [1.0, -0.0], rank: [2.5, 1e8]}, [rank, 4, 5], average=True) for rank in range(3)
    ],
}
"""For each kind, a push of each of three ranks, and its frames."""

every_kind = pytest.mark.parametrize("pushes", SAMPLES.values(), ids=SAMPLES)


def reduced(pushes: Pushes) -> Outcome:
    return outcome_of([read(push, frames) for push, frames in pushes])


def replied(outcome: Outcome, ranks: int) -> list[tuple[Result, list[bytes]]]:
    """What each rank gets."""
    answers = [answer for rank in range(ranks) for answer in outcome.reply(rank)]
    results = [answer.message for answer in answers if isinstance(answer.message, Result)]
    frames = [[bytes(frame) for frame in answer.frames] for answer in answers]
    return list(zip(results, frames, strict=True))


def test_every_kind_is_tried() -> None:
    assert SAMPLES.keys() == REDUCERS.keys()


@every_kind
def test_the_same_pushes_are_reduced_to_the_same_bits(pushes: Pushes) -> None:
    before = [[bytes(frame) for frame in frames] for _, frames in pushes]
    first, again = replied(reduced(pushes), 3), replied(reduced(pushes), 3)
    assert first == again
    assert before == [[bytes(frame) for frame in frames] for _, frames in pushes], "pushes are not written to"


@every_kind
def test_a_rank_that_asks_again_gets_the_same_bits(pushes: Pushes) -> None:
    outcome = reduced(pushes)
    assert replied(outcome, 3) == replied(outcome, 3)


@every_kind
def test_a_reply_is_a_result_of_the_chunk_whose_frames_can_be_read(pushes: Pushes) -> None:
    push = pushes[0][0]
    for result, frames in replied(reduced(pushes), 3):
        assert (result.ring_epoch, result.tensor, result.step, result.chunk) == (1, "t", 5, 2)
        assert result.pushed == sum(push.rows for push, _ in pushes)
        as_push = msgspec.structs.replace(push, rows=result.rows, codec=result.codec)
        read(as_push, [memoryview(frame) for frame in frames])
        broken = [memoryview(frame) for frame in (*frames[:-1], frames[-1] + b"\0")]
        with pytest.raises(ProtocolError):
            read(as_push, broken)


@every_kind
def test_its_size_is_that_of_what_is_kept(pushes: Pushes) -> None:
    outcome = reduced(pushes)
    answers = [answer for rank in range(3) for answer in outcome.reply(rank)]
    kept = {id(frame): frame.nbytes for answer in answers for frame in answer.frames}
    assert outcome.size_bytes == sum(kept.values()) > 0
    assert outcome.kept in get_args(Kept)
    for push, frames in pushes:
        assert read(push, frames).size_bytes >= sum(frame.nbytes for frame in frames)
        assert read(push, frames).size_bytes > RECEIVE_BUFFER_BYTES


@every_kind
def test_what_is_kept_does_not_keep_the_buffer_of_a_small_push(pushes: Pushes) -> None:
    push, frames = pushes[0]
    alone = msgspec.structs.replace(push, average=False)
    (answer,) = reduced([(alone, frames)]).reply(0)
    assert not any(np.shares_memory(kept, frame) for kept in answer.frames for frame in frames)


@every_kind
def test_results_lie_where_workers_of_this_host_can_read_them(pushes: Pushes) -> None:
    class Copies(OrdinaryMemory):
        def share(self, values: memoryview) -> memoryview:
            placed.append(memoryview(bytes(values)))
            return placed[-1]

    placed: list[memoryview] = []
    reducer = make_reducers(Copies(BufferPool(1 << 20)), 1 << 30)[pushes[0][0].kind]
    outcome = reducer.reduce([reducer.read(push, frames) for push, frames in pushes])
    (values,) = placed
    assert all(outcome.reply(rank)[-1].frames[-1] is values for rank in range(3))


@every_kind
def test_a_chunk_that_is_too_large_is_refused_before_it_is_read(pushes: Pushes) -> None:
    push = msgspec.structs.replace(pushes[0][0], span=1 << 40, rows=1 << 40)
    with pytest.raises(ProtocolError, match=r"a (span|push) of 1099511627776 rows"):
        REDUCERS[push.kind].check_size(push)
