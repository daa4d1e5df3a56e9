"""Cases of the CUDA kernels: the gradients that a model predicts and a GPU measures.

The model interprets kernels on a small sample, with the case's density, width and share of different rows; a
GPU runs the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.bench_compaction import placed
from zenps.kernels.gpu.bitmap_codec import (
    BitmapChunk,
    decode_bitmap,
    decode_coo,
    encode_bitmaps,
    encode_coo,
)
from zenps.kernels.gpu.bitmap_compact import bitmap_compact, bitmap_scratch_words
from zenps.kernels.gpu.launcher import Launcher
from zenps.kernels.gpu.place import place_rows
from zenps.kernels.gpu.rows import Header
from zenps.kernels.gpu.scatter import merge
from zenps.kernels.gpu.sort_compact import sort_compact, sort_scratch_words
from zenps.kernels.gpu.threshold_compact import threshold_compact

SERVERS = 16
DENSE_ELEMENTS = 214_000_000  # DeepFM's embeddings in Zen (OSDI'25, Table 2)
ROWS, COLUMNS, UNIQUE = 1_000_000, 64, 0.33
"""As many of a million look-ups by Zipf's law in a table of ten million rows are different."""
BUCKET_ELEMENTS = 1 << 20
"""Of float32 in ``sync.bucket_bytes``."""
FAR_ROWS = 1 << 33
"""Rows of a table whose positions take 64 bits."""


class Prepared(NamedTuple):
    """A case that can run.

    Attributes:
        run: by ZenPS's kernels.
        elements: of what it runs on.
        floor_bytes: what every way must move.
        by_torch: the same by PyTorch's own operations, where nobody else measures them.
        reset: undoes what a run changed; not a part of what is timed.
    """

    run: Callable[[Launcher], object]
    elements: int
    floor_bytes: float
    by_torch: Callable[[], object] | None = None
    reset: Callable[[], object] | None = None


class Size(NamedTuple):
    """How large a gradient is, and where it lies.

    Attributes:
        elements: of a dense gradient.
        rows: of a sparse one.
    """

    elements: int
    rows: int
    device: torch.device


class Case(NamedTuple):
    """One row of the table, for a gradient of ``elements``."""

    elements: int
    prepare: Callable[[Size], Prepared]

    def whole(self, device: torch.device) -> Prepared:
        return self.prepare(Size(self.elements, ROWS, device))

    def sampled(self) -> Prepared:
        return self.prepare(SAMPLE)


SAMPLE = Size(1 << 16, 1 << 12, torch.device("cpu"))


def _thinned(dtype: torch.dtype, size: Size) -> Prepared:
    """A gradient and its residual, of which a hundredth is selected by a threshold on the device."""
    elements, count = size.elements, size.elements // 100
    gradient = torch.randn(elements, device=size.device).to(dtype)
    before = torch.randn(elements, device=size.device)
    residual = before.clone()
    threshold = (residual + gradient).abs().topk(count).values[-1:].clone()

    def run(launcher: Launcher) -> object:
        bounds = (0, elements)
        found = threshold_compact(launcher, residual, gradient, threshold, bounds, 2 * count, takes=True)
        return found, residual

    def by_torch() -> object:
        residual.add_(gradient)
        (indices,) = (residual.abs() >= threshold).nonzero(as_tuple=True)
        values = residual[indices]
        residual[indices] = 0
        return indices, values

    floor_bytes = gradient.nbytes + 2 * residual.nbytes + count * 8
    return Prepared(run, elements, floor_bytes, by_torch, partial(residual.copy_, before))


def _ids(size: Size) -> Tensor:
    """Look-ups of which :data:`UNIQUE` are different: one of each, others with a probability ∝ rank^(-2/3).

    That is less skewed than Zipf's law with exponent 1.
    """
    rows, unique = size.rows, int(UNIQUE * size.rows)
    repeated = (torch.rand(rows - unique, device=size.device) ** 3 * unique).long()
    ids = torch.cat([torch.arange(unique, device=size.device), repeated])
    return ids[torch.randperm(rows, device=size.device)] * 7


def _rows(way: str, dtype: torch.dtype, is_far: bool, size: Size) -> Prepared:
    rows, device = size.rows, size.device
    table_rows = FAR_ROWS if is_far else 10 * rows
    ids = _ids(size) * (table_rows // (10 * rows))
    values = torch.randn(rows, COLUMNS, device=device).to(dtype)
    layout, device_layout = placed("rows", table_rows, SERVERS, device)
    row_bytes, unique = COLUMNS * dtype.itemsize, int(UNIQUE * rows)
    cuts = torch.tensor(layout.server_bounds[1:], device=device)
    report = torch.zeros(1 + len(cuts), dtype=torch.int64, device=device)

    def run(launcher: Launcher) -> object:
        slots, in_bitmap = device_layout.size, way == "bitmap"
        # Also of a sample, whose positions have fewer bits and would take a pass less.
        sorted_size = max(slots, 10 * ROWS)
        words = bitmap_scratch_words(slots) if in_bitmap else sort_scratch_words(rows, sorted_size)
        header = Header(cuts, report, torch.empty(words, dtype=torch.int64, device=device))
        positions = place_rows(launcher, device_layout, ids, header.scratch)
        if in_bitmap:
            return bitmap_compact(launcher, positions, values, slots, header).summed()
        return sort_compact(launcher, positions, values, sorted_size, header).summed()

    written = unique * (row_bytes + device_layout.position_dtype.itemsize)
    return Prepared(run, values.numel(), ids.nbytes + values.nbytes + written)


def _codec(way: str, size: Size) -> Prepared:
    """One chunk with a twentieth of its positions set; elements are rows."""
    rows, span, device = size.rows, 20 * size.rows, size.device
    _, device_layout = placed("codec", span, 1, device)
    positions = torch.randperm(span, device=device)[:rows].sort()[0].int()
    bits = torch.zeros(span, dtype=torch.uint8, device=device)
    bits[positions.long()] = 1
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    bitmap = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    chunk, starts = BitmapChunk(0, rows, 0, span), torch.tensor([0], device=device)
    runs: dict[str, tuple[Callable[[Launcher], object], float]] = {
        "encode_bitmaps": (
            lambda launcher: encode_bitmaps(launcher, positions, [chunk], torch.empty_like(bitmap)),
            positions.nbytes + bitmap.nbytes,
        ),
        "decode_bitmap": (
            lambda launcher: decode_bitmap(launcher, device_layout, bitmap, rows, 0, span),
            bitmap.nbytes + 8 * rows,
        ),
        "encode_coo": (
            lambda launcher: encode_coo(launcher, positions, starts, torch.empty_like(positions)),
            2 * positions.nbytes,
        ),
        "decode_coo": (
            lambda launcher: decode_coo(launcher, device_layout, positions, 0, span),
            positions.nbytes + 8 * rows,
        ),
    }
    run, floor_bytes = runs[way]
    return Prepared(run, rows, floor_bytes)


def _merged(dtype: torch.dtype, size: Size) -> Prepared:
    rows = torch.randperm(size.rows, device=size.device)
    values = torch.randn(size.rows, COLUMNS, device=size.device).to(dtype)

    def run(launcher: Launcher) -> object:
        return merge(launcher, rows, values, size.rows)

    return Prepared(run, values.numel(), 2 * values.nbytes + 2 * rows.nbytes)


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
VALUES = {"float32": FLOAT32, "bfloat16": BFLOAT16}

CASES: dict[str, Case] = {
    **{
        f"threshold_compact, dense, {name}": Case(DENSE_ELEMENTS, partial(_thinned, dtype))
        for name, dtype in VALUES.items()
    },
    "threshold_compact, a bucket, float32": Case(BUCKET_ELEMENTS, partial(_thinned, FLOAT32)),
    **{
        f"{way}_compact, rows, {name}": Case(ROWS * COLUMNS, partial(_rows, way, dtype, False))
        for way in ("sort", "bitmap")
        for name, dtype in VALUES.items()
    },
    "sort_compact, far rows, float32": Case(ROWS * COLUMNS, partial(_rows, "sort", FLOAT32, True)),
    **{
        way: Case(ROWS, partial(_codec, way))
        for way in ("encode_bitmaps", "decode_bitmap", "encode_coo", "decode_coo")
    },
    **{f"merge, {name}": Case(ROWS * COLUMNS, partial(_merged, dtype)) for name, dtype in VALUES.items()},
}
