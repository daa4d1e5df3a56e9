"""Cases of the performance model of the CUDA kernels: small samples of the gradients of ``bench_compaction``.

A sample has the case's density, width and share of different rows; its table is smaller.
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
from zenps.kernels.gpu.hash_compact import HashMemory, hash_compact
from zenps.kernels.gpu.launcher import Launcher
from zenps.kernels.gpu.place import place_rows
from zenps.kernels.gpu.rows import Header
from zenps.kernels.gpu.scatter import merge, put_rows
from zenps.kernels.gpu.sort_compact import sort_compact, sort_scratch_words
from zenps.kernels.gpu.threshold_compact import threshold_compact

CPU = torch.device("cpu")
SAMPLED_ELEMENTS, SERVERS = 1 << 16, 16
DENSE_ELEMENTS = 214_000_000  # DeepFM's embeddings in Zen (OSDI'25, Table 2)
SAMPLED_ROWS, ROWS, COLUMNS, UNIQUE = 1 << 12, 1_000_000, 64, 0.33
"""Of a million look-ups by Zipf's law in a table of ten million rows, a third are different."""
BUCKET_ELEMENTS = 1 << 20
"""Of float32 in ``sync.bucket_bytes``."""
FAR_ROWS = 1 << 33
"""Rows of a table whose positions take 64 bits."""

Prepared = tuple[Callable[[Launcher], object], int, float]
"""What to run, the elements of the sample, and the bytes that every way must move for it."""


class Case(NamedTuple):
    """One row of the table: what is predicted for a gradient of ``elements``."""

    elements: int
    prepare: Callable[[], Prepared]


def _thinned(dtype: torch.dtype) -> Prepared:
    """A gradient and its residual, of which a hundredth is selected by a threshold on the device."""
    gradient, residual = torch.randn(SAMPLED_ELEMENTS).to(dtype), torch.randn(SAMPLED_ELEMENTS)
    count = SAMPLED_ELEMENTS // 100
    threshold = (residual + gradient).abs().topk(count).values[-1:].clone()

    def run(launcher: Launcher) -> object:
        bounds = (0, SAMPLED_ELEMENTS)
        found = threshold_compact(launcher, residual, gradient, threshold, bounds, 2 * count, takes=True)
        return found, residual

    return run, SAMPLED_ELEMENTS, gradient.nbytes + 2 * residual.nbytes + count * 8


def _ids() -> Tensor:
    """Look-ups of which :data:`UNIQUE` are different, some of them often."""
    unique = int(UNIQUE * SAMPLED_ROWS)
    repeated = (torch.rand(SAMPLED_ROWS - unique) ** 3 * unique).long()
    return torch.cat([torch.arange(unique), repeated])[torch.randperm(SAMPLED_ROWS)] * 7


def _rows(way: str, dtype: torch.dtype, table_rows: int = 10 * SAMPLED_ROWS) -> Prepared:
    ids, values = _ids() * (table_rows // (10 * SAMPLED_ROWS)), torch.randn(SAMPLED_ROWS, COLUMNS).to(dtype)
    layout, device_layout = placed("rows", table_rows, SERVERS, CPU)
    row_bytes, unique = COLUMNS * dtype.itemsize, int(UNIQUE * SAMPLED_ROWS)
    cuts = torch.tensor(layout.server_bounds[1:])
    told = torch.zeros(1 + len(cuts), dtype=torch.int64)

    def run(launcher: Launcher) -> object:
        if way == "hash":
            positions, bounds = place_rows(launcher, device_layout, ids), layout.server_bounds
            return hash_compact(launcher, positions, values, bounds, SAMPLED_ROWS, HashMemory())
        size, in_bitmap = device_layout.size, way == "bitmap"
        # Of a million rows: their table's positions have more bits, and take a pass more.
        sorted_size = max(size, 10 * ROWS)
        words = bitmap_scratch_words(size) if in_bitmap else sort_scratch_words(SAMPLED_ROWS, sorted_size)
        header = Header(cuts, told, torch.empty(words, dtype=torch.int64))
        positions = place_rows(launcher, device_layout, ids, header.scratch)
        if in_bitmap:
            return bitmap_compact(launcher, positions, values, size, header)
        return sort_compact(launcher, positions, values, sorted_size, header)

    return (
        run,
        values.numel(),
        ids.nbytes + values.nbytes + unique * (row_bytes + device_layout.position_dtype.itemsize),
    )


def _codec(way: str) -> Prepared:
    """One chunk with a twentieth of its positions set; elements are rows."""
    span = 20 * SAMPLED_ROWS
    _, device_layout = placed("codec", span, 1, CPU)
    positions = torch.randperm(span)[:SAMPLED_ROWS].sort()[0].int()
    bits = torch.zeros(span, dtype=torch.uint8)
    bits[positions.long()] = 1
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    bitmap = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    chunk, starts = BitmapChunk(0, SAMPLED_ROWS, 0, span), torch.tensor([0])
    runs: dict[str, tuple[Callable[[Launcher], object], float]] = {
        "encode_bitmaps": (
            lambda launcher: encode_bitmaps(launcher, positions, [chunk], torch.empty_like(bitmap)),
            positions.nbytes + bitmap.nbytes,
        ),
        "decode_bitmap": (
            lambda launcher: decode_bitmap(launcher, device_layout, bitmap, SAMPLED_ROWS, 0, span),
            bitmap.nbytes + 8 * SAMPLED_ROWS,
        ),
        "encode_coo": (
            lambda launcher: encode_coo(launcher, positions, starts, torch.empty_like(positions)),
            2 * positions.nbytes,
        ),
        "decode_coo": (
            lambda launcher: decode_coo(launcher, device_layout, positions, 0, span),
            positions.nbytes + 8 * SAMPLED_ROWS,
        ),
    }
    run, floor_bytes = runs[way]
    return run, SAMPLED_ROWS, floor_bytes


def _scattered(way: str, dtype: torch.dtype) -> Prepared:
    rows, values = torch.randperm(SAMPLED_ROWS), torch.randn(SAMPLED_ROWS, COLUMNS).to(dtype)
    out = torch.empty_like(values)

    def run(launcher: Launcher) -> object:
        if way == "merge":
            return merge(launcher, rows, values, SAMPLED_ROWS)
        return put_rows(launcher, values, rows, out)

    indices = rows.nbytes * (2 if way == "merge" else 1)
    return run, values.numel(), 2 * values.nbytes + indices


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
VALUES = {"float32": FLOAT32, "bfloat16": BFLOAT16}

CASES: dict[str, Case] = {
    **{
        f"threshold_compact, dense, {name}": Case(DENSE_ELEMENTS, partial(_thinned, dtype))
        for name, dtype in VALUES.items()
    },
    "threshold_compact, a bucket, float32": Case(BUCKET_ELEMENTS, partial(_thinned, FLOAT32)),
    **{
        f"{way}_compact, rows, {name}": Case(ROWS * COLUMNS, partial(_rows, way, dtype))
        for way in ("sort", "bitmap", "hash")
        for name, dtype in VALUES.items()
    },
    **{
        f"{way}_compact, far rows, float32": Case(ROWS * COLUMNS, partial(_rows, way, FLOAT32, FAR_ROWS))
        for way in ("sort", "hash")
    },
    **{
        way: Case(ROWS, partial(_codec, way))
        for way in ("encode_bitmaps", "decode_bitmap", "encode_coo", "decode_coo")
    },
    **{
        f"{way}, {name}": Case(ROWS * COLUMNS, partial(_scattered, way, dtype))
        for way in ("merge", "put_rows")
        for name, dtype in VALUES.items()
    },
}
