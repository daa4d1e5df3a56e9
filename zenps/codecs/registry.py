"""Which codecs there are."""

from __future__ import annotations

from typing import get_args

from zenps.codecs.base import Codec, CodecName
from zenps.codecs.bitmap import Bitmap
from zenps.codecs.coo import Coo

__all__ = ["CODECS", "choose"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Coo(), Bitmap())}
assert tuple(CODECS) == get_args(CodecName)


def choose(setting: str, rows: int, span: int) -> Codec:
    """The codec named by ``sync.codec``, or for ``auto`` the one with the fewest bytes."""
    if setting == "auto":
        return min(CODECS.values(), key=lambda codec: codec.encoded_bytes(rows, span))
    return CODECS[setting]
