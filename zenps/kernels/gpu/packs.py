"""Vectorised loads: the widest pack of values that kernels can load from a table; ``cuda/packs.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zenps.errors import TensorError

from .launcher import check_on_device

MAX_PACK_BYTES = 16
"""The widest load of a thread, in bytes."""

MAX_ROWS = (1 << 31) - 1
"""Kernels number rows in 31 bits."""


def pack_bytes(row_bytes: int, *tables: Tensor) -> int:
    """The greatest power of two, up to 16, that divides ``row_bytes`` and the addresses of all ``tables``."""
    return math.gcd(MAX_PACK_BYTES, row_bytes, *(table.data_ptr() for table in tables))


def pack_lanes(table: Tensor) -> int:
    """The number of adjacent values of ``table``, ``[n, columns]``, that one load takes."""
    return pack_bytes(table.shape[1] * table.itemsize, table) // table.itemsize


def check_rows(positions: Tensor, values: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Checks the tensors of a compaction.

    Args:
        positions: to be int32 or int64 ``[n]``, n below 2**31.
        values: to be ``[n, columns]`` of one of ``dtypes``, on the same device.

    Raises:
        TensorError: they are not.
    """
    check_on_device("positions", positions, (torch.int32, torch.int64), 1)
    check_on_device("values", values, dtypes, 2)
    if len(positions) != len(values) or positions.device != values.device:
        raise TensorError(
            f"{len(positions)} positions on {positions.device} with {len(values)} rows on {values.device}: "
            "expected one position for each row, on the same device"
        )
    if len(positions) > MAX_ROWS:
        raise TensorError(f"{len(positions)} rows: expected at most {MAX_ROWS}; push them in several tensors")
