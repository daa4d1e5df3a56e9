"""How what was pushed under one ring is cut again for another.

A ring that changes moves positions, not rows: the frames of all parts hold every row that this rank pushed,
compacted, and in an order that the old layout undoes. So neither the gradient nor a kernel is needed again,
and only bytes are moved, whatever they mean.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from zenps.codecs.registry import CODECS
from zenps.partition.layout import Layout

from .dense import encode_values, granule_order
from .sparse import encode_rows
from .transfer import EncodedChunk, EncodedTensor, Sharding


def reshard(sent: EncodedTensor, cut: Sharding, codec: str) -> EncodedTensor:
    """What a fresh transfer of the same tensor would push under ``cut``, to the byte.

    Args:
        sent: under any earlier ring.
        cut: of the same tensor, under the present one.
        codec: the setting ``sync.codec``.
    """
    old, new = sent.cut.layout, cut.layout
    if old is None or new is None:
        assert old is new, "whole or split is a matter of size"
        parts = [structs.replace(part, server=cut.home) for part in sent.parts]
    elif sent.kind == "sparse":
        parts = _reshard_rows(sent, old, new, cut, codec)
    else:
        parts = _reshard_values(sent, old, new, cut)
    return structs.replace(sent, cut=cut, parts=parts)


def _reshard_rows(
    sent: EncodedTensor, old: Layout, new: Layout, cut: Sharding, codec: str
) -> list[EncodedChunk]:
    starts = {place: piece.start for place, piece in sent.cut.ranges().items()}
    before = np.concatenate(
        [
            CODECS[part.codec].decode(part.frames[0], part.rows, part.span) + starts[part.server, part.chunk]
            for part in sent.parts
        ]
    )
    positions = new.positions(old.rows(torch.from_numpy(before))).numpy()
    order = np.argsort(positions)
    values = _joined(sent).reshape(len(order), sent.row_bytes).take(order, axis=0)
    return encode_rows(cut, positions[order], values.reshape(-1).data, sent.row_bytes, codec)


def _reshard_values(sent: EncodedTensor, old: Layout, new: Layout, cut: Sharding) -> list[EncodedChunk]:
    if not any(part.rows for part in sent.parts):  # this rank does not contribute
        return encode_values(cut, None, sent.row_bytes)
    granules, moved = granule_order(old).numpy(), granule_order(new).numpy()
    place = np.empty_like(granules)
    place[granules] = np.arange(len(granules))
    values = _joined(sent).reshape(len(granules), sent.row_bytes).take(place[moved], axis=0)
    return encode_values(cut, values.reshape(-1).data, sent.row_bytes)


def _joined(sent: EncodedTensor) -> NDArray[np.uint8]:
    """The values of all parts, in order of the old positions."""
    return np.concatenate([np.frombuffer(part.frames[1], dtype=np.uint8) for part in sent.parts])
