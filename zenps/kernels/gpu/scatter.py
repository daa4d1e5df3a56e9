"""Scatter and gather of rows of any dtype, on the device: wraps ``cuda/scatter.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of
from .packs import pack_bytes
from .sources import word_name

ITEMS = 4
"""Words that a thread moves; ``cuda/scatter.cu`` has the same."""


def put_rows(launcher: Launcher, values: Tensor, targets: Tensor, out: Tensor) -> Tensor:
    """``out[targets] = values``; the other rows of ``out`` stay as they are.

    Args:
        values: ``[n, columns]`` of any dtype, on the device.
        targets: int64 ``[n]``, distinct. If two are equal, the row is one of both or a mixture.
        out: ``[rows, columns]`` of the same dtype, such as a gradient filled with zeros.

    Returns:
        a flag, int64 ``[1]``: 1 if a target lies outside [0, rows); such rows are not written.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("targets", targets, (torch.int64,), 1)
    check_on_device("values", values, (out.dtype,), 2)
    check_on_device("output", out, (out.dtype,), 2)
    if len(targets) != len(values) or values.shape[1] != out.shape[1]:
        shapes = f"{tuple(values.shape)} to {len(targets)} targets in {tuple(out.shape)}"
        raise TensorError(f"values of shape {shapes}: expected one target for each row, and as many columns")
    outside = torch.zeros(1, dtype=torch.int64, device=values.device)
    word_bytes = pack_bytes(_row_bytes(values), values, out)
    words = _row_bytes(values) // word_bytes
    args = (values, targets, len(values), words, len(out), out, outside)
    grid = grid_of(-(-len(values) * words // ITEMS))
    launcher.launch("scatter", f"put_rows<{word_name(word_bytes)}>", grid, BLOCK, args)
    return outside


def gather_rows(launcher: Launcher, values: Tensor, order: Tensor) -> Tensor:
    """Returns ``values[order]``.

    Args:
        values: ``[n, columns]`` of any dtype, on the device.
        order: int64 ``[m]`` in [0, n); not checked.

    Returns:
        ``[m, columns]``, fresh memory.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("order", order, (torch.int64,), 1)
    check_on_device("values", values, (values.dtype,), 2)
    out = values.new_empty((len(order), values.shape[1]))
    word_bytes = pack_bytes(_row_bytes(values), values, out)
    words = _row_bytes(values) // word_bytes
    grid = grid_of(-(-len(order) * words // ITEMS))
    args = (values, order, len(order), words, out)
    launcher.launch("scatter", f"gather_rows<{word_name(word_bytes)}>", grid, BLOCK, args)
    return out


def merge(launcher: Launcher, rows: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sorts rows of a table, for a coalesced sparse gradient.

    Args:
        rows: int64 ``[u]`` in [0, ``size``), distinct, in any order.
        values: ``[u, columns]`` of any dtype, on the same device.
        size: the table's rows. If they fit, row numbers are sorted as int32, which takes half the passes.

    Returns:
        sorted rows int64 ``[u]``, and their values ``[u, columns]``.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("rows", rows, (torch.int64,), 1)
    if len(rows) != len(values):
        raise TensorError(f"{len(rows)} rows with values of shape {tuple(values.shape)}: expected one each")
    ordered, order = torch.sort(rows.int() if size <= 1 << 31 else rows)
    return ordered.long(), gather_rows(launcher, values, order)


def _row_bytes(table: Tensor) -> int:
    return table.shape[1] * table.itemsize
