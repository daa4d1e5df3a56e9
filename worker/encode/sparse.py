"""Encoding of sparse tensors: compacted rows out, the coalesced union back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.codecs.registry import CODECS, choose
from zenps.errors import ProtocolError
from zenps.kernels.base import Kernels, Rows
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes

from ..core.encoded import ChunkRange, EncodedChunk, EncodedTensor, Sharding
from ..core.statistics import Progress, Report
from ..core.transfer import Answer, OneRound, sparse_report
from .quantizer import ValueCoder
from .tables import as_sparse, as_table


def encode_rows(
    sharding: Sharding, positions: NDArray[np.int64], values: memoryview, row_bytes: int, codec: str
) -> list[EncodedChunk]:
    """The chunks of a sparse tensor.

    Args:
        positions: ``[n]``, strictly increasing.
        values: the rows at these positions, ``row_bytes`` each. The chunks' frames are slices of it.
        codec: the setting ``sync.codec``.
    """
    ranges = sharding.ranges().values()
    ends = np.searchsorted(positions, [each.stop for each in ranges]).tolist()
    chunks, begin = [], 0
    for each, end in zip(ranges, ends, strict=True):
        inside = positions[begin:end] - each.start
        chosen = choose(codec, end - begin, each.span, row_bytes, inside)
        encoded = chosen.encode(inside, each.span)
        frames = (encoded.data, values[begin * row_bytes : end * row_bytes])
        chunks.append(EncodedChunk(each.server, each.chunk, each.span, end - begin, chosen.name, frames))
        begin = end
    return chunks


def check_sparse(result: Result, frames: Sequence[memoryview], chunk: ChunkRange) -> None:
    """Refuses a result that cannot be of ``chunk``.

    Raises:
        ProtocolError: it has too many rows, or no positions.
    """
    if len(frames) != 2 or result.codec not in CODECS:
        raise ProtocolError("payload", f"a sparse result with codec {result.codec!r}")
    if result.rows > chunk.span:
        raise ProtocolError("payload", f"{result.rows} rows in a chunk of {chunk.span}")


class SparseTransfer(OneRound):
    """A sparse COO tensor: compacted rows out, the coalesced union back.

    Args:
        tensor: coalesced or not, on the CPU.
        sharding: how its rows are distributed.
        codec: the setting ``sync.codec``.
        coder: of its values.
        expected_rows: what ``sharding`` was made by.

    Raises:
        TensorError: indices lie outside the tensor.
    """

    def __init__(
        self,
        tensor: Tensor,
        sharding: Sharding,
        codec: str,
        kernels: Kernels,
        coder: ValueCoder,
        expected_rows: int = 0,
    ) -> None:
        self._kernels = kernels
        self._coder = coder
        self._sparse_dim = tensor.sparse_dim()
        self._pulled: list[Rows] = []

        layout = sharding.layout
        assert layout is not None
        rows, values = as_table(tensor)
        self.rows_given, columns = values.shape
        positions, values = kernels.compact(layout.positions(rows), values)
        row_bytes = coder.size_bytes(1, columns)
        data = coder.encode_rows(values, layout, positions)
        chunks = encode_rows(sharding, positions.numpy(), tensor_bytes(data), row_bytes, codec)
        self.restart(
            EncodedTensor(
                kind="sparse",
                shape=tensor.shape,
                dtype=tensor.dtype,
                columns=columns,
                expected_rows=expected_rows,
                sharding=sharding,
                chunks=chunks,
                values=coder.form,
                row_bytes=row_bytes,
            )
        )

    def restart(self, encoded: EncodedTensor) -> None:
        assert encoded.sharding.layout is not None
        self.encoded, self._layout = encoded, encoded.sharding.layout
        self._ranges = encoded.sharding.ranges()
        self._pulled.clear()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        result, frames = answer.result, answer.frames
        chunk = self._ranges[answer.server, result.chunk]
        check_sparse(result, frames, chunk)
        positions = torch.from_numpy(CODECS[result.codec].decode(frames[0], result.rows, chunk.span))
        values = self._coder.decode(frames[1], (result.rows, self.encoded.columns))
        self._pulled.append((self._layout.rows(positions.add_(chunk.start)), values))
        return ()

    def finish(self) -> Tensor:
        """Sparse COO, coalesced, with every row that any rank pushed."""
        rows, values = self._kernels.scatter(self._pulled)
        self._pulled.clear()
        return as_sparse(rows, values, self.encoded.shape, self._sparse_dim)

    def report(self, progress: Progress) -> Report:
        return sparse_report(self, progress)
