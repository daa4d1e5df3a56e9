"""Values of pushes: their checks, dequantization and quantization, for all reducers.

Sums are float32 or wider whatever the form in which values travel, and are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.codecs.values import VALUE_CODECS
from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE
from zenps.wire.fields import Dtype
from zenps.wire.messages import Push
from zenps.wire.tensors import DTYPES, check_size, tensor_bytes, tensor_from_bytes

from .base import Payload

Flat = NDArray[Any]
"""Values ``[n]`` in the dtype in which they are summed."""

# Dense sums are NumPy's: torch's overhead for a sum of 1 KB takes five times as long as NumPy's whole sum.
# But NumPy has no bfloat16, and is slow at float16.
NUMPY_DTYPES: dict[Dtype, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<") for name in ("float32", "float64", "int64", "uint8")
}
"""The dtypes that NumPy sums as they are; the others are summed as float32."""


def positions_and_values(push: Push, frames: Sequence[memoryview]) -> tuple[memoryview, memoryview]:
    """The two frames of a push whose rows are named by positions.

    Raises:
        ProtocolError: as for :func:`check_values`, or there are not two frames.
    """
    if len(frames) != 2:
        raise ProtocolError("payload", f"{len(frames)} frames after the envelope, expected 2")
    positions, values = frames
    check_values(push, values)
    return positions, values


def row_values_bytes(push: Push) -> int:
    """The most bytes that the values of one row take in the form in which they travel."""
    if push.values == "same":
        return push.columns * DTYPES[push.dtype].itemsize
    return VALUE_CODECS[push.values].size_bytes(1, push.columns)


def check_values(push: Push, values: memoryview) -> None:
    """Checks that a push does not contradict itself, and that its values are what it announces.

    Raises:
        ProtocolError: they are not.
    """
    if push.rows > push.span:
        raise ProtocolError("payload", f"{push.rows} rows in a span of {push.span}")
    if push.chunk >= push.chunks:
        raise ProtocolError("payload", f"chunk {push.chunk} of {push.chunks}, expected less")
    if push.average and not DTYPES[push.dtype].is_floating_point:
        raise ProtocolError("payload", f"an average of {push.dtype}, expected a floating-point dtype")
    if push.values == "same":
        return check_size(values, DTYPES[push.dtype], (push.rows, push.columns))
    if push.dtype != "float32":
        raise ProtocolError("payload", f"{push.dtype} as {push.values}: expected float32")
    expected = VALUE_CODECS[push.values].size_bytes(push.rows, push.columns)
    if values.nbytes != expected:
        got = f"{values.nbytes} bytes of {push.values} values"
        raise ProtocolError("payload", f"{got} for {push.rows} × {push.columns}, expected {expected}")


def dequantize(data: memoryview, push: Push, pool: BufferPool) -> Tensor:
    """Values ``[rows, columns]`` as float32, or in the dtype of the push where they travel as they are."""
    shape = (push.rows, push.columns)
    if push.values == "same":
        return tensor_from_bytes(data, DTYPES[push.dtype], shape)
    values = pool.empty(shape, torch.float32)
    VALUE_CODECS[push.values].decode(data, values)
    return values


def dequantize_flat(data: memoryview, push: Push, pool: BufferPool) -> Flat:
    """Values ``[rows * columns]`` in the dtype in which NumPy sums them, uncopied where that is their own."""
    if push.values == "same" and push.dtype in NUMPY_DTYPES:
        return np.frombuffer(data, NUMPY_DTYPES[push.dtype])
    values = dequantize(data, push, pool).view(-1)
    flat: Flat = values.to(ACCUMULATE[values.dtype]).numpy()
    return flat


def quantize(values: Tensor, push: Push, pool: BufferPool) -> memoryview:
    """Sums ``[rows, columns]`` in the form in which the values of ``push`` travel."""
    if push.values == "same":
        return tensor_bytes(values)
    codec = VALUE_CODECS[push.values]
    data = pool.empty((codec.size_bytes(*values.shape),), torch.uint8)
    codec.encode(values, data, push.step)
    return tensor_bytes(data)


def divide_and_quantize(sums: Flat, divisor: int, push: Push, pool: BufferPool) -> memoryview:
    """Sums ``[n]`` of one column, divided in place, in the form in which the values of ``push`` travel."""
    if divisor != 1:
        sums /= divisor
    if push.values != "same":
        return quantize(torch.from_numpy(sums)[:, None], push, pool)
    if push.dtype in NUMPY_DTYPES:
        return sums.data.cast("B")
    return tensor_bytes(torch.from_numpy(sums).to(DTYPES[push.dtype]))


def divisor_of(payloads: Sequence[Payload]) -> int:
    """The divisor of sums: 1, or for an average the number of ranks whose values are in them."""
    if not payloads[0].push.average:
        return 1
    return sum([len(payload.push.ranks) for payload in payloads if not payload.push.fragment])


def pushed_rows(payloads: Sequence[Payload]) -> int:
    """How many rows all ranks together have pushed."""
    return sum([payload.push.rows for payload in payloads])
