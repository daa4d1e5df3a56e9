"""One round's tensors: pushes in rank order in, one result out. Nothing here waits or sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE, Kernels, Rows
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import DTYPES, tensor_bytes, tensor_from_bytes

__all__ = ["Aggregator", "Payload", "read_payload"]


class Payload(NamedTuple):
    """A push's tensors: positions ``[rows]`` int64 (None if dense), values ``[rows, columns]``."""

    positions: Tensor | None
    values: Tensor

    @property
    def size_bytes(self) -> int:
        """What it takes in memory: positions are larger here than on the wire."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


def read_payload(push: Push, frames: Sequence[memoryview]) -> Payload:
    """The tensors of a push, on the received memory.

    Raises:
        ProtocolError: the frames are not what the envelope announces.
    """
    if len(frames) != 2:
        raise ProtocolError("payload", f"{len(frames)} frames after the envelope, expected 2")
    if push.rows > push.span:
        raise ProtocolError("payload", f"{push.rows} rows in a span of {push.span}")
    if push.average and not DTYPES[push.dtype].is_floating_point:
        raise ProtocolError("payload", f"an average of {push.dtype}")
    values = tensor_from_bytes(frames[1], DTYPES[push.dtype], (push.rows, push.columns))
    if push.kind == "dense":
        whole_or_nothing = push.rows in (0, push.span)
        if push.codec != "none" or frames[0].nbytes or not whole_or_nothing or push.columns != 1:
            raise ProtocolError("payload", "a dense chunk is whole or empty, and has no positions")
        return Payload(None, values)
    if push.codec == "none":
        raise ProtocolError("payload", "a sparse chunk needs a codec for its positions")
    positions = CODECS[push.codec].decode(frames[0], push.rows, push.span)
    return Payload(torch.from_numpy(positions), values)


class Aggregator:
    """Sums rounds; the union's positions travel by whichever codec makes them smaller."""

    def __init__(self, kernels: Kernels, pool: BufferPool) -> None:
        self._kernels = kernels
        self._pool = pool

    def aggregate(
        self, pushes: Sequence[tuple[Push, Payload]]
    ) -> tuple[Result, tuple[memoryview, memoryview]]:
        """The result of a round, and its frames. ``pushes`` are in rank order and agree in shape."""
        push = pushes[0][0]
        payloads = [payload for _, payload in pushes]
        divisor = len(pushes) if push.average else 1
        if push.kind == "dense":
            total = self._sum_dense([p.values for p in payloads if len(p.values)], divisor)
            frames = (memoryview(b""), tensor_bytes(total) if total is not None else memoryview(b""))
            rows = 0 if total is None else push.span
            return Result(push.tensor, push.step, push.chunk, rows, "none"), frames
        parts: list[Rows] = [(p.positions, p.values) for p in payloads if p.positions is not None]
        positions, values = self._kernels.aggregate(parts, divisor)
        codec = choose("auto", len(positions), push.span)
        encoded = codec.encode(positions.numpy(), push.span)
        result = Result(push.tensor, push.step, push.chunk, len(positions), codec.name)
        return result, (encoded.data, tensor_bytes(values))

    def _sum_dense(self, parts: Sequence[Tensor], divisor: int) -> Tensor | None:
        """The sum in order, started from the first part so that -0.0 survives."""
        if not parts:
            return None
        dtype, shape = parts[0].dtype, tuple(parts[0].shape)
        if len(parts) == 1 and divisor == 1:
            return parts[0]
        total = self._pool.empty(shape, ACCUMULATE[dtype])
        if len(parts) == 1:
            total.copy_(parts[0])
        else:
            # Widened first: torch adds in the dtype of what is added, whatever ``out`` is.
            torch.add(parts[0].to(total.dtype), parts[1], out=total)
        for part in parts[2:]:
            total += part
        if divisor != 1:
            total /= divisor
        return total.to(dtype)
