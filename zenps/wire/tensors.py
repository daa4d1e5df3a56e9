"""Conversion of tensors to frames and back: raw little-endian memory, copied only where necessary."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from zenps.errors import ProtocolError

from .fields import MAX_FRAGMENTS, Dtype

DTYPES: dict[Dtype, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "uint8": torch.uint8,
}

POSITION_BYTES = 8
"""What the position of a sparse tensor's row counts, when chunks are formed and bounded."""

# libzmq keeps smaller messages inside its receive buffer: at any address, and one message keeps the whole
# buffer alive.
RECEIVE_BUFFER_BYTES = 8192

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> Dtype:
    """The name of a supported dtype on the wire."""
    return _DTYPE_NAMES[dtype]


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor in one dimension, in the same memory where it is contiguous.

    Unlike the result of ``reshape(-1)`` it always has a stride of 1. A view of one element may have another,
    such as the first column of a batch of one, and torch would refuse to view its bytes.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, uncopied; it keeps the tensor alive."""
    return flat(tensor).view(torch.uint8).numpy().data


def copied_bytes(tensor: Tensor) -> bytes:
    """The elements of any strided CPU tensor, in order."""
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.detach().resolve_neg().contiguous()
    # Not by way of NumPy, which would take most of the time for a small tensor.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def cut_fragments(
    begin: int, end: int, most_rows: int, max_fragments: int = MAX_FRAGMENTS
) -> list[tuple[int, int]]:
    """Divides the rows from ``begin`` up to ``end`` into the fewest fragments of at most ``most_rows``.

    Their sizes differ by a row at most. There is one fragment if there are no rows. There are never more than
    ``max_fragments``; if necessary, fragments have more rows.
    """
    count = min(max(1, -(-(end - begin) // most_rows)), max_fragments)
    if count == 1:
        return [(begin, end)]
    return list(pairwise([begin + (end - begin) * number // count for number in range(count + 1)]))


def check_size(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Checks that ``data`` has the size of a tensor of ``shape`` and ``dtype``.

    Raises:
        ProtocolError: it has another size.
    """
    expected = math.prod(shape) * dtype.itemsize
    if data.nbytes != expected:
        raise ProtocolError(
            "payload", f"{data.nbytes} bytes of values for {tuple(shape)} {dtype}, expected {expected}"
        )


def tensor_from_bytes(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A CPU tensor on received memory, uncopied if it is large and aligned.

    Raises:
        ProtocolError: ``data`` has another size than ``shape`` and ``dtype`` need.
    """
    check_size(data, dtype, shape)
    if not data.nbytes:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    copied = data.readonly or data.nbytes <= RECEIVE_BUFFER_BYTES
    tensor = torch.frombuffer(bytearray(data) if copied else data, dtype=dtype)
    if tensor.data_ptr() % dtype.itemsize:
        tensor = tensor.clone()
    return tensor if len(shape) == 1 else tensor.view(tuple(shape))
