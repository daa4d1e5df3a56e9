from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zenps.errors import ProtocolError
from zenps.wire.blocks import NONE_LEFT, decode_blocks, encode_blocks


@given(
    blocks=st.lists(st.tuples(st.booleans(), st.integers(0, NONE_LEFT)), max_size=50),
)
def test_frames_come_back(blocks: list[tuple[bool, int]]) -> None:
    positions = np.array([at for at, (is_there, _) in enumerate(blocks) if is_there], dtype=np.int64)
    ahead = np.array([after for _, after in blocks], dtype=np.uint32)
    frame = encode_blocks(positions, ahead)
    assert frame.nbytes == 4 * len(blocks) + (len(blocks) + 7) // 8
    decoded = decode_blocks(frame, len(positions), len(blocks))
    assert [part.tolist() for part in decoded] == [positions.tolist(), ahead.tolist()]


@pytest.mark.parametrize(
    ("frame", "rows", "span"),
    [
        (b"", 0, 1),
        (b"\0\0\0\0", 0, 1),
        (b"\0\0\0\0\1", 2, 1),
        (b"\0\0\0\0\1", 0, 1),
        (b"\0\0\0\0\2", 1, 1),
        (b"\0\0\0\0\1\0", 1, 1),
        (b"\1", 1, 1 << 60),
    ],
    ids=["nothing", "no bitmap", "too few", "too many", "beyond the span", "too long", "immense"],
)
def test_other_frames_are_refused(frame: bytes, rows: int, span: int) -> None:
    with pytest.raises(ProtocolError):
        decode_blocks(memoryview(frame), rows, span)
