"""The CUDA sources and every specialisation of their kernels that a wrapper may launch.

One list for all compilers: CuPy on a GPU, NVRTC in CI for architectures that are not there, and g++, which
runs the same sources on the CPU in ``tests/cuda``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Final

import torch

__all__ = ["EXPRESSIONS", "OPTIONS", "digest", "folder", "number_name", "position_name", "source_text"]

_NUMBERS: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "int64",
}
_POSITIONS: Final = {torch.int32: "int32", torch.int64: "int64"}

OPTIONS: Final = ("--std=c++17",)
"""What every compiler is told; the folder of the sources comes as ``-I``."""


def number_name(dtype: torch.dtype) -> str:
    """The C++ name of a gradient's dtype in ``cuda/common.cuh``; KeyError: it has none."""
    return _NUMBERS[dtype]


def position_name(dtype: torch.dtype) -> str:
    """The C++ name of int32 or int64, for positions and row numbers."""
    return _POSITIONS[dtype]


def _specialise(pattern: str, *choices: tuple[object, ...]) -> tuple[str, ...]:
    """``pattern`` with its ``{}`` filled in by every combination of ``choices``."""
    return tuple(pattern.format(*combination) for combination in product(*choices))


_ROWS = _POSITION = tuple(_POSITIONS.values())

EXPRESSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "place": (
        *_specialise("place_rows<{}, {}>", _ROWS, _POSITION),
        *_specialise("unplace_rows<{}>", _POSITION),
        *_specialise("find_cuts<{}>", _POSITION),
    ),
}
"""The stem of each source in ``cuda/`` → the name expressions of its kernels."""


@functools.cache
def folder() -> Path:
    """Where the sources lie: inside the installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside, beside = package / "cuda", package.parent / "cuda"
    return inside if inside.is_dir() else beside


def source_text(source: str) -> str:
    """The text of ``cuda/<source>.cu``."""
    return (folder() / f"{source}.cu").read_text(encoding="utf-8")


@functools.cache
def digest() -> str:
    """Names the present state of all sources and headers; caches of compiled kernels key on it."""
    hashed = hashlib.sha256()
    for path in sorted(folder().glob("*.cu*")):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]
