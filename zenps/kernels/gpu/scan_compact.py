"""Stream compaction of an element-sparse gradient in one pass: wraps ``cuda/scan_compact.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import TensorError

from .launcher import BLOCK, Launcher, check_on_device, multiprocessors, scan_state
from .place import DeviceLayout
from .rows import DeviceRows
from .sources import position_name, word_name

DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of an element-sparse gradient."""

# constexprs of cuda/scan_compact.cu
PACKS = 8
PACK_BYTES = 16
LEAST_GRANULE_OF_PACKS = 32
RESIDENT = 3
"""Blocks of a multiprocessor; each takes tiles until none is left."""


def scan_compact(launcher: Launcher, layout: DeviceLayout, dense: Tensor, capacity: int) -> DeviceRows:
    """The elements of a tensor that are not zero, sorted by position; values keep their bits.

    Both zeros, 0.0 and -0.0, are left out; subnormals and NaN are not.

    Args:
        layout: of the tensor's elements. Granules of 32 and more are fast.
        dense: float32, float16 or bfloat16 ``[rows]`` on the device.
        capacity: the number of elements that the output has room for.

    Returns:
        positions ``[capacity]`` of ``layout.position_dtype`` and values ``[capacity, 1]`` of the dtype
        of ``dense``.

    Raises:
        TensorError: ``dense`` has another dtype, more than one dimension, or not the layout's rows.
    """
    check_dense(layout, dense)
    lanes = PACK_BYTES // dense.itemsize if _takes_packs(layout, dense) else 1
    tiles = -(-layout.size // (BLOCK * PACKS * lanes))
    positions = torch.empty(capacity, dtype=layout.position_dtype, device=dense.device)
    values = torch.empty(capacity, 1, dtype=dense.dtype, device=dense.device)
    count = torch.empty(1, dtype=torch.int64, device=dense.device)
    state = scan_state(tiles, dense.device)
    expression = f"scan_compact<{word_name(dense.itemsize)}, {position_name(positions.dtype)}, {lanes}>"
    args = (state, layout.placement, dense, capacity, positions, values, count)
    blocks = min(tiles, RESIDENT * multiprocessors(dense.device))
    launcher.launch("scan_compact", expression, blocks, BLOCK, args)
    return DeviceRows(positions, values, count)


def check_dense(layout: DeviceLayout, dense: Tensor) -> None:
    """Checks that ``dense`` is a gradient of ``layout``'s tensor.

    Raises:
        TensorError: another dtype or shape, or another number of rows.
    """
    check_on_device("a dense gradient", dense, DENSE_DTYPES, 1)
    if len(dense) != layout.rows:
        raise TensorError(f"a dense gradient of {len(dense)} rows: expected {layout.rows}")


def _takes_packs(layout: DeviceLayout, dense: Tensor) -> bool:
    """True if every load of PACK_BYTES is aligned and stays within a granule."""
    aligned = dense.data_ptr() % PACK_BYTES == 0
    return aligned and layout.granule >= LEAST_GRANULE_OF_PACKS
