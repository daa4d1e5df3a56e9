"""Shared library of the compiled CPU kernels, loaded by ctypes: ``native.h`` says what its functions do.

Calls through ctypes release the GIL, and take about 1 µs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import c_int, c_int64, c_void_p
from typing import Final

from zenps.errors import ConfigError

LIBRARY: Final = "zenps.kernels.native._library"
"""Setuptools builds it as an extension module, so that it lies beside this file. Python never imports it."""

MISSING: Final = "the compiled kernels are missing: install a C compiler, and then zenps again (pip install)"

BITMAP, RADIX, NONE = 1, 2, 3


class Plan(ctypes.Structure):
    """``Plan`` of ``native.h``."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("parts", "dtype", "columns", "divisor", "threads", "method"),
            *("rows", "least", "most", "in_order", "rank_bytes", "unique", "sum_bytes"),
        )
    )
    parts: int
    dtype: int
    columns: int
    divisor: int
    threads: int
    method: int
    rows: int
    least: int
    most: int
    in_order: int
    rank_bytes: int
    unique: int
    sum_bytes: int


_SIGNATURES: Final = {
    "zenps_measure": (None, (c_void_p, c_void_p)),
    "zenps_rank": (c_int, (c_void_p, c_void_p, c_void_p)),
    "zenps_sum": (None, (c_void_p,) * 6),
    "zenps_place": (None, (c_void_p,) * 5),
}


@functools.cache
def find_library() -> str | None:
    """The path of the library; None where the package was installed without a C compiler."""
    spec = importlib.util.find_spec(LIBRARY)
    return spec.origin if spec else None


@functools.cache
def load_library(path: str | None = None) -> ctypes.CDLL:
    """The library, with the types of its functions declared.

    Args:
        path: of another build of it.

    Raises:
        ConfigError: it is missing.
    """
    found = path or find_library()
    if found is None:
        raise ConfigError("kernels.backend", "native", f"auto or torch, because {MISSING}")
    library = ctypes.CDLL(found)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
