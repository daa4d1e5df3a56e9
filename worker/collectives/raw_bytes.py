"""Tensors as bytes: a tensor of any dtype travels as uint8, and arrives with the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from zenps.errors import TensorError
from zenps.wire.tensors import flat

from ..core.request import check_dimensions, check_plain

DTYPES: Final = {
    str(dtype): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}
"""The dtypes that travel as bytes, by their name on the wire."""


def check_strided(tensor: object, name: str) -> None:
    """Checks that a tensor has bytes: strided, in memory, neither quantized by torch nor nested.

    Raises:
        TensorError: it is not a tensor, has no bytes, or has too many dimensions.
    """
    if not isinstance(tensor, Tensor):
        raise TensorError(
            f"{name}: expected a tensor, got {type(tensor).__name__}; leave it out, or send plain data by "
            "broadcast_object() or allgather_object()"
        )
    try:
        check_plain(tensor)
        check_dimensions(tensor)
    except TensorError as error:
        raise TensorError(f"{name}: {error}") from None
    if tensor.is_quantized:
        raise TensorError(f"{name}: expected a tensor of plain numbers, got {tensor.dtype}; use .int_repr()")
    if tensor.is_nested:
        raise TensorError(f"{name}: expected one tensor, got a nested one; use .unbind()")
    if tensor.layout != torch.strided:
        raise TensorError(f"{name}: expected a strided tensor, got {tensor.layout}; use .to_dense()")
    if tensor.is_meta:
        raise TensorError(
            f"{name}: expected a tensor with memory, got one on the meta device; use .to_empty()"
        )


def check_dtype(tensor: Tensor, name: str) -> None:
    """Checks that a tensor's dtype is one of :data:`DTYPES`.

    Raises:
        TensorError: it is not.
    """
    if str(tensor.dtype) not in DTYPES:
        names = ", ".join(dtype.removeprefix("torch.") for dtype in DTYPES)
        raise TensorError(f"{name}: dtype {tensor.dtype}: expected one of {names}")


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements of a strided tensor as uint8 ``[bytes]`` on the CPU, perhaps in its own memory."""
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return flat(whole).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Returns the tensor whose bytes ``data`` has, in the same memory.

    Args:
        data: uint8 of any shape, contiguous, on the CPU.
    """
    if not math.prod(shape):
        return data.new_empty(shape, dtype=dtype)
    return data.reshape(-1).view(dtype).view(torch.Size(shape))


def expanded_dimensions(tensor: Tensor) -> list[int]:
    """Returns the dimensions whose elements share one place in memory, as ``Tensor.expand`` makes them."""
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]
