"""Registry of position codecs, and the choice of the one with the fewest bytes for a chunk."""

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
"""The codecs that take next to no time."""

BY_SPAN: Final = frozenset({"bitmap", "dense"})
"""The codecs whose bytes grow with the span. Where a setting or a scheme demands one of them, the span of a
chunk must be bounded; ``auto`` takes them only for a chunk with at least one row in 32 positions."""

WORTHWHILE: Final = 1 / 20
"""The least share of a message that ``delta`` or ``blocks`` must save. ``delta`` takes some 200 ns a row, as
long as 25 bytes at 1 Gbit/s, so it does not pay for wide rows."""


def choose(setting: str, rows: int, span: int, row_bytes: int, positions: Positions | None = None) -> Codec:
    """Chooses the codec for ``rows`` of ``span`` positions, each with ``row_bytes`` of values.

    ``setting`` names a codec, or is ``auto``: then the codec with the fewest bytes is chosen, but ``delta``
    or ``blocks`` only if the message becomes smaller by :data:`WORTHWHILE`. The size of ``blocks`` depends
    on the positions: without ``positions``, which may still be on a GPU, it is not considered.
    """
    if setting != "auto":
        return CODECS[setting]
    plain = min(PLAIN, key=lambda codec: codec.max_bytes(rows, span))
    plain_bytes = plain.max_bytes(rows, span)
    worthwhile_bytes = WORTHWHILE * (plain_bytes + rows * row_bytes)
    if plain_bytes <= worthwhile_bytes:
        return plain
    best, best_bytes = CODECS["delta"], CODECS["delta"].max_bytes(rows, span)
    if positions is not None:
        blocks_bytes = _BLOCKS.size_bytes(count_blocks(positions), span)
        if blocks_bytes < best_bytes:
            best, best_bytes = _BLOCKS, blocks_bytes
    return best if plain_bytes - best_bytes > worthwhile_bytes else plain
