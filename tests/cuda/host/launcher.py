"""Kernel launcher for CPU tensors, with checks that a GPU does not make."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from tests.cuda.host.build import Sanitizer, build, build_runtime, source_folder
from tests.cuda.mirror import ON_A_GPU, Mirror
from zenps.kernels.gpu import sources
from zenps.kernels.gpu.cupy import CupyLauncher
from zenps.kernels.gpu.launcher import Argument, Launcher, word_of

SANITIZER: Final = Sanitizer(os.environ.get("ZENPS_HOST_SANITIZER", "none"))
"""The sanitizer of this process; :mod:`.rerun` sets it in processes that have loaded one."""

SMALL: Final = SANITIZER is not Sanitizer.NONE or os.environ.get("ZENPS_TEST_SMALL", "0") == "1"
SIZES: Final = (0, 1, 33, 1025) if SMALL else (0, 1, 31, 32, 33, 97, 1025, 100_000)
"""Numbers of rows for kernel tests; few and small ones under a sanitizer, which makes each access slow."""

GUARD_BYTES = 4096
GUARD = 0xA5


class KernelError(Exception):
    """A kernel was aborted, or wrote where it must not."""


class HostLauncher(Launcher):
    """Runs each kernel to its end before ``launch`` returns.

    Args:
        seed: of the order in which threads and blocks run.
        resident: how many blocks run at once.
        folder: of the sources; by default ``cuda/``, or its replacement in a rerun.
        expressions: the kernels of each source, to be compiled together; by default those of ``cuda/``.
            Others are compiled one by one, which is faster for a source of which one test is run.

    Raises:
        KernelError: on ``launch``, with the reason and, mostly, block and thread: a deadlock, a wrong mask,
            a barrier that not all threads reach, too much shared memory, a touched guard zone.
    """

    def __init__(
        self,
        seed: int = 0,
        resident: int = 4,
        folder: Path | None = None,
        expressions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.seed = seed
        self._resident = resident
        self._folder = folder or source_folder()
        if expressions is None:
            expressions = sources.EXPRESSIONS if self._folder == sources.folder() else {}
        self._expressions = expressions
        self._guarded: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        if not grid:
            return
        if not 0 < grid < 1 << 31 or not 0 < block <= 1024:
            raise KernelError(f"{expression}: no GPU has a grid of {grid} blocks of {block} threads")
        if ON_A_GPU:
            _mirror().launch(source, expression, grid, block, args)
            return
        expressions = tuple(self._expressions.get(source, (expression,)))
        kernel = _kernels(self._folder / f"{source}.cu", expressions)[expression]
        _check(expression, kernel.parameters.decode(), args)
        # A struct is given by its address, and copied before the kernel begins.
        structs = {id(arg): _words(arg) for arg in args if isinstance(arg, tuple)}
        words = [ctypes.addressof(structs[id(arg)]) if isinstance(arg, tuple) else arg for arg in args]
        with _one_at_a_time:
            failure = _runtime().zenps_launch(kernel, _words(words), grid, block, self._resident, self.seed)
        if failure is not None:
            raise KernelError(f"{expression}: {failure.decode()}")
        self._check_guards(expression)

    def guarded(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` between two zones that every launch is checked to leave alone."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        whole = torch.full((len(data) + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        inside = whole[GUARD_BYTES : GUARD_BYTES + len(data)]
        inside.copy_(data)
        copy = inside.view(tensor.dtype).view(tensor.shape)
        self._guarded.append((weakref.ref(copy), whole))
        return copy

    def _check_guards(self, expression: str) -> None:
        self._guarded = [(copy, whole) for copy, whole in self._guarded if copy() is not None]
        for _, whole in self._guarded:
            for side, zone in (("before", whole[:GUARD_BYTES]), ("behind", whole[-GUARD_BYTES:])):
                if not bool((zone == GUARD).all()):
                    raise KernelError(
                        f"{expression}: wrote {side} a tensor of {len(whole) - 2 * GUARD_BYTES} bytes"
                    )


class RecordingLauncher(HostLauncher):
    """Notes the kernels that it launches, by their expressions, in :attr:`launched`."""

    def __init__(self, seed: int = 0, resident: int = 4) -> None:
        super().__init__(seed, resident)
        self.launched: list[str] = []

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        if grid:
            self.launched.append(expression)
        super().launch(source, expression, grid, block, args)


@functools.cache
def _mirror() -> Mirror:
    return Mirror(CupyLauncher(), torch.device("cuda", 0), torch.cuda.synchronize)


_one_at_a_time = threading.Lock()


class _HostKernel(ctypes.Structure):
    """``table.h``."""

    _fields_ = (("call", ctypes.c_void_p), ("parameters", ctypes.c_char_p))


@functools.cache
def _runtime() -> ctypes.CDLL:
    # Global: the kernels' libraries find its functions there.
    runtime = ctypes.CDLL(str(build_runtime(SANITIZER)), mode=ctypes.RTLD_GLOBAL)
    runtime.zenps_launch.restype = ctypes.c_char_p
    runtime.zenps_launch.argtypes = (
        ctypes.POINTER(_HostKernel),
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_uint64,
    )
    return runtime


@functools.cache
def _kernels(source: Path, expressions: tuple[str, ...]) -> dict[str, _HostKernel]:
    _runtime()
    library = ctypes.CDLL(str(build(source, expressions, SANITIZER)))
    table = (_HostKernel * len(expressions)).in_dll(library, "zenps_kernels")
    return dict(zip(expressions, table, strict=True))


def _words(args: Sequence[Tensor | int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(args))(*map(word_of, args))


def _check(expression: str, parameters: str, args: Sequence[Argument]) -> None:
    """Raises for arguments that a GPU would silently misread."""
    if len(args) != len(parameters):
        raise KernelError(f"{expression}: expected {len(parameters)} arguments, got {len(args)}")
    for place, (parameter, arg) in enumerate(zip(parameters, args, strict=True)):
        if not _fits(parameter, arg):
            given = f"{arg.dtype} {tuple(arg.shape)}" if isinstance(arg, Tensor) else arg
            if isinstance(arg, tuple):
                given = f"{len(arg)} words"
            raise KernelError(
                f"{expression}: argument {place} ({given}) does not fit a parameter '{parameter}'"
            )


def _fits(parameter: str, arg: Argument) -> bool:
    if isinstance(arg, tuple):
        return parameter == chr(ord("A") - 1 + len(arg)) and all(_fits("p", word) for word in arg)
    if parameter.isupper():
        return False
    if isinstance(arg, Tensor):
        fits = parameter == "p" or (parameter != "i" and int(parameter) % arg.element_size() == 0)
        return fits and arg.is_contiguous() and arg.device.type == "cpu"
    # A pointer may be given as its address: 0 where there is none.
    return -(1 << 63) <= arg < 1 << 63
