"""What a transfer is: one tensor's way to the servers and back, in one round; and how a ring cuts it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from zenps.codecs.base import CodecName, ValueForm
from zenps.errors import TensorError
from zenps.kernels.base import ACCUMULATE
from zenps.partition.layout import Layout
from zenps.wire.messages import MAX_COLUMNS, Kind, Result

# uint8 is for broadcasts, which carry any dtype as bytes.
_SUPPORTED = tuple(dtype for dtype in ACCUMULATE if dtype != torch.uint8)


class ChunkRange(NamedTuple):
    """One server's chunk: the positions from ``start`` up to ``stop``."""

    server: int
    chunk: int
    start: int
    stop: int

    @property
    def span(self) -> int:
        """How many positions it has."""
        return self.stop - self.start


class Sharding(NamedTuple):
    """How a ring cuts a tensor.

    Attributes:
        layout: of its rows or elements; None where the tensor goes whole to ``home``.
        chunks: pieces of each server's range, the same number on all ranks.
        home: the server whose chunk 0 is pushed even if it is empty: there ranks meet that disagree
            about the shape, and so about which servers have any of it.
        epoch: the ring's. A push names it, so that no server takes it for a part of another cut.
        slot: of a stream: where it lies, under any ring.
    """

    layout: Layout | None
    chunks: int
    home: int
    epoch: int = 0
    slot: int = 0

    def ranges(self) -> dict[tuple[int, int], ChunkRange]:
        """What is pushed, by server and chunk. In this order they cover all positions without a gap."""
        assert self.layout is not None
        ranges = {}
        for server, cuts in zip(self.layout.servers, self.layout.cuts(self.chunks), strict=True):
            for chunk, (start, stop) in enumerate(pairwise(cuts)):
                if start < stop or (server, chunk) == (self.home, 0):
                    ranges[server, chunk] = ChunkRange(server, chunk, start, stop)
        return ranges


class EncodedChunk(Struct, frozen=True):
    """What goes to one server for one chunk: the variable fields of a push, and its frames."""

    server: int
    chunk: int
    span: int
    rows: int
    codec: CodecName | Literal["none"]
    frames: tuple[memoryview, memoryview]


class EncodedTensor(Struct, frozen=True):
    """What a rank pushes of one tensor in one round: enough to push it again under another ring.

    It keeps alive the frames and the layout; neither the tensor nor any result.
    """

    kind: Kind
    shape: torch.Size
    """Of the whole tensor."""
    dtype: torch.dtype
    columns: int
    """Elements of a row, or of a block; 1 of a dense tensor."""
    expected_rows: int
    """How many rows were pulled last time, by which a sparse tensor is cut; else 0."""
    cut: Sharding
    parts: Sequence[EncodedChunk]
    values: ValueForm = "same"
    """In which form the values are."""
    row_bytes: int = 0
    """What the values of a row take; of a dense tensor, those of a granule. Not used where it goes whole."""


class Transfer(ABC):
    """One tensor in one round. ``parts`` are pushed; each is answered by one ``absorb``.

    Where the tensor lies on a GPU, ``sent``, and all that is read from it, is there only once
    :meth:`prepared`.
    """

    sent: EncodedTensor
    """What is pushed under the present ring."""
    rows_given: int
    """Rows before compaction."""
    hashed_rows: NDArray[np.int64] = np.zeros(4, dtype=np.int64)
    """Rows that a hash compaction placed at the first try, by another hash, and serially; that overflowed."""

    @property
    def kind(self) -> Kind:
        return self.sent.kind

    @property
    def shape(self) -> torch.Size:
        return self.sent.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.sent.dtype

    @property
    def columns(self) -> int:
        return self.sent.columns

    @property
    def chunks(self) -> int:
        return self.sent.cut.chunks

    @property
    def parts(self) -> Sequence[EncodedChunk]:
        return self.sent.parts

    @property
    def pushed_bytes(self) -> int:
        """Positions and values of all parts."""
        return sum([frame.nbytes for part in self.parts for frame in part.frames])

    @property
    def dense_bytes(self) -> int:
        """What pushing and pulling the tensor whole would move."""
        return 2 * self.shape.numel() * self.dtype.itemsize

    is_staged: ClassVar[bool] = False
    """Whether ``parts`` are there only once :meth:`prepared`, for a device has to get so far."""

    def prepared(self) -> bool:
        """Whether ``parts`` are there; does what can be done towards it without waiting.

        Raises:
            TensorError: the tensor proved to have rows outside its shape, or its device failed.
        """
        return True

    @abstractmethod
    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        """Takes in the answer to one part.

        Raises:
            ProtocolError: the frames are not what ``result`` announces, or no position of ours.
        """

    @abstractmethod
    def restart(self, sent: EncodedTensor) -> None:
        """The ring has changed before all answers were there: forgets those that were absorbed.

        Only once :meth:`prepared`, and not after :meth:`finish`.

        Args:
            sent: what :attr:`sent` was, cut for the new ring. Answers from now on are to its parts.

        Raises:
            ConfigError: a device cannot compute the new layout.
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
