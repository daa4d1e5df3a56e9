from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenps.errors import ProtocolError
from zenps.wire.blocks import NONE_LEFT
from zenps.worker.encode.streams import MAX_STREAMS, Plan, Stream, plan_streams

MIB = 1 << 20


def answer_to(pushes: Sequence[tuple[np.ndarray, np.ndarray]], asked: int) -> tuple[np.ndarray, np.ndarray]:
    """What a server makes of the positions and pointers that all ranks have pushed."""
    present = np.unique(np.concatenate([positions for positions, _ in pushes]))
    return present, np.minimum.reduce([np.full(asked, NONE_LEFT), *(ahead for _, ahead in pushes)])


@given(data=st.data(), count=st.integers(0, 40), columns=st.integers(1, 9), ranks=st.integers(1, 4))
def test_every_block_that_is_not_zero_travels_once_and_no_other_is_asked_for(
    data: st.DataObject, count: int, columns: int, ranks: int
) -> None:
    sets = st.sets(st.integers(0, count - 1)) if count else st.just(set[int]())
    held = [sorted(data.draw(sets)) for _ in range(ranks)]
    streams = [Stream(np.array(blocks, dtype=np.int64), count, columns) for blocks in held]
    union = set().union(*held)
    pushed: list[list[int]] = [[] for _ in range(ranks)]
    phases = 0
    while phases == 0 or len(streams[0].asked):
        asked = streams[0].asked.tolist()
        for stream in streams:
            assert stream.asked.tolist() == asked
            assert stream.phase == phases
        assert phases == 0 or set(asked) <= union, "the first blocks alone are asked for in the blind"
        assert sorted({block % columns for block in asked}) == [block % columns for block in asked]
        pushes = []
        for rank, stream in enumerate(streams):
            positions, places, ahead = stream.push()
            assert [asked[position] for position in positions] == [held[rank][place] for place in places]
            pushed[rank] += [asked[position] for position in positions]
            pushes.append((positions, ahead))
        for stream in streams:
            stream.advance(*answer_to(pushes, len(asked)))
        phases += 1
    assert [sorted(blocks) for blocks in pushed] == held
    fullest = max((sum(block % columns == column for block in union) for column in range(columns)), default=0)
    assert phases <= 1 + fullest
    assert all(len(stream.asked) == 0 for stream in streams)


@pytest.mark.parametrize(
    ("present", "ahead"),
    [
        ([0], [0, 3]),  # not ahead
        ([0], [3, 3]),  # of another column
        ([0], [8, 5]),  # behind what this rank has next
        ([0], [NONE_LEFT, 3]),  # likewise
        ([0], [4, 11]),  # behind the stream's end
        ([1], [4, 3]),  # without what was pushed
        ([], [4, 3]),  # likewise
    ],
)
def test_answers_that_no_pushes_come_to_are_refused(present: list[int], ahead: list[int]) -> None:
    stream = Stream(np.array([0, 4, 6]), count=11, columns=2)
    positions, _, own = stream.push()
    assert (positions.tolist(), own.tolist()) == ([0], [4, NONE_LEFT])
    with pytest.raises(ProtocolError, match="blocks"):
        stream.advance(np.array(present, dtype=np.int64), np.array(ahead, dtype=np.uint32))


def test_a_rank_follows_the_others_through_blocks_that_it_does_not_have() -> None:
    stream = Stream(np.array([6]), count=10, columns=2)
    for asked, ahead in [([0, 1], [2, 9]), ([2, 9], [6, NONE_LEFT]), ([6], [NONE_LEFT])]:
        assert stream.asked.tolist() == asked
        positions, places, own = stream.push()
        assert positions.tolist() == places.tolist() == ([0] if asked == [6] else [])
        assert own.min() >= min(ahead)
        stream.advance(np.arange(len(asked)), np.array(ahead, dtype=np.uint32))
    assert stream.asked.tolist() == []


@given(
    count=st.integers(0, 1 << 40),
    item_bytes=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([1 << bits for bits in range(13)]),
    fusion=st.integers(1, 65536),
    max_bytes=st.sampled_from([32 << 10, MIB // 2, 128 * MIB]),
)
def test_plans_cover_all_blocks_and_fit_into_messages(
    count: int, item_bytes: int, block: int, fusion: int, max_bytes: int
) -> None:
    plan = plan_streams(count, item_bytes, block, fusion, max_bytes)
    assert (plan.blocks - 1) * plan.block < count <= plan.blocks * plan.block or count == plan.blocks == 0
    bounds = [plan.bounds(stream) for stream in range(plan.streams)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == plan.blocks
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert 1 <= plan.streams <= MAX_STREAMS
    assert 1 <= plan.columns <= fusion
    assert plan.columns * plan.block * item_bytes <= max_bytes


def test_small_tensors_make_one_stream_of_one_message() -> None:
    assert plan_streams(5, 4, 256, 64, MIB) == Plan(block=5, blocks=1, streams=1, columns=64)
    assert plan_streams(64 * 256, 4, 256, 64, MIB).streams == 1
    assert plan_streams(MAX_STREAMS * 64 * 256, 4, 256, 64, MIB).streams == MAX_STREAMS
