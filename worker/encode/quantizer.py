"""Value coding of pushes: float32 gradients quantized with error feedback, all other values as they are.

Error feedback: what a rank has rounded off a row is added to that row when it is pushed next, so that nothing
is lost for good (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al.,
https://arxiv.org/abs/1901.09847). The residual is kept by row: a ring that changes moves rows, and what is
pushed again are the same bytes. A joining worker has rounded nothing off yet.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import ValueCodec, ValueForm
from zenps.errors import TensorError
from zenps.kernels.cpu import put_rows
from zenps.partition.layout import Layout
from zenps.wire.tensors import copied_bytes, tensor_bytes, tensor_from_bytes


class ValueCoder(ABC):
    """How the values of one tensor become bytes, and back.

    Attributes:
        form: for the ``values`` of a push.
    """

    form: ValueForm
    keeps_residual: ClassVar[bool]
    """Whether it has to know which rows it encodes."""

    @abstractmethod
    def size_bytes(self, rows: int, columns: int) -> int:
        """What so many values take on the wire."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """What is pushed of all rows in order: uint8 ``[size_bytes]``, perhaps on the memory of ``values``.

        Args:
            values: ``[rows, columns]`` on the CPU, contiguous; may be overwritten.
        """

    @abstractmethod
    def encode_rows(self, values: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        """What is pushed of some rows, as :meth:`encode`.

        Args:
            positions: of the rows, unique, int64 ``[n]``.
        """

    @abstractmethod
    def encode_copy(self, tensor: Tensor) -> memoryview:
        """What is pushed of a small strided tensor, on memory of its own."""

    @abstractmethod
    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        """What was pulled, of ``shape`` ``[rows]`` or ``[rows, columns]`` on the CPU; perhaps on ``data``.

        Raises:
            ProtocolError: ``data`` has another size than ``shape`` needs.
        """

    @abstractmethod
    def decode_into(self, data: memoryview, out: Tensor) -> None:
        """As :meth:`decode`, into ``out``, contiguous."""


class Unchanged(ValueCoder):
    """Values travel as they are.

    Args:
        dtype: of the values.
    """

    form = "same"
    keeps_residual = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def size_bytes(self, rows: int, columns: int) -> int:
        return rows * columns * self._dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.reshape(-1).view(torch.uint8)

    def encode_rows(self, values: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        return self.encode(values)

    def encode_copy(self, tensor: Tensor) -> memoryview:
        return memoryview(copied_bytes(tensor))

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        return tensor_from_bytes(data, self._dtype, shape)

    def decode_into(self, data: memoryview, out: Tensor) -> None:
        out.copy_(self.decode(data, tuple(out.shape)))


class Quantizer(ValueCoder):
    """Values of one tensor's gradient travel quantized, with error feedback.

    Args:
        codec: of the values.
        residual: float32 ``[rows, columns]``, what earlier pushes have rounded off.
        pool: for what is pushed and pulled.
    """

    keeps_residual = True

    def __init__(self, codec: ValueCodec, residual: Tensor, pool: BufferPool) -> None:
        self.form = codec.form
        self._codec = codec
        self._residual = residual
        self._pool = pool

    def size_bytes(self, rows: int, columns: int) -> int:
        return self._codec.size_bytes(rows, columns)

    def encode(self, values: Tensor) -> Tensor:
        values += self._residual
        data, error = self._round(values)
        self._residual.copy_(error)
        return data

    def encode_rows(self, values: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        rows = layout.rows(positions)
        values += torch.index_select(self._residual, 0, rows)
        data, error = self._round(values)
        put_rows(error, rows.numpy(), self._residual)
        return data

    def _round(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is pushed, and what rounding has taken from ``values``."""
        data = self._pool.empty((self._codec.size_bytes(*values.shape),), torch.uint8)
        self._codec.encode(values, data)
        arrives = self.decode(data.numpy().data, tuple(values.shape))
        # Of a NaN, or of what became infinite, nothing is kept: it would come back in every later step.
        return data, torch.sub(values, arrives, out=arrives).nan_to_num_(0, 0, 0)

    def encode_copy(self, tensor: Tensor) -> memoryview:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return tensor_bytes(self.encode(copy.view(tensor.numel(), 1)))

    def decode(self, data: memoryview, shape: tuple[int, ...]) -> Tensor:
        out = self._pool.empty(shape, torch.float32)
        self.decode_into(data, out)
        return out

    def decode_into(self, data: memoryview, out: Tensor) -> None:
        self._codec.decode(data, out if out.dim() == 2 else out[:, None])


class Residuals:
    """The residuals of all tensors. Thread-safe; each is for its tensor's one round in flight.

    A residual is as large as the tensor, in float32. To keep only the rows that were pushed saves little for
    long, and takes a search in each step.
    """

    def __init__(self) -> None:
        self._tables: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def of(self, name: str, rows: int, columns: int) -> Tensor:
        """The residual of the tensor ``name``, float32 ``[rows, columns]``; zeros if it had another shape.

        Raises:
            TensorError: there is no memory for it.
        """
        with self._lock:
            table = self._tables.get(name)
            if table is None or table.shape != (rows, columns):
                try:
                    # NumPy's zeros are calloc's: torch would write them first.
                    zeros = np.zeros((rows, columns), np.float32)
                except MemoryError:
                    raise TensorError(
                        f"tensor {name!r}: no memory for what rounding keeps back of {rows} × {columns} "
                        "values; set sync.values to same, on all workers"
                    ) from None
                table = self._tables[name] = torch.from_numpy(zeros)
            return table
