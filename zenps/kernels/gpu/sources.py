"""CUDA sources, and the template specialisations of their kernels that wrappers launch.

All compilers use this list: CuPy on a GPU, NVRTC in CI for architectures without a GPU there, and g++,
which builds the same sources for the CPU in ``tests/cuda``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Final

import torch

_NUMBERS: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "int64",
}
_POSITIONS: Final = {torch.int32: "int32", torch.int64: "int64"}

OPTIONS: Final = ("--std=c++17",)
"""Options of every compiler; the folder of the sources is added as ``-I``."""


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

_WORDS: Final = {16: "Pack<uint32, 4>", 8: "uint64", 4: "uint32", 2: "uint16", 1: "uint8"}


def word_name(word_bytes: int) -> str:
    """The C++ name of a word of that many opaque bytes."""
    return _WORDS[word_bytes]


def _packed(pattern: str, dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """``pattern`` with each dtype's name, and each number of lanes that fits a load of 16 bytes."""
    return tuple(
        pattern.format(number_name(dtype), width // dtype.itemsize)
        for dtype in dtypes
        for width in _WORDS
        if width >= dtype.itemsize
    )


_SUMMED_WIDER = (torch.float16, torch.bfloat16)

EXPRESSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "place": _specialise("place_rows<{}, {}>", _ROWS, _POSITION),
    "radix_sort": _specialise("radix_sort<{}>", _POSITION),
    "sort_compact": (
        *_specialise("sort_segments<{}>", _POSITION),
        *_packed("reduce_runs<{}, {}>", _NUMBERS),
    ),
    "bitmap_compact": (
        *_specialise("mark_positions<{}>", _POSITION),
        *_specialise("number_bits<{}>", _POSITION),
        *_specialise("find_targets<{}>", _POSITION),
        *_packed("put_first<{}, {}>", (*_SUMMED_WIDER, torch.float32)),
        *_packed("add_others<{}, {}>", (*_SUMMED_WIDER, torch.float32)),
        *_packed("round_sums<{}, {}>", _SUMMED_WIDER),
    ),
    "bitmap_codec": (
        *_specialise("encode_bitmaps<{}>", _POSITION),
        "decode_bitmap",
        *_specialise("encode_coo<{}, {}>", _POSITION, _POSITION),
        *_specialise("decode_coo<{}>", _POSITION),
    ),
    "scatter": _specialise("gather_rows<{}, {}>", tuple(_WORDS.values()), _POSITION),
    "threshold_compact": (
        *(f"mark_elements<{_NUMBERS[dtype]}>" for dtype in (*_SUMMED_WIDER, torch.float32)),
        "list_marked",
    ),
}
"""The stem of each source in ``cuda/`` → the name expressions of its kernels."""


@functools.cache
def folder() -> Path:
    """The folder of the sources."""
    return Path(__file__).parents[2] / "cuda"


def source_text(source: str) -> str:
    """The text of ``cuda/<source>.cu``."""
    return (folder() / f"{source}.cu").read_text(encoding="utf-8")


@functools.cache
def digest() -> str:
    """A hash of all sources and headers; caches of compiled kernels use it as a key."""
    hashed = hashlib.sha256()
    for path in sorted(folder().glob("*.cu*")):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()[:16]
