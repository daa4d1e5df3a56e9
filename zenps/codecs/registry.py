"""Which position codecs there are, and which one suits a chunk."""

from __future__ import annotations

from typing import Final, get_args

from .base import Codec, CodecName, Positions
from .bitmap import Bitmap
from .blocks import Blocks, count_blocks
from .coo import Coo
from .delta import Delta
from .dense import Dense

_BLOCKS = Blocks()

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Coo(), Bitmap(), Delta(), _BLOCKS, Dense())}
assert tuple(CODECS) == get_args(CodecName)

PLAIN: Final = (CODECS["coo"], CODECS["bitmap"], CODECS["dense"])
"""Those that cost next to nothing."""

WORTHWHILE: Final = 1 / 20
"""``delta`` takes some 200 ns a row, as long as 25 bytes at 1 Gbit/s: wide rows are not worth it."""


def choose(setting: str, rows: int, span: int, row_bytes: int, positions: Positions | None = None) -> Codec:
    """The codec of ``rows`` of ``span`` positions, each with ``row_bytes`` of values.

    That named by ``setting``; or for ``auto``, the one with the fewest bytes, but ``delta`` or ``blocks``
    only if that makes the message smaller by :data:`WORTHWHILE`. How many bytes ``blocks`` takes depends on
    where the rows are: without ``positions``, which may still be on a GPU, it is left out.
    """
    if setting != "auto":
        return CODECS[setting]
    plain = min(PLAIN, key=lambda codec: codec.most_bytes(rows, span))
    plain_bytes = plain.most_bytes(rows, span)
    worthwhile_bytes = WORTHWHILE * (plain_bytes + rows * row_bytes)
    if plain_bytes <= worthwhile_bytes:
        return plain
    best, best_bytes = CODECS["delta"], CODECS["delta"].most_bytes(rows, span)
    if positions is not None:
        blocks_bytes = _BLOCKS.size_bytes(count_blocks(positions), span)
        if blocks_bytes < best_bytes:
            best, best_bytes = _BLOCKS, blocks_bytes
    return best if plain_bytes - best_bytes > worthwhile_bytes else plain
