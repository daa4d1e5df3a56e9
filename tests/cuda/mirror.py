"""Kernel tests on a GPU: each launch copies its CPU tensors to the device, and back.

``ZENPS_TEST_GPU=1`` makes :class:`HostLauncher` launch like this. So the suite that tests the kernels on the
CPU also tests them on a GPU, unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from zenps.kernels.gpu.launcher import Argument, Launcher

ON_A_GPU: Final = os.environ.get("ZENPS_TEST_GPU", "0") == "1"


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

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        words = [word for arg in args for word in (arg if isinstance(arg, tuple) else (arg,))]
        # One copy for each tensor: a kernel may be given one twice.
        originals = {id(word): word for word in words if isinstance(word, Tensor)}
        copies = {key: tensor.to(self._device, copy=True) for key, tensor in originals.items()}

        def mirrored(word: Tensor | int) -> Tensor | int:
            return copies[id(word)] if isinstance(word, Tensor) else word

        there = [tuple(map(mirrored, arg)) if isinstance(arg, tuple) else mirrored(arg) for arg in args]
        self._launcher.launch(source, expression, grid, block, there)
        self._synchronize()
        for key, tensor in originals.items():
            tensor.copy_(copies[key])
