"""Quantization of pushed values with error feedback; only float32 gradients are quantized.

Error feedback: a rank adds the rounding error of a row (its residual) to that row when it is pushed next, so
that no error is lost for good (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014;
Karimireddy et al., https://arxiv.org/abs/1901.09847). Residuals are kept by row, so a change of the ring does
not affect them, and a repeated push has the same bytes. A joining worker begins with residuals of zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final

import torch
from torch import Tensor

from zenps.codecs.base import ValueCodec, ValueForm
from zenps.kernels.cpu import put_rows
from zenps.partition.layout import Layout
from zenps.wire.tensors import DTYPES, copied_bytes, flat, tensor_bytes, tensor_from_bytes

from ..core.request import Parts
from ..core.residuals import Rounding

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns an uninitialised contiguous tensor of a shape and dtype."""


class ValueCoder(ABC):
    """Encodes the values of one tensor to bytes, and decodes them.

    Attributes:
        form: for the ``values`` of a push.
    """

    form: ValueForm
    keeps_residual: ClassVar[bool]
    """True if the coder must know which rows it encodes, and overwrites them."""
    flags: slice | None = None
    """The elements of a dense gradient that say which of its parts are present; None if it has no parts."""

    @abstractmethod
    def size_bytes(self, rows: int, columns: int) -> int:
        """Returns the size of the encoded values."""

    @abstractmethod
    def encode(self, values: Tensor, flags: Tensor | None = None) -> Tensor:
        """Encodes all rows in order: uint8 ``[size_bytes]``, perhaps on the memory of ``values``.

        Args:
            values: ``[rows, columns]`` on the coder's device, contiguous; may be overwritten.
            flags: the elements :attr:`flags` on the CPU. None: ``values`` are on the CPU.
        """

    @abstractmethod
    def encode_rows(self, values: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        """Encodes some rows, as :meth:`encode` does.

        Args:
            values: on the CPU.
            positions: of the rows, unique, int64 ``[n]``.
        """

    @abstractmethod
    def encode_copy(self, tensor: Tensor) -> memoryview:
        """Encodes a small strided tensor into memory of its own."""

    @abstractmethod
    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        """Decodes values of ``shape`` ``[rows]`` or ``[rows, columns]``; perhaps on the memory of ``data``.

        Unchanged values are on the CPU, others on the coder's device.

        Raises:
            ProtocolError: ``data`` has another size than ``shape`` needs.
        """

    @abstractmethod
    def decode_into(self, data: memoryview, out: Tensor) -> None:
        """Decodes values into ``out``, which is contiguous. Raises as :meth:`decode`.

        They may go to a device, on its current stream; ``data`` is read before this returns.
        """


class Unchanged(ValueCoder):
    """Sends values as they are.

    Args:
        dtype: of the values.
    """

    form = "same"
    keeps_residual = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def size_bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self._dtype.itemsize

    def encode(self, values: Tensor, flags: Tensor | None = None) -> Tensor:
        return flat(values).view(torch.uint8)

    def encode_rows(self, values: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        return self.encode(values)

    def encode_copy(self, tensor: Tensor) -> memoryview:
        return memoryview(copied_bytes(tensor))

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        return tensor_from_bytes(data, self._dtype, shape)

    def decode_into(self, data: memoryview, out: Tensor) -> None:
        out.copy_(self.decode(data, tuple(out.shape)), non_blocking=True)


UNCHANGED: Final = {dtype: Unchanged(dtype) for dtype in DTYPES.values()}
"""By dtype; tensors share them, because they have no state."""


class Quantizer(ValueCoder):
    """Quantizes the values of one tensor's gradient, with error feedback.

    Args:
        codec: of the values.
        residual: float32 ``[rows, columns]``, the rounding errors of earlier pushes; updated by each push.
            None: nothing is added to the values, and the errors go to ``rounding``.
        empty: makes the memory for encoded and decoded values, on the device of the residual.
        parts: of a dense gradient. The residual of an absent part stays as it is.
        rounding: None for a gradient that is thrown away: its errors are lost.
    """

    keeps_residual = True

    def __init__(
        self,
        codec: ValueCodec,
        residual: Tensor | None,
        empty: Empty,
        parts: Parts | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.form = codec.form
        self.flags = None if parts is None else parts.flags
        self._codec = codec
        self._residual = residual
        self._empty = empty
        self._rounding = rounding
        self._ranges = () if parts is None else parts.ranges

    def size_bytes(self, rows: int, columns: int) -> int:
        return self._codec.size_bytes(rows, columns)

    def encode(self, values: Tensor, flags: Tensor | None = None) -> Tensor:
        residual = self._residual
        if residual is None:
            return self._encode_apart(values)
        absent: list[tuple[int, int]] = []
        if flags is None and self.flags is not None:
            flags = values[self.flags, 0]
        if flags is not None and not flags.all():
            absent = [part for part, flag in zip(self._ranges, flags.tolist(), strict=True) if not flag]
        values += residual
        for begin, end in absent:
            values[begin:end] = 0
        data, error = self._round(values)
        for begin, end in absent:
            error[begin:end] = residual[begin:end]
        if self.flags is not None:
            # With hierarchical reduction a flag counts ranks; its error would make an absent part present.
            error[self.flags] = 0
        residual.copy_(error)
        return data

    def encode_rows(self, values: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        if self._residual is None:
            if self._rounding is not None:
                self._rounding.rows = layout.rows(positions)
            return self._encode_apart(values)
        rows = layout.rows(positions)
        values += torch.index_select(self._residual, 0, rows)
        data, error = self._round(values)
        put_rows(error, rows.numpy(), self._residual)
        return data

    def _encode_apart(self, values: Tensor) -> Tensor:
        """Encodes values that have no residual."""
        data, error = self._round(values)
        if self._rounding is not None:
            self._rounding.errors = error
        return data

    def _round(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the encoded values and their rounding errors."""
        data = self._empty((self._codec.size_bytes(*values.shape),), torch.uint8)
        self._codec.encode(values, data)
        decoded = self._empty(tuple(values.shape), torch.float32)
        self._codec.dequantize(data, decoded)
        # NaN and infinite errors are dropped: they would come back in every later step.
        return data, torch.sub(values, decoded, out=decoded).nan_to_num_(0, 0, 0)

    def encode_copy(self, tensor: Tensor) -> memoryview:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return tensor_bytes(self.encode(copy.view(tensor.numel(), 1)))

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        out = self._empty(shape, torch.float32)
        self.decode_into(data, out)
        return out

    def decode_into(self, data: memoryview, out: Tensor) -> None:
        self._codec.decode(data, out if out.dim() == 2 else out[:, None])
