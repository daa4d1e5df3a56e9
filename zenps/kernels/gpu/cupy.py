"""Kernel launches on a GPU, through CuPy's runtime compiler.

A kernel is compiled when it is first launched; what a training does not use is not compiled. CuPy keeps
kernels in ``CUPY_CACHE_DIR`` (default ``~/.cupy/kernel_cache``): only the first use on a machine pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
            expected = f"CuPy; run `pip install 'zenps[cuda]'` ({error})"
            raise ConfigError("device", "cuda", expected) from error
        self._cupy: Any = cupy
        self._kernels: dict[tuple[str, str], Any] = {}
        """Kept here, because CuPy looks a kernel up by its whole source each time."""

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        if not grid:
            return
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        words = tuple(_parameter(arg) for arg in args)
        # CuPy launches on its own current stream, which is not torch's.
        stream = self._cupy.cuda.Stream.from_external(_TorchStream(torch.cuda.current_stream(device)))
        with self._cupy.cuda.Device(device.index), stream:
            self._kernel(source, expression)((grid,), (block,), words)

    def _kernel(self, source: str, expression: str) -> Any:
        """CuPy's kernel; it serves all devices.

        Each is a program of its own: otherwise the first use of one of a source's kernels, which may be 60,
        would wait for all of them.
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
    if not isinstance(arg, tuple):
        return word_of(arg)
    return np.array([word_of(word) for word in arg], dtype=np.int64).view(f"V{8 * len(arg)}")


class _TorchStream:
    """A torch stream with the protocol that CuPy needs; torch's own streams have it only since 2.13."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of this protocol, and ``cudaStream_t``."""
        return 0, self._stream.cuda_stream
