"""One round's tensors: pushes in rank order in, one result out. Nothing here waits or sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import Positions
from zenps.codecs.registry import CODECS, choose
from zenps.codecs.values import VALUE_CODECS
from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE, Kernels, Rows
from zenps.wire.blocks import NONE_LEFT, Ahead, decode_blocks, encode_blocks
from zenps.wire.messages import POSITION_BYTES, Dtype, Push, Result
from zenps.wire.tensors import DTYPES, RECEIVE_BUFFER_BYTES, check_size, tensor_bytes, tensor_from_bytes

Summed = NDArray[Any]

# Dense sums are NumPy's: what torch does around a sum of 1 KB takes five times as long as NumPy's whole
# sum. But NumPy has no bfloat16, and is slow at float16.
_SUMMED_AS_THEY_ARE: dict[Dtype, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<") for name in ("float32", "float64", "int64", "uint8")
}
_NOTHING = memoryview(b"")


class Payload(NamedTuple):
    """A push's tensors: positions ``[rows]`` int64 (None if dense), and values as they were received.

    Of blocks also the next one of each column: uint32 ``[span]``.
    """

    positions: Positions | None
    values: memoryview
    ahead: Ahead | None = None

    @property
    def size_bytes(self) -> int:
        """What it takes in memory: positions are larger here than on the wire, and small frames keep more."""
        tensors = self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)
        tensors += 0 if self.ahead is None else self.ahead.nbytes
        return tensors + RECEIVE_BUFFER_BYTES


def check_span(push: Push, max_message_bytes: int) -> None:
    """Refuses a chunk whose union might not fit into a message.

    All that a round takes here is in proportion to its span, so this bounds it before anything is read.

    Raises:
        ProtocolError: no worker with the same ``cluster.max_message_bytes`` cuts such chunks.
    """
    row_bytes = push.columns * DTYPES[push.dtype].itemsize + (0 if push.kind == "dense" else POSITION_BYTES)
    if push.span * row_bytes > max_message_bytes:
        reason = (
            f"a span of {push.span} rows of {row_bytes} bytes, expected {max_message_bytes} bytes at most"
        )
        raise ProtocolError("payload", reason)


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
    _check_values(push, frames[1])
    if push.kind == "dense":
        whole_or_nothing = push.rows in (0, push.span)
        if push.codec != "none" or frames[0].nbytes or not whole_or_nothing or push.columns != 1:
            raise ProtocolError("payload", "a dense chunk is whole or empty, and has no positions")
        return Payload(None, frames[1])
    if push.kind == "blocks":
        if push.codec != "bitmap" or push.values != "same":
            got = f"blocks with codec {push.codec!r} and values {push.values!r}"
            raise ProtocolError("payload", f"{got}, expected bitmap and same")
        positions, ahead = decode_blocks(frames[0], push.rows, push.span)
        return Payload(positions, frames[1], ahead)
    if push.codec == "none":
        raise ProtocolError("payload", "a sparse chunk needs a codec for its positions")
    return Payload(CODECS[push.codec].decode(frames[0], push.rows, push.span), frames[1])


class Aggregator:
    """Sums rounds; the union's positions travel by the codec that suits them."""

    def __init__(self, kernels: Kernels, pool: BufferPool) -> None:
        self._kernels = kernels
        self._pool = pool

    def aggregate(
        self, pushes: Sequence[tuple[Push, Payload]]
    ) -> tuple[Result, tuple[memoryview, memoryview]]:
        """The result of a round, and its frames. ``pushes`` are in rank order and agree in shape."""
        push = pushes[0][0]
        divisor = sum([len(push.ranks) for push, _ in pushes]) if push.average else 1
        pushed = sum([push.rows for push, _ in pushes])
        if push.kind == "dense":
            parts = [payload.values for _, payload in pushes if payload.values.nbytes]
            frames = (_NOTHING, self._sum_dense(parts, push, divisor) if parts else _NOTHING)
            rows = push.span if parts else 0
            return Result(push.ring_epoch, push.tensor, push.step, push.chunk, rows, "none", pushed), frames
        if push.kind == "blocks":
            present, ahead, summed = self._sum_blocks(pushes, divisor)
            result = Result(
                push.ring_epoch, push.tensor, push.step, push.chunk, len(present), "bitmap", pushed
            )
            return result, (encode_blocks(present, ahead), summed)
        positions, values = self._kernels.aggregate([self._rows(*pushed) for pushed in pushes], divisor)
        rows, numbers, data = len(positions), positions.numpy(), self._quantized(values, push)
        codec = choose(push.answer, rows, push.span, data.nbytes // max(rows, 1), numbers)
        encoded = codec.encode(numbers, push.span)
        result = Result(push.ring_epoch, push.tensor, push.step, push.chunk, rows, codec.name, pushed)
        return result, (encoded.data, data)

    def _rows(self, push: Push, payload: Payload) -> Rows:
        assert payload.positions is not None
        shape = (push.rows, push.columns)
        if push.values == "same":
            values = tensor_from_bytes(payload.values, DTYPES[push.dtype], shape)
        else:
            values = self._dequantized_rows(payload.values, push, shape)
        return torch.from_numpy(payload.positions), values

    def _dequantized_rows(self, data: memoryview, push: Push, shape: tuple[int, int]) -> Tensor:
        values = self._pool.empty(shape, torch.float32)
        VALUE_CODECS[push.values].decode(data, values)
        return values

    def _quantized(self, values: Tensor, push: Push) -> memoryview:
        """A sum ``[rows, columns]`` as it travels."""
        if push.values == "same":
            return tensor_bytes(values)
        codec = VALUE_CODECS[push.values]
        data = self._pool.empty((codec.size_bytes(*values.shape),), torch.uint8)
        codec.encode(values, data, push.step)
        return tensor_bytes(data)

    def _sum_dense(self, parts: Sequence[memoryview], push: Push, divisor: int) -> memoryview:
        """The sum in order, started from the first part so that -0.0 survives."""
        if len(parts) == 1 and divisor == 1:
            return parts[0]
        first = self._dequantized(parts[0], push)
        total = self._pool.array(first.size, first.dtype)
        if len(parts) == 1:
            total[:] = first
        else:
            np.add(first, self._dequantized(parts[1], push), out=total)
        for part in parts[2:]:
            total += self._dequantized(part, push)
        return self._divided(total, divisor, push)

    def _sum_blocks(
        self, pushes: Sequence[tuple[Push, Payload]], divisor: int
    ) -> tuple[Positions, Ahead, memoryview]:
        """The blocks that any rank has, the least of the next ones, and the sums: as of whole tensors.

        A block that a rank has left out counts as zeros there.
        """
        push = pushes[0][0]
        times = np.zeros(push.span, dtype=np.int64)
        ahead = np.full(push.span, NONE_LEFT, dtype=np.uint32)
        for _, payload in pushes:
            assert payload.positions is not None
            assert payload.ahead is not None
            times[payload.positions] += 1
            np.minimum(ahead, payload.ahead, out=ahead)
        present = np.flatnonzero(times)
        place = np.cumsum(times > 0) - 1
        dtype = _SUMMED_AS_THEY_ARE.get(push.dtype, np.dtype(np.float32))
        total = self._pool.array(len(present) * push.columns, dtype).reshape(len(present), push.columns)
        # -0.0, not 0.0, leaves every number that is added to it as it is.
        total.fill(-0.0)
        total[times[present] < len(pushes)] = 0.0
        for pushed, payload in pushes:
            assert payload.positions is not None
            values = self._dequantized(payload.values, pushed).reshape(len(payload.positions), push.columns)
            if len(values) == len(present):
                total += values
            else:
                total[place[payload.positions]] += values
        return present, ahead, self._divided(total.reshape(-1), divisor, push)

    def _divided(self, total: Summed, divisor: int, push: Push) -> memoryview:
        if divisor != 1:
            total /= divisor
        if push.values != "same":
            return self._quantized(torch.from_numpy(total)[:, None], push)
        if push.dtype in _SUMMED_AS_THEY_ARE:
            return total.data.cast("B")
        return tensor_bytes(torch.from_numpy(total).to(DTYPES[push.dtype]))

    def _dequantized(self, data: memoryview, push: Push) -> Summed:
        """A dense part in the dtype in which it is summed, uncopied where that is its own."""
        dequantized: Summed
        if push.values != "same":
            dequantized = self._dequantized_rows(data, push, (push.span, 1)).view(-1).numpy()
            return dequantized
        if push.dtype in _SUMMED_AS_THEY_ARE:
            return np.frombuffer(data, _SUMMED_AS_THEY_ARE[push.dtype])
        quantize = DTYPES[push.dtype]
        tensor = tensor_from_bytes(data, quantize, (data.nbytes // quantize.itemsize,))
        dequantized = tensor.to(ACCUMULATE[quantize]).numpy()
        return dequantized


def _check_values(push: Push, data: memoryview) -> None:
    if push.values == "same":
        check_size(data, DTYPES[push.dtype], (push.rows, push.columns))
        return
    if push.dtype != "float32":
        raise ProtocolError("payload", f"{push.dtype} as {push.values}: expected float32")
    expected = VALUE_CODECS[push.values].size_bytes(push.rows, push.columns)
    if data.nbytes != expected:
        got = f"{data.nbytes} bytes of {push.values} values"
        raise ProtocolError("payload", f"{got} for {push.rows} × {push.columns}, expected {expected}")
