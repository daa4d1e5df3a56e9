"""Makes pushes of each kind, and reduces them without a server around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import CodecName
from zenps.codecs.registry import CODECS
from zenps.server.reducers.base import Outcome, Payload
from zenps.server.reducers.registry import make_reducers
from zenps.wire.blocks import encode_blocks
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import dtype_name, tensor_bytes

Frames = tuple[memoryview, ...]


class OrdinaryMemory:
    """Memory for results that no worker of the same host reads."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def share(self, values: memoryview) -> memoryview:
        return values


REDUCERS = make_reducers(OrdinaryMemory(BufferPool(keep_bytes=1 << 26)), 1 << 30)


def read(push: Push, frames: Sequence[memoryview]) -> Payload:
    """What the reducer of its kind makes of a push."""
    payload = REDUCERS[push.kind].read(push, frames)
    assert isinstance(payload, Payload)
    return payload


def outcome_of(payloads: Sequence[Payload]) -> Outcome:
    return REDUCERS[payloads[0].push.kind].reduce(payloads)


def reduce(payloads: Sequence[Payload]) -> tuple[Result, Sequence[memoryview]]:
    """The message and the frames that every rank gets."""
    (answer,) = outcome_of(payloads).reply(payloads[0].push.rank)
    assert isinstance(answer.message, Result)
    return answer.message, answer.frames


def sparse_push(
    rank: int,
    positions: Sequence[int],
    values: Tensor,
    span: int,
    codec: CodecName = "coo",
    average: bool = False,
) -> tuple[Push, Frames]:
    rows, columns = values.shape
    dtype = dtype_name(values.dtype)
    push = Push(1, rank, "t", 5, 2, 4, "sparse", dtype, (span, columns), span, columns, rows, codec, average)
    encoded = CODECS[codec].encode(np.array(positions, dtype=np.int64), span)
    return push, (encoded.data, tensor_bytes(values))


def dense_push(rank: int, values: Tensor | None, like: Tensor, average: bool = False) -> tuple[Push, Frames]:
    span, dtype = len(like), dtype_name(like.dtype)
    rows = 0 if values is None else span
    push = Push(1, rank, "t", 5, 2, 4, "dense", dtype, (span,), span, 1, rows, "none", average)
    return push, (memoryview(b"") if values is None else tensor_bytes(values),)


def blocks_push(
    rank: int, blocks: dict[int, list[float]], ahead: Sequence[int], columns: int = 2, average: bool = False
) -> tuple[Push, Frames]:
    span, rows = len(ahead), len(blocks)
    push = Push(
        *(1, rank, "t", 5, 2, 4, "blocks", "float32", (9,), span, columns, rows, "bitmap", average),
    )
    frame = encode_blocks(np.array(list(blocks), dtype=np.int64), np.array(ahead, dtype=np.uint32))
    return push, (frame, tensor_bytes(torch.tensor(list(blocks.values()), dtype=torch.float32)))
