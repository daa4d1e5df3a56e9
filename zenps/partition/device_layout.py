"""Device layout: a :class:`Layout` in the form that CUDA kernels read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ConfigError
from zenps.kernels.gpu.place import KINDS, DeviceLayout

from .keyspace import Feistel
from .layout import MAX_TABLE_GRANULES, Layout
from .placing import Shift


def device_layout_on(layout: Layout, device: torch.device) -> DeviceLayout:
    """Copies the parts of ``layout`` that kernels need to ``device``.

    Kernels compute Feistel and identity, which is faster than a look-up in device memory; they look up any
    other permutation in the layout's tables.

    Raises:
        ConfigError: the tables of another permutation do not fit in ``sync.table_bytes``, or there are more
            than 2³¹ granules.
    """
    permutation, granules = layout.permutation, layout.size // layout.granule
    halves: tuple[int, ...] = (1, 1)
    keys: tuple[int, ...] = (0, 0, 0, 0)
    tables: tuple[Tensor, ...] = ()
    if not layout.is_built_in:
        kind = KINDS["table"]
        built = layout.tables()
        if granules > MAX_TABLE_GRANULES:
            expected = f"a built-in one for {granules} granules; of others, CUDA kernels look up at most 2³¹"
            raise ConfigError("sync.partition", permutation, expected)
        if built is None:
            expected = f"at least {8 * granules} for {permutation!r}, which CUDA kernels must look up"
            raise ConfigError("sync.table_bytes", f"{layout.budget_bytes} that other tensors leave", expected)
        tables = tuple(built)
    elif isinstance(permutation, Feistel):
        kind = KINDS["feistel"]
        halves, keys = (permutation.left_size, permutation.right_size), permutation.keys
    else:
        kind = KINDS["identity"]
    placing, unplacing = (_move(shift, device) for shift in (layout.placing, layout.unplacing))
    there = tuple(table.to(device) for table in tables) or (0, 0)
    granule_bits = layout.granule.bit_length() - 1
    numbers = (layout.rows_total, granule_bits, granules, kind, *halves, *keys)
    placement = (*numbers, *placing, *unplacing, *there)
    return DeviceLayout(placement, layout.size)


def _move(shift: Shift, device: torch.device) -> tuple[Tensor | int, ...]:
    """``struct Move`` of ``cuda/keyspace.cuh``."""
    firsts, ends = torch.from_numpy(shift.firsts.astype(np.int32)), torch.from_numpy(shift.ends)
    return shift.bits, firsts.to(device), ends.to(device), shift.distances.to(device)
