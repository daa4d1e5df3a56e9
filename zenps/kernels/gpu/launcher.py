"""Kernel launch interface: implemented by CuPy on a GPU, and by the tests' runtime on the CPU.

Wrappers allocate with torch, launch through a :class:`Launcher`, and never wait for the device: their
results are ready when torch's current stream has reached that point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from zenps.errors import TensorError

BLOCK = 256
"""Threads of a block, for kernels that have no reason for another number."""

MAX_GRID = (1 << 31) - 1

Argument = Tensor | int | tuple[Tensor | int, ...]
"""Of a kernel: a tuple is a struct of eight-byte words, which is passed by value."""


class Launcher(ABC):
    """Runs kernels of ``cuda/`` on torch tensors, in order, on torch's current stream."""

    @abstractmethod
    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        """Enqueues one kernel and returns.

        Args:
            source: the stem of its file in ``cuda/``.
            expression: its name, one of ``EXPRESSIONS[source]`` (:mod:`zenps.kernels.gpu.sources`).
            grid: blocks; nothing is launched where there are none.
            block: threads of each.
            args: a pointer for each tensor, an int64 for each number, in the order of the parameters.
        """


def word_of(arg: Tensor | int) -> int:
    """The eight bytes that a kernel gets: an address, or a number."""
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def grid_of(threads: int, block: int = BLOCK) -> int:
    """The number of blocks that have at least ``threads`` threads.

    Raises:
        TensorError: more threads than a grid may have.
    """
    blocks = -(-threads // block)
    if blocks > MAX_GRID:
        raise TensorError(f"{threads} threads: expected at most {MAX_GRID * block}; push a smaller tensor")
    return blocks


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copies ``numbers`` to the device as int64, without waiting for it."""
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def scan_state(tiles: int, device: torch.device) -> Tensor:
    """The zeroed state of a look-back over ``tiles`` tiles (``ScanState`` in ``cuda/scan.cuh``)."""
    return torch.zeros(1 + tiles, dtype=torch.int64, device=device)


def check_on_device(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], dimensions: int) -> None:
    """Checks dtype, dimensions and contiguity of a tensor, which kernels take for granted.

    Raises:
        TensorError: another dtype or number of dimensions, or not contiguous.
    """
    if tensor.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TensorError(f"{name} of dtype {tensor.dtype}: expected one of {expected}")
    if tensor.dim() != dimensions:
        raise TensorError(f"{name} of shape {tuple(tensor.shape)}: expected {dimensions} dimensions")
    if not tensor.is_contiguous():
        raise TensorError(
            f"{name} with strides {tensor.stride()}: expected it contiguous; call .contiguous()"
        )
