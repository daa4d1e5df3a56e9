"""Which codecs there are."""

from __future__ import annotations

from typing import Final, get_args

from zenps.codecs.base import Codec, CodecName
from zenps.codecs.bitmap import Bitmap
from zenps.codecs.coo import Coo
from zenps.codecs.delta import Delta

__all__ = ["CODECS", "choose"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Coo(), Bitmap(), Delta())}
assert tuple(CODECS) == get_args(CodecName)

PLAIN: Final = (CODECS["coo"], CODECS["bitmap"])
"""Those that cost next to nothing, and that a GPU codes by itself."""

WORTHWHILE: Final = 1 / 20
"""``delta`` takes some 200 ns a row, as long as 25 bytes at 1 Gbit/s: wide rows are not worth it."""


def choose(setting: str, rows: int, span: int, row_bytes: int) -> Codec:
    """The codec of ``rows`` of ``span`` positions, each with ``row_bytes`` of values.

    That named by ``setting``; or for ``auto``, the one with the fewest bytes, but ``delta`` only if that
    makes the message smaller by :data:`WORTHWHILE`.
    """
    if setting != "auto":
        return CODECS[setting]
    plain = min(PLAIN, key=lambda codec: codec.most_bytes(rows, span))
    plain_bytes = plain.most_bytes(rows, span)
    saved = plain_bytes - CODECS["delta"].most_bytes(rows, span)
    return CODECS["delta"] if saved > WORTHWHILE * (plain_bytes + rows * row_bytes) else plain
