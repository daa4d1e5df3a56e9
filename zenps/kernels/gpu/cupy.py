"""Kernel launches on a GPU, through CuPy's runtime compiler.

A kernel is compiled at its first launch, so kernels that a training does not use are never compiled. CuPy
keeps kernels in ``CUPY_CACHE_DIR`` (default ``~/.cupy/kernel_cache``): only the first use on a machine pays
for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ConfigError

from .launcher import Argument, Launcher, word_of
from .sources import EXPRESSIONS, OPTIONS, digest, folder, source_text


class CupyLauncher(Launcher):
    """Runs kernels on CUDA tensors, on torch's current stream of their device.

    Raises:
        ConfigError: CuPy is not installed.
    """

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            expected = f"CuPy; run `pip install cupy-cuda13x` ({error})"
            raise ConfigError("device", "cuda", expected) from error
        self._cupy: Any = cupy
        self._kernels: dict[tuple[str, str], Any] = {}
        """Kept here, because CuPy looks a kernel up by its whole source each time."""

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        if not grid:
            return
        index = next(arg.device.index for arg in args if isinstance(arg, Tensor))
        words = tuple(map(_parameter, args))
        # CuPy would launch on its own current stream, which is not torch's. torch.cuda.current_stream() takes
        # longer than the launch itself; torch's inductor also asks in this way.
        stream = _Stream(torch._C._cuda_getCurrentRawStream(index))
        with on_device(index):
            self._kernel(source, expression)((grid,), (block,), words, stream=stream)

    def _kernel(self, source: str, expression: str) -> Any:
        """CuPy's kernel; it serves all devices.

        Each kernel is compiled as its own program. A source may have 60 kernels, and otherwise the first use
        of one would wait until all are compiled.
        """
        key = source, expression
        if key not in self._kernels:
            assert expression in EXPRESSIONS[source], expression
            # CuPy's cache ignores changes of headers: with their digest a changed header is a new program.
            options = (*OPTIONS, f"-I{folder()}", f"-DSOURCES_{digest()}")
            module = self._cupy.RawModule(
                code=source_text(source), options=options, name_expressions=(expression,)
            )
            self._kernels[key] = module.get_function(expression)
        return self._kernels[key]


def _parameter(arg: Argument) -> Any:
    """What CuPy passes as one parameter: an int as int64, which is as wide as a pointer, and a NumPy array of
    one item as the bytes of that item."""
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    if isinstance(arg, int):
        return arg
    return np.array([word_of(word) for word in arg], dtype=np.int64).view(f"V{8 * len(arg)}")


class _Stream(NamedTuple):
    """A stream as CuPy's launch takes one: ``ptr`` is its ``cudaStream_t``."""

    ptr: int


def on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """Context in which a device is the current one; it costs nothing where it already is."""
    return contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)
