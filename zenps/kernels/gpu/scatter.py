"""Gather and merge of rows of any dtype, on the device: wraps ``cuda/scatter.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import TensorError

from .launcher import BLOCK, Launcher, check_on_device, grid_of
from .packs import pack_bytes
from .place import INTEGERS, position_dtype
from .radix_sort import radix_scratch_words, radix_sort
from .sources import position_name, word_name

ITEMS = 4
"""Words that a thread moves; ``cuda/scatter.cu`` has the same."""


def gather_rows(launcher: Launcher, values: Tensor, order: Tensor) -> Tensor:
    """Returns ``values[order]``.

    Args:
        values: ``[n, columns]`` of any dtype, on the device.
        order: int32 or int64 ``[m]`` in [0, n); not checked.

    Returns:
        ``[m, columns]``, fresh memory.

    Raises:
        TensorError: another dtype or shape.
    """
    check_on_device("order", order, INTEGERS, 1)
    check_on_device("values", values, (values.dtype,), 2)
    out = values.new_empty((len(order), values.shape[1]))
    word_bytes = pack_bytes(_row_bytes(values), values, out)
    words = _row_bytes(values) // word_bytes
    grid = grid_of(-(-len(order) * words // ITEMS))
    args = (values, order, len(order), words, out)
    expression = f"gather_rows<{word_name(word_bytes)}, {position_name(order.dtype)}>"
    launcher.launch("scatter", expression, grid, BLOCK, args)
    return out


def merge(launcher: Launcher, rows: Tensor, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sorts rows of a table, for a coalesced sparse gradient.

    Args:
        rows: int64 ``[u]`` in [0, ``size``), distinct, in any order; u below 2**30.
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
    numbers = rows.to(position_dtype(size))
    words = torch.zeros(1 + radix_scratch_words(len(rows), size), dtype=torch.int64, device=rows.device)
    ordered, order = radix_sort(launcher, numbers, size, words[1:], words[:1])
    return ordered.long(), gather_rows(launcher, values, order)


def _row_bytes(table: Tensor) -> int:
    return table.shape[1] * table.itemsize
