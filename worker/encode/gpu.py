"""Sparse tensors on a GPU: compacted and encoded there; pulled rows are decoded there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.base import Codec
from zenps.codecs.coo import item_dtype
from zenps.codecs.registry import CODECS, choose
from zenps.config.settings import CudaConfig
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.gpu.bitmap_codec import (
    ALIGNMENT,
    BitmapChunk,
    decode_bitmap,
    decode_coo,
    encode_bitmaps,
    encode_coo,
    place_bitmaps,
)
from zenps.kernels.gpu.bitmap_compact import bitmap_compact, bitmap_scratch_words
from zenps.kernels.gpu.launcher import to_device
from zenps.kernels.gpu.place import DeviceLayout, place_rows
from zenps.kernels.gpu.rows import GroupedRows, Header
from zenps.kernels.gpu.scatter import merge
from zenps.kernels.gpu.sort_compact import sort_compact, sort_scratch_words
from zenps.partition.layout import Layout
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes

from ..core.request import table_shape
from ..core.transfer import (
    Answer,
    ChunkRange,
    EncodedChunk,
    EncodedTensor,
    OneRound,
    Sharding,
)
from .accelerator import Accelerator, Event
from .quantizer import ValueCoder
from .sparse import as_sparse, check_sparse, fragments_of, row_numbers
from .staged import Staged


class StagedSparse(Staged, OneRound):
    """A sparse COO tensor on a GPU; the bytes on the wire are those of ``SparseTransfer``.

    The preparation waits for two events. First, kernels find the positions and write their number into memory
    of the host, which then knows all sizes. Second, rows are summed and positions encoded in one piece of
    memory, and one copy brings it to the host. Frames are slices of that copy.

    Args:
        tensor: coalesced or not, on the accelerator's device. It must not change before the round has ended.
        sharding, codec, expected_rows: as for ``SparseTransfer``.
        settings: how rows are compacted.
        device_layout: returns a layout in the form that kernels read.
        coder: of the values. It quantizes on the host, where residuals are kept: on the device they would
            take as much memory as the table.
        pool: pinned memory for what is pushed; by default the accelerator's.
    """

    def __init__(
        self,
        tensor: Tensor,
        sharding: Sharding,
        codec: str,
        settings: CudaConfig,
        device_layout: Callable[[Layout], DeviceLayout],
        accelerator: Accelerator,
        coder: ValueCoder,
        expected_rows: int = 0,
        pool: BufferPool | None = None,
    ) -> None:
        self._pool = pool
        self.rows_given = tensor._nnz()
        self._coder = coder
        self._sparse_dim = tensor.sparse_dim()
        self._indices, self._values = tensor._indices(), tensor._values().detach()
        self._codec, self._settings, self._device_layout_of = codec, settings, device_layout
        self._pulled: list[tuple[Tensor, Tensor]] = []
        self._faults: list[Tensor] = []
        _, self._columns = table_shape(tensor)
        self.restart(
            EncodedTensor(
                kind="sparse",
                shape=tensor.shape,
                dtype=tensor.dtype,
                columns=self._columns,
                expected_rows=expected_rows,
                sharding=sharding,
                chunks=(),
                values=coder.form,
                row_bytes=coder.size_bytes(1, self._columns),
            )
        )
        super().__init__(accelerator)

    def restart(self, encoded: EncodedTensor) -> None:
        self._layout = encoded.sharding.row_layout
        self._device_layout = self._device_layout_of(self._layout)
        self.encoded, self._ranges = encoded, encoded.sharding.ranges()
        self._pulled.clear()
        self._faults.clear()

    # ── push ────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self) -> Iterator[Event]:
        gpu, ranges = self._accelerator, self._ranges.values()
        gpu.pushing.follow(self._indices, self._values)
        with gpu.pushing.current():
            bounds = [each.start for each in ranges] + [each.stop for each in ranges]
            starts, stops = torch.split(to_device(bounds, gpu.device), len(ranges))
            rows, header = self._compact(stops)
        yield gpu.pushing.mark()

        if int(header.outside):
            raise TensorError(f"indices outside the tensor's shape {tuple(self.encoded.shape)}; check them")
        runs = self._runs(header.offsets.tolist())
        with gpu.pushing.current():
            payload, places, bitmaps = self._payload(rows, runs, starts)
            copy = gpu.to_host(payload, self._pool)
        yield gpu.pushing.mark()

        del self._indices, self._values
        values, numbers, bits = (copy[place] for place in places)
        values = values.view(self.encoded.dtype).view(runs[-1].end, self._columns)
        numbers = numbers.view(self._number_dtype())
        data = tensor_bytes(self._coded(runs, numbers, values))
        chunks = [
            self._chunk(run, numbers, bits[bitmaps[run]] if run in bitmaps else None, data) for run in runs
        ]
        self.encoded = structs.replace(self.encoded, chunks=chunks)

    def _payload(
        self, rows: GroupedRows, runs: Sequence[_Run], starts: Tensor
    ) -> tuple[Tensor, Sequence[slice], Mapping[_Run, slice]]:
        """Sums the rows and encodes their positions.

        Returns:
            uint8 on the device; the slices that hold the values, the positions relative to chunks (of all
            rows, or of none if bitmaps suffice) and the bitmaps; and each run's slice of the bitmaps.
        """
        launcher, count = self._accelerator.launcher, runs[-1].end
        in_bitmaps = [run for run in runs if run.codec.name == "bitmap"]
        chunks = [BitmapChunk(run.begin, run.end, run.where.start, run.where.span) for run in in_bitmaps]
        numbered = count if len(in_bitmaps) < len(runs) or self._coder.keeps_residual else 0
        bitmaps, bitmaps_bytes = place_bitmaps(chunks)
        value_bytes = count * self._columns * self.encoded.dtype.itemsize
        number_dtype = self._number_dtype()
        places, size = _aligned([value_bytes, numbered * number_dtype.itemsize, bitmaps_bytes])
        payload = torch.empty(size, dtype=torch.uint8, device=self._accelerator.device)
        values, numbers, bits = (payload[place] for place in places)
        rows.sum_into(values.view(self.encoded.dtype).view(count, self._columns))
        encode_coo(launcher, rows.positions[:numbered], starts, numbers.view(number_dtype))
        encode_bitmaps(launcher, rows.positions, chunks, bits)
        return payload, places, dict(zip(in_bitmaps, bitmaps, strict=True))

    def _compact(self, stops: Tensor) -> tuple[GroupedRows, Header]:
        """Compacts by sorting or by bitmap, by as few launches as possible.

        Returns:
            The rows, and a header that the host can read at the next event: its offsets are the numbers of
            rows up to each of ``stops``.
        """
        gpu, size = self._accelerator, self._device_layout.size
        in_bitmap = self._settings.compaction == "bitmap"
        words = bitmap_scratch_words(size) if in_bitmap else sort_scratch_words(self.rows_given, size)
        report = gpu.pinned.empty((1 + len(stops),), torch.int64)
        report.numpy()[:] = 0
        header = Header(stops, report, torch.empty(words, dtype=torch.int64, device=gpu.device))
        numbers = row_numbers(self._indices, tuple(self.encoded.shape[: self._sparse_dim]))
        positions = place_rows(gpu.launcher, self._device_layout, numbers, header.scratch)
        values = self._values.reshape(len(numbers), self._columns).contiguous()
        compact = bitmap_compact if in_bitmap else sort_compact
        return compact(gpu.launcher, positions, values, size, header), header

    def _number_dtype(self) -> torch.dtype:
        """Returns the dtype of positions relative to their chunk: int32 if that is enough for all chunks."""
        widest = max(each.span for each in self._ranges.values())
        return torch.int32 if item_dtype(widest).itemsize == 4 else torch.int64

    def _runs(self, ends: Sequence[int]) -> list[_Run]:
        """Returns the rows of each fragment of each chunk, given the number of rows up to a chunk's end."""
        begins, row_bytes = (0, *ends[:-1]), self.encoded.row_bytes
        codec = self._codec if row_bytes else "coo"
        runs = []
        for each, begin, end in zip(self._ranges.values(), begins, ends, strict=True):
            cuts = fragments_of(begin, end, self.encoded.sharding)
            for fragment, (first, stop) in enumerate(cuts):
                chosen = choose(codec, stop - first, each.span, row_bytes)
                runs.append(_Run(each, first, stop, chosen, fragment, len(cuts)))
        return runs

    def _coded(self, runs: Sequence[_Run], numbers: Tensor, values: Tensor) -> Tensor:
        if not self._coder.keeps_residual:
            return self._coder.encode(values)
        positions = torch.cat([numbers[run.begin : run.end].long() + run.where.start for run in runs])
        return self._coder.encode_rows(values, self._layout, positions)

    def _chunk(self, run: _Run, numbers: Tensor, bitmap: Tensor | None, values: memoryview) -> EncodedChunk:
        where, row_bytes = run.where, self.encoded.row_bytes
        if bitmap is None:
            encoded = run.codec.encode(numbers[run.begin : run.end].numpy(), where.span).data
        else:
            encoded = tensor_bytes(bitmap)
        frames = (encoded, values[run.begin * row_bytes : run.end * row_bytes])
        chunk = where.server, where.chunk, where.span
        rows, codec = run.end - run.begin, run.codec.name
        return EncodedChunk(*chunk, rows, codec, frames, run.fragment, run.fragments)

    # ── pull ────────────────────────────────────────────────────────────────────────────────────

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        where = self._ranges[answer.server, answer.result.chunk]
        for result, frames in ((answer.result, answer.frames), *answer.others):
            self._absorb(result, frames, where)
        return ()

    def _absorb(self, result: Result, frames: Sequence[memoryview], where: ChunkRange) -> None:
        check_sparse(result, frames, where)
        start, span, count = where.start, where.span, result.rows
        codec, positions = CODECS[result.codec], frames[0]
        if result.codec not in ("coo", "bitmap"):  # no kernel decodes the others
            codec = CODECS["coo"]
            positions = codec.encode(CODECS[result.codec].decode(positions, count, span), span).data
        expected = (codec.max_bytes(count, span), count * self.encoded.row_bytes)
        got = (positions.nbytes, frames[1].nbytes)
        if got != expected:
            raise ProtocolError("payload", f"frames of {got} bytes, expected {expected} for {count} rows")
        gpu = self._accelerator
        decoded = tensor_bytes(self._coder.decode(frames[1], (count, self._columns)))
        with gpu.pulling.current():
            encoded, values = gpu.to_device(positions), gpu.to_device(decoded)
            if codec.name == "bitmap":
                rows, fault = decode_bitmap(gpu.launcher, self._device_layout, encoded, count, start, span)
            else:
                item = torch.int32 if item_dtype(span).itemsize == 4 else torch.int64
                rows, fault = decode_coo(gpu.launcher, self._device_layout, encoded.view(item), start, span)
        self._pulled.append((rows, values.view(self.encoded.dtype).view(count, self._columns)))
        self._faults.append(fault)

    def finish(self) -> Tensor:
        """Returns sparse COO, coalesced, on the device, with every row that any rank pushed."""
        gpu = self._accelerator
        with gpu.pulling.current():
            rows, values = map(_joined, zip(*self._pulled, strict=True))
            rows, values = merge(gpu.launcher, rows, values, self._layout.rows_total)
            result = as_sparse(rows, values, self.encoded.shape, self._sparse_dim)
            faults = gpu.to_host(_joined(self._faults))
        # Nobody uses the result before the positions, which came from the network, are checked.
        gpu.wait_for(gpu.pulling.mark())
        self._pulled.clear()
        if faults.any():
            raise ProtocolError("payload", "positions that do not increase, or that no row has")
        gpu.pulling.hand_over(result._indices(), result._values())
        return result


def _aligned(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Where parts of these sizes lie one after another, each aligned for kernels, and the size of all."""
    *begins, size = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    return [slice(begin, begin + part) for begin, part in zip(begins, sizes, strict=True)], size


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates; a single part, as from one server, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _Run(NamedTuple):
    """The compacted rows from ``begin`` up to ``end``: a fragment of the chunk ``where``."""

    where: ChunkRange
    begin: int
    end: int
    codec: Codec
    fragment: int
    fragments: int
