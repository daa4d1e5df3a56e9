"""Gradients that travel narrower, and what rounding has kept back of them: error feedback.

What a rank has rounded off a row is added to that row when it is pushed next, so that nothing is lost for
good (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al.,
https://arxiv.org/abs/1901.09847). It is kept by row: a ring that changes moves rows, and what is pushed again
are the same bytes. A worker that comes to a running job has rounded nothing off yet.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import ValueCodec, ValueForm
from zenps.errors import TensorError
from zenps.kernels.cpu import put_rows


class Quantizer:
    """How one tensor's gradient becomes the values frames, and back.

    Args:
        codec: of the values.
        residual: float32 ``[rows, columns]``, what earlier pushes have rounded off.
        pool: for what is pushed.
    """

    def __init__(self, codec: ValueCodec, residual: Tensor, pool: BufferPool) -> None:
        self._codec = codec
        self._residual = residual
        self._pool = pool

    @property
    def form(self) -> ValueForm:
        """For the ``values`` of a push."""
        return self._codec.form

    def size_bytes(self, rows: int, columns: int) -> int:
        """What so many values take on the wire."""
        return self._codec.size_bytes(rows, columns)

    def quantize(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """What is pushed: uint8 ``[size_bytes]``.

        Args:
            values: float32 ``[n, columns]`` on the CPU, contiguous; overwritten.
            rows: unique, int64 ``[n]``; None for all rows in order.
        """
        residual = self._residual if rows is None else torch.index_select(self._residual, 0, rows)
        values += residual
        data = self._pool.empty((self._codec.size_bytes(*values.shape),), torch.uint8)
        self._codec.encode(values, data)
        arrives = self._pool.empty(tuple(values.shape), torch.float32)
        self.dequantize(data.numpy().data, arrives)
        # Of a NaN, or of what became infinite, nothing is kept: it would come back in every later step.
        torch.sub(values, arrives, out=arrives).nan_to_num_(0, 0, 0)
        if rows is None:
            self._residual.copy_(arrives)
        else:
            put_rows(arrives, rows.numpy(), self._residual)
        return data

    def dequantized(self, data: memoryview, shape: tuple[int, int]) -> Tensor:
        """What was pulled: float32 of ``shape``, on the CPU. Errors are those of :meth:`dequantize`."""
        out = self._pool.empty(shape, torch.float32)
        self.dequantize(data, out)
        return out

    def dequantize(self, data: memoryview, out: Tensor) -> None:
        """What was pulled, into float32 ``[rows, columns]`` on the CPU.

        Raises:
            ProtocolError: ``data`` has another size than ``out`` needs.
        """
        self._codec.decode(data, out)


class Residuals:
    """What has been rounded off each tensor. Thread-safe; a table is for the tensor's one round in flight.

    It is as large as the tensor, in float32. To keep only the rows that were pushed saves little for long,
    and takes a search in each step.
    """

    def __init__(self) -> None:
        self._tables: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def of(self, name: str, rows: int, columns: int) -> Tensor:
        """The table of the tensor ``name``, float32 ``[rows, columns]``; zeros if it had another shape.

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
