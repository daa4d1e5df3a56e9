"""Resharding: encodes pushes under an old ring for a new one.

A change of the ring moves the positions of rows, not the rows. The frames of all chunks contain every row
that this rank pushed, compacted, and the old layout maps their positions back to rows. So neither the
gradient nor a kernel is needed again: only encoded bytes are moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from zenps.codecs.registry import CODECS

from ..core.transfer import EncodedChunk, EncodedTensor, Sharding
from .dense import encode_values
from .sparse import encode_rows


def reshard(encoded: EncodedTensor, sharding: Sharding, codec: str) -> EncodedTensor:
    """Returns what a new transfer of the same tensor would push under ``sharding``, to the byte.

    Args:
        encoded: for any earlier ring.
        sharding: of the same tensor, for the present ring.
        codec: the setting ``sync.codec``.
    """
    chunks: Sequence[EncodedChunk]
    if encoded.kind == "sparse":
        chunks = _reshard_rows(encoded, sharding, codec)
    elif sharding.layout is not None:
        contributes = any(chunk.rows for chunk in encoded.chunks)
        values = _joined(encoded).data if contributes else None
        chunks = encode_values(sharding.ranges(), values, encoded.row_bytes)
    else:
        chunks = tuple(structs.replace(chunk, server=sharding.home) for chunk in encoded.chunks)
    return structs.replace(encoded, sharding=sharding, chunks=chunks)


def _reshard_rows(encoded: EncodedTensor, sharding: Sharding, codec: str) -> list[EncodedChunk]:
    old, new = encoded.sharding.row_layout, sharding.row_layout
    starts = {key: each.start for key, each in encoded.sharding.ranges().items()}
    before = np.concatenate(
        [
            CODECS[chunk.codec].decode(chunk.frames[0], chunk.rows, chunk.span)
            + starts[chunk.server, chunk.chunk]
            for chunk in encoded.chunks
        ]
    )
    positions = new.positions(old.rows(torch.from_numpy(before))).numpy()
    order = np.argsort(positions)
    values = _joined(encoded).reshape(len(order), encoded.row_bytes).take(order, axis=0)
    return encode_rows(
        sharding.ranges(),
        sharding,
        positions[order],
        values.reshape(-1).data,
        encoded.row_bytes,
        codec,
    )


def _joined(encoded: EncodedTensor) -> NDArray[np.uint8]:
    """Returns the values of all chunks, in order of the old positions."""
    return np.concatenate([np.frombuffer(chunk.frames[-1], dtype=np.uint8) for chunk in encoded.chunks])
