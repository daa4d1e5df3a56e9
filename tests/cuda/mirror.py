"""Kernel tests on a GPU: each launch copies its CPU tensors to the device, and back.

``ZENPS_TEST_GPU=1`` makes :class:`HostLauncher` launch like this. So the suite that tests the kernels on the
CPU also tests them on a GPU, unchanged.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from zenps.kernels.gpu.launcher import Launcher
from zenps.kernels.gpu.place import KINDS

ON_A_GPU: Final = os.environ.get("ZENPS_TEST_GPU", "0") == "1"

# Words of struct Placement (cuda/keyspace.cuh): of each pointer, what it points to and where its length is.
LAYOUT_WORDS = 18
LEAST_ADDRESS = 1 << 16
POINTERS = {
    11: (torch.int64, 10),
    12: (torch.int64, 10),
    14: (torch.int64, 13),
    15: (torch.int64, 13),
    16: (torch.int32, 2),
    17: (torch.int32, 2),
}


class Mirror(Launcher):
    """A launcher of CPU tensors.

    Args:
        launcher: of tensors on ``device``.
        synchronize: waits for ``device``.
    """

    def __init__(self, launcher: Launcher, device: torch.device, synchronize: Callable[[], None]) -> None:
        self._launcher = launcher
        self._device = device
        self._synchronize = synchronize

    def launch(
        self, source: str, expression: str, grid: int, block: int, args: Sequence[Tensor | int]
    ) -> None:
        kept: list[Tensor] = []
        # One copy for each tensor: a kernel may be given one twice.
        copies = {id(arg): self._copy(arg, kept) for arg in args if isinstance(arg, Tensor)}
        mirrored = [copies[id(arg)] if isinstance(arg, Tensor) else arg for arg in args]
        self._launcher.launch(source, expression, grid, block, mirrored)
        self._synchronize()
        for arg in args:
            if isinstance(arg, Tensor) and not _is_device_layout(arg):
                arg.copy_(copies[id(arg)])

    def _copy(self, tensor: Tensor, kept: list[Tensor]) -> Tensor:
        if not _is_device_layout(tensor):
            return tensor.to(self._device, copy=True)
        words = tensor.tolist()
        for place, (dtype, length) in POINTERS.items():
            if words[place]:
                kept.append(_at(words[place], dtype, words[length]).to(self._device, copy=True))
                words[place] = kept[-1].data_ptr()
        return torch.tensor(words, device=self._device)


def _is_device_layout(tensor: Tensor) -> bool:
    """Other tensors may have as many words, but not valid numbers of a layout with addresses among them."""
    if tensor.dtype != torch.int64 or tensor.numel() != LAYOUT_WORDS:
        return False
    rows, granule_bits, granules, kind, *_ = words = tensor.tolist()
    is_layout = rows > 0 and 0 <= granule_bits < 63 and granules == -(-rows >> granule_bits)
    addresses = [words[place] for place in POINTERS if words[place]]
    return is_layout and kind in KINDS.values() and bool(addresses) and min(addresses) > LEAST_ADDRESS


def _at(address: int, dtype: torch.dtype, length: int) -> Tensor:
    memory = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
