"""Shared library of the compiled CPU kernels, loaded by ctypes: ``native.h`` says what its functions do.

Calls through ctypes release the GIL, and take about 1 µs.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

ADVICE: Final = (
    "install a C compiler, such as gcc, and then ZenPS again; where there is one, pip install -v shows why "
    "it failed"
)
"""What to do where the library was not built, or cannot be loaded."""

VERSION: Final = 2
"""``ZENPS_VERSION`` of ``native.h``."""

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
    "zenps_version": (c_int64, ()),
    "zenps_measure": (None, (c_void_p, c_void_p)),
    "zenps_rank": (c_int, (c_void_p, c_void_p, c_void_p)),
    "zenps_sum": (None, (c_void_p,) * 6),
    "zenps_place": (None, (c_void_p,) * 5),
    "zenps_set_bits": (c_int64, (c_void_p, c_int64, c_void_p, c_int64)),
    "zenps_mark_bits": (c_int, (c_void_p, c_int64, c_void_p, c_int64)),
    "zenps_look_up": (c_int64, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p)),
    "zenps_permute": (c_int64, (c_void_p, c_int64, c_void_p, c_int64, c_void_p)),
    "zenps_shift": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p)),
    "zenps_find": (c_int64, (c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64)),
    "zenps_find_greatest": (c_int64, (c_int64, c_void_p, *(c_int64,) * 3, c_void_p, c_void_p, c_int64)),
    "zenps_sample": (c_int64, (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "zenps_count_edges": (None, (c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p)),
}


def find_library() -> str | None:
    """The path of the library; None where the package was installed without a C compiler.

    Setuptools builds it as an extension module, so that it lies beside this file. Python never imports it.
    """
    paths = (Path(__file__).with_name(f"_library{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((str(path) for path in paths if path.exists()), None)


@functools.cache
def load_library(path: str) -> ctypes.CDLL:
    """The library at ``path``, with the types of its functions declared.

    Raises:
        ImportError: this machine cannot load it, or it was built from other sources than those beside it.
    """
    try:
        library = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ImportError(str(error)) from error
    if (version := library.zenps_version()) != VERSION:
        raise ImportError(f"{path} has version {version}, expected {VERSION}")
    return library


@functools.cache
def open_library() -> ctypes.CDLL | str:
    """The library of this installation; or what is wrong with it: a predicate such as ``were not built``."""
    path = find_library()
    if path is None:
        return "were not built"
    try:
        return load_library(path)
    except ImportError as error:
        return f"cannot be loaded ({error})"


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The library of this installation; None where it was not built, or cannot be loaded."""
    opened = open_library()
    return None if isinstance(opened, str) else opened
