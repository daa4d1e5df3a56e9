"""Tensors on a GPU: compacted there, through pinned memory to the servers, and back.

What such a transfer pushes is known only when the device has got so far, and meanwhile the host does
something else. So its preparation is written as an iterator of events: each is what to wait for before it
goes on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from zenps.codecs.base import Codec
from zenps.codecs.coo import item_dtype
from zenps.codecs.registry import CODECS, choose
from zenps.config.settings import CudaConfig
from zenps.errors import ProtocolError, TensorError, ZenPSError
from zenps.kernels.gpu.bitmap_codec import decode_bitmap, decode_coo, encode_bitmap, encode_coo
from zenps.kernels.gpu.bitmap_compact import bitmap_compact
from zenps.kernels.gpu.hash_compact import HashMemory, hash_compact
from zenps.kernels.gpu.place import DeviceLayout, find_cuts, place_rows
from zenps.kernels.gpu.rows import DeviceRows
from zenps.kernels.gpu.scatter import merge
from zenps.kernels.gpu.sort_compact import sort_compact
from zenps.partition.layout import Layout
from zenps.wire.messages import Result
from zenps.wire.tensors import tensor_bytes

from .accelerator import Accelerator, Event
from .blocks import BlockTransfer
from .quantizer import Quantizer
from .sparse import as_sparse, row_numbers, wire_form
from .streams import Plan
from .transfer import ChunkRange, EncodedChunk, EncodedTensor, Sharding, Transfer, table_shape


class _Staged(Transfer):
    """A transfer that is prepared step by step."""

    is_staged = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._steps = self._prepare()
        self._event = next(self._steps, None)

    def prepared(self) -> bool:
        try:
            while self._event is not None and self._event.query():
                self._event = next(self._steps, None)
        except ZenPSError:
            raise
        except Exception as error:  # out of memory, say: an iterator that has raised looks as if it had ended
            raise TensorError(f"a tensor on {self._accelerator.device}: {error}") from error
        return self._event is None

    @abstractmethod
    def _prepare(self) -> Iterator[Event]:
        """Makes ``parts``; yields whenever the device has to get somewhere first."""

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A pinned copy, complete at the next event."""
        copy = self._accelerator.pinned.empty(tuple(tensor.shape), tensor.dtype)
        return copy.copy_(tensor, non_blocking=True)


class StagedSparse(_Staged):
    """A sparse COO tensor on a GPU; the bytes on the wire are those of ``SparseTransfer``.

    Two events lie between the tensor and its parts: the number of rows must come to the host before it
    knows how much to copy, and the copy must end before it can be sent.

    Args:
        tensor: coalesced or not, on the accelerator's device. It must not change before the round is done.
        cut, codec, expected_rows: as for ``SparseTransfer``.
        settings: how it is compacted.
        place: a layout as the device reads it.
        narrowing: for values that travel narrower. That is done on the host, where what is rounded off is
            kept: on the device it would take as much memory as the table once more.
    """

    def __init__(
        self,
        tensor: Tensor,
        cut: Sharding,
        codec: str,
        settings: CudaConfig,
        place: Callable[[Layout], DeviceLayout],
        accelerator: Accelerator,
        expected_rows: int = 0,
        quantizer: Quantizer | None = None,
    ) -> None:
        self.rows_given = tensor._nnz()
        self._quantizer = quantizer
        self._sparse_dim = tensor.sparse_dim()
        self._indices, self._values = tensor._indices(), tensor._values().detach()
        self._codec, self._settings, self._place_on_device = codec, settings, place
        self._pulled: list[tuple[Tensor, Tensor]] = []
        self._faults: list[Tensor] = []
        self._held: list[Tensor] = []
        _, columns = table_shape(tensor)
        form, row_bytes = wire_form(quantizer, columns, tensor.dtype)
        sent = EncodedTensor(
            "sparse", tensor.shape, tensor.dtype, columns, expected_rows, cut, (), form, row_bytes
        )
        self.restart(sent)
        super().__init__(accelerator)

    def restart(self, sent: EncodedTensor) -> None:
        assert sent.cut.layout is not None
        self._layout, self._device_layout = sent.cut.layout, self._place_on_device(sent.cut.layout)
        self.sent, self._pieces = sent, sent.cut.ranges()
        # What is held stays: copies from it may still be under way.
        self._pulled.clear()
        self._faults.clear()

    # ── out ─────────────────────────────────────────────────────────────────────────────────────

    def _prepare(self) -> Iterator[Event]:
        gpu, settings = self._accelerator, self._settings
        memory = HashMemory(settings.hash_functions, settings.parallel_factor, settings.serial_factor)
        gpu.follow(self._indices, self._values)
        with gpu.stream():
            positions, values, outside = self._place()
            starts = self._on_device([piece.start for piece in self._pieces.values()])
            stops = self._on_device([piece.stop for piece in self._pieces.values()])
        while True:
            with gpu.stream():
                rows, counters = self._compact(positions, values, memory)
                offsets = find_cuts(gpu.launcher, rows.positions, rows.count, stops)
                header = self._to_host(torch.cat([outside, counters, offsets]))
            yield gpu.mark()
            if int(header[0]):
                raise TensorError(f"indices outside the tensor's shape {tuple(self.shape)}; check them")
            self.hashed_rows = self.hashed_rows + header[1:5].numpy()
            if not int(header[4]):
                break
            memory = memory.doubled()

        runs = self._runs(header[5:].tolist())
        total = runs[-1].end
        with gpu.stream():
            values = self._to_host(rows.values[:total])
            numbers = self._to_host(self._relative_to_chunks(rows, starts)[:total])
            bitmaps = {
                run: self._to_host(self._encode_bitmap(rows, run))
                for run in runs
                if run.codec.name == "bitmap"
            }
        yield gpu.mark()

        del self._indices, self._values
        data = tensor_bytes(values if self._quantizer is None else self._quantized(runs, numbers, values))
        parts = [self._part(run, numbers, bitmaps.get(run), data) for run in runs]
        self.sent = structs.replace(self.sent, parts=parts)

    def _place(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, values ``[nnz, columns]``, and ``[1]``: not 0 where an index lies outside the tensor."""
        rows, outside = row_numbers(self._indices, tuple(self.shape[: self._sparse_dim]))
        positions, beyond = place_rows(self._accelerator.launcher, self._device_layout, rows)
        values = self._values.reshape(len(rows), self.columns).contiguous()
        return positions, values, outside | beyond

    def _compact(self, positions: Tensor, values: Tensor, memory: HashMemory) -> tuple[DeviceRows, Tensor]:
        """Rows by position, and the counters of hashing."""
        launcher, size = self._accelerator.launcher, self._device_layout.size
        if self._settings.compaction == "hash":
            bounds = self._on_device(self._layout.server_bounds)
            hashed = hash_compact(launcher, positions, values, bounds, size, len(positions), memory)
            return hashed.rows, hashed.counters
        if self._settings.compaction == "bitmap":
            rows = bitmap_compact(launcher, positions, values, size)
        else:
            rows = sort_compact(launcher, positions, values)
        return rows, torch.zeros(4, dtype=torch.int64, device=positions.device)

    def _relative_to_chunks(self, rows: DeviceRows, starts: Tensor) -> Tensor:
        """Each position within its chunk, as wide as the widest chunk needs it."""
        widest = max(piece.span for piece in self._pieces.values())
        dtype = torch.int32 if item_dtype(widest).itemsize == 4 else torch.int64
        return encode_coo(self._accelerator.launcher, rows.positions, rows.count, starts, dtype)

    def _runs(self, ends: Sequence[int]) -> list[_Run]:
        """The rows of each piece, given how many rows lie before its end."""
        begins = (0, *ends[:-1])
        return [
            _Run(piece, begin, end, choose(self._codec, end - begin, piece.span, self.sent.row_bytes))
            for piece, begin, end in zip(self._pieces.values(), begins, ends, strict=True)
        ]

    def _encode_bitmap(self, rows: DeviceRows, run: _Run) -> Tensor:
        launcher, piece = self._accelerator.launcher, run.piece
        return encode_bitmap(launcher, rows.positions, run.begin, run.end, piece.start, piece.span)

    def _quantized(self, runs: Sequence[_Run], numbers: Tensor, values: Tensor) -> Tensor:
        assert self._quantizer is not None
        positions = torch.cat([numbers[run.begin : run.end].long() + run.piece.start for run in runs])
        return self._quantizer.quantize(values, self._layout.rows(positions))

    def _part(self, run: _Run, numbers: Tensor, bitmap: Tensor | None, values: memoryview) -> EncodedChunk:
        piece, row_bytes = run.piece, self.sent.row_bytes
        if bitmap is None:
            encoded = run.codec.encode(numbers[run.begin : run.end].numpy(), piece.span).data
        else:
            encoded = tensor_bytes(bitmap)
        frames = (encoded, values[run.begin * row_bytes : run.end * row_bytes])
        return EncodedChunk(
            piece.server, piece.chunk, piece.span, run.end - run.begin, run.codec.name, frames
        )

    # ── back ────────────────────────────────────────────────────────────────────────────────────

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        piece = self._pieces[server, chunk]
        start, span, count = piece.start, piece.span, result.rows
        if len(frames) != 2 or result.codec not in CODECS:
            raise ProtocolError("payload", f"a sparse result with codec {result.codec!r}")
        if count > span:
            raise ProtocolError("payload", f"{count} rows in a chunk of {span}")
        codec, positions = CODECS[result.codec], frames[0]
        if result.codec not in ("coo", "bitmap"):  # the others have no kernel
            codec = CODECS["coo"]
            positions = codec.encode(CODECS[result.codec].decode(positions, count, span), span).data
        expected = (codec.most_bytes(count, span), count * self.sent.row_bytes)
        got = (positions.nbytes, frames[1].nbytes)
        if got != expected:
            raise ProtocolError("payload", f"frames of {got} bytes, expected {expected} for {count} rows")
        gpu = self._accelerator
        with gpu.stream():
            encoded = self._to_device(np.frombuffer(positions, np.uint8))
            values = self._to_device(self._dequantized(frames[1], count))
            if codec.name == "bitmap":
                rows, fault = decode_bitmap(gpu.launcher, self._device_layout, encoded, count, start, span)
            else:
                item = torch.int32 if item_dtype(span).itemsize == 4 else torch.int64
                rows, fault = decode_coo(gpu.launcher, self._device_layout, encoded.view(item), start, span)
        self._pulled.append((rows, values.view(self.dtype).view(count, self.columns)))
        self._faults.append(fault)

    def finish(self) -> Tensor:
        """Sparse COO, coalesced, on the device, with every row that any rank pushed."""
        gpu = self._accelerator
        with gpu.stream():
            rows, values = (torch.cat(tensors) for tensors in zip(*self._pulled, strict=True))
            rows, values = merge(gpu.launcher, rows, values, self._layout.rows_total)
            result = as_sparse(rows, values, self.shape, self._sparse_dim)
            fault = self._to_host(torch.cat(self._faults).amax(0, keepdim=True))
        # What came over the network is checked before anyone uses it; and copies from pinned memory end.
        gpu.wait_for(gpu.mark())
        self._pulled.clear()
        self._held.clear()
        if int(fault):
            raise ProtocolError("payload", "positions that do not increase, or that no row has")
        gpu.hand_over(result._indices(), result._values())
        return result

    def _dequantized(self, data: memoryview, rows: int) -> NDArray[np.uint8]:
        """The bytes of values of the tensor's own dtype."""
        if self._quantizer is not None:
            data = tensor_bytes(self._quantizer.dequantized(data, (rows, self.columns)))
        return np.frombuffer(data, np.uint8)

    def _to_device(self, data: NDArray[np.uint8]) -> Tensor:
        """uint8 on the device, by way of pinned memory that is held until the round is done."""
        pinned = self._accelerator.pinned.empty((data.nbytes,), torch.uint8)
        pinned.numpy()[:] = data
        self._held.append(pinned)
        return pinned.to(self._accelerator.device, non_blocking=True)

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        pinned = self._accelerator.pinned.empty((len(numbers),), torch.int64)
        pinned.numpy()[:] = numbers
        self._held.append(pinned)
        return pinned.to(self._accelerator.device, non_blocking=True)


class _Run(NamedTuple):
    """Rows ``begin`` to ``end``, which are those of ``piece``."""

    piece: ChunkRange
    begin: int
    end: int
    codec: Codec


class StagedDense(_Staged):
    """A strided tensor on a GPU: copied to pinned memory, and from there on as one on the CPU.

    Args:
        tensor: of any shape; it must not change before the round is done.
        transfer: makes the transfer of the copy, with results in pinned memory if they are large.
    """

    def __init__(
        self, tensor: Tensor, transfer: Callable[[Tensor], Transfer], accelerator: Accelerator
    ) -> None:
        self.rows_given = tensor.numel()
        self._tensor = tensor.detach()
        self._make = transfer
        super().__init__(accelerator)

    def _prepare(self) -> Iterator[Event]:
        gpu = self._accelerator
        gpu.follow(self._tensor)
        with gpu.stream():
            copy = self._to_host(self._tensor)
        yield gpu.mark()
        del self._tensor
        self._inner = self._make(copy)
        self.sent = self._inner.sent

    def restart(self, sent: EncodedTensor) -> None:
        self._inner.restart(sent)
        self.sent = sent

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        self._inner.absorb(server, chunk, result, frames)

    def finish(self) -> Tensor:
        """Strided and contiguous, on the device."""
        gpu = self._accelerator
        pulled = self._inner.finish()
        with gpu.stream():
            result = pulled.to(gpu.device, non_blocking=True)
        gpu.wait_for(gpu.mark())
        gpu.hand_over(result)
        return result


class StagedBlocks(StagedDense):
    """As :class:`StagedDense`, then in streams as one on the CPU.

    Args:
        tensor: of any shape; it must not change before the round is done.
        plan: how it falls into streams.
    """

    _inner: BlockTransfer

    def __init__(self, tensor: Tensor, plan: Plan, accelerator: Accelerator) -> None:
        self.plan = plan
        super().__init__(tensor, lambda copy: BlockTransfer(copy, plan, accelerator.pinned), accelerator)

    @property
    def pushed_bytes(self) -> int:
        return self._inner.pushed_bytes

    def push(self, stream: int) -> tuple[int, EncodedChunk] | None:
        """As :meth:`BlockTransfer.push`."""
        return self._inner.push(stream)
