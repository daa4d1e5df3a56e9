"""What a transfer is: one tensor's way to the servers and back, in one round."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from zenps.codecs.base import CodecName
from zenps.errors import TensorError
from zenps.kernels.base import ACCUMULATE
from zenps.wire.messages import MAX_COLUMNS, Result

__all__ = ["Part", "Transfer", "check_tensor", "table_shape"]


# uint8 is for broadcasts, which carry any dtype as bytes.
_SUPPORTED = tuple(dtype for dtype in ACCUMULATE if dtype != torch.uint8)


class Part(Struct, frozen=True):
    """What goes to one server for one chunk: the variable fields of a push, and its frames."""

    server: int
    chunk: int
    span: int
    rows: int
    codec: CodecName | Literal["none"]
    frames: tuple[memoryview, memoryview]


class Transfer(ABC):
    """One tensor in one round. ``parts`` are pushed; each is answered by one ``absorb``.

    Where the tensor lies on a GPU, ``parts`` are there only once :meth:`prepared`.
    """

    kind: Literal["dense", "sparse"]
    shape: torch.Size
    dtype: torch.dtype
    columns: int
    chunks: int
    parts: Sequence[Part]
    rows_given: int
    """Rows before compaction."""
    hashed_rows: NDArray[np.int64] = np.zeros(4, dtype=np.int64)
    """Rows that a hash compaction placed at the first try, by another hash, and serially; that overflowed."""

    @property
    def pushed_bytes(self) -> int:
        """Positions and values of all parts."""
        return sum([frame.nbytes for part in self.parts for frame in part.frames])

    @property
    def dense_bytes(self) -> int:
        """What pushing and pulling the tensor whole would move."""
        return 2 * self.shape.numel() * self.dtype.itemsize

    def prepared(self) -> bool:
        """Whether ``parts`` are there; does what can be done towards it without waiting.

        Raises:
            TensorError: the tensor proved to have rows outside its shape.
        """
        return True

    def prepare(self) -> None:
        """Waits until :meth:`prepared`, whose errors it raises.

        Raises:
            DeadlineError: the device took too long.
        """
        assert self.prepared()

    @abstractmethod
    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        """Takes in the answer to one part.

        Raises:
            ProtocolError: the frames are not what ``result`` announces, or no position of ours.
        """

    @abstractmethod
    def finish(self) -> Tensor:
        """The result, once every part was absorbed."""


def check_tensor(tensor: Tensor, average: bool) -> None:
    """Refuses what cannot be synchronised, before anything is sent.

    Raises:
        TensorError: not a tensor, or an unsupported device, layout or dtype; an average of integers.
    """
    if not isinstance(tensor, Tensor):
        raise TensorError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TensorError(f"device {tensor.device}: expected cpu or cuda; move it with .cpu()")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise TensorError(f"layout {tensor.layout}: expected strided or sparse COO; use .to_sparse_coo()")
    if tensor.is_sparse and table_shape(tensor)[1] > MAX_COLUMNS:
        raise TensorError(f"rows of {table_shape(tensor)[1]} elements: expected at most {MAX_COLUMNS}")
    if tensor.dtype not in _SUPPORTED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SUPPORTED)
        raise TensorError(f"dtype {tensor.dtype}: expected one of {names}")
    if average and not tensor.dtype.is_floating_point:
        raise TensorError(f"dtype {tensor.dtype} cannot be averaged exactly; pass average=False")


def table_shape(tensor: Tensor) -> tuple[int, int]:
    """A sparse tensor as a table: (rows, columns), all sparse dimensions flattened, then all dense."""
    sparse_dim = tensor.sparse_dim()
    return math.prod(tensor.shape[:sparse_dim]), math.prod(tensor.shape[sparse_dim:])
