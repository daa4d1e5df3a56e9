"""Selection by magnitude on the device: wraps ``cuda/threshold_compact.cu``, and chooses, samples and counts.

The same selections as :mod:`zenps.kernels.native.magnitudes` makes on the CPU. NaN is above all magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.errors import TensorError

from .bitmap_codec import BITMAP_TILE
from .launcher import BLOCK, Launcher, check_on_device, scan_state
from .rows import DeviceRows
from .sources import number_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of a gradient; its residual is float32."""

# constexprs of cuda/threshold_compact.cu
LANES = 4
TILE = 4096


def threshold_compact(
    launcher: Launcher,
    residual: Tensor,
    gradient: Tensor | None,
    threshold: float | Tensor,
    bounds: tuple[int, int],
    capacity: int,
    takes: bool = False,
    on_added: Callable[[], None] | None = None,
) -> DeviceRows:
    """Adds a gradient to its residual, and finds the elements of the sum with |element| ≥ ``threshold``.

    Args:
        residual: float32 ``[n]`` on the device; changed.
        gradient: of one of :data:`DTYPES`, ``[n]`` on the device; None: the residual alone is searched.
        threshold: rounded to float32; or float32 of one element on the device.
        bounds: the first element that is searched, and the one behind the last.
        capacity: the number of elements that the output has room for.
        takes: True to leave 0 in the residual where an element was written.
        on_added: called once the gradient is added: after a later failure the caller must not add it again.

    Returns:
        positions, int64 ``[capacity]``: the elements' indices; and their sums ``[capacity, 1]``.

    Raises:
        TensorError: wrong dtypes, dimensions or sizes.
    """
    check_on_device("a residual", residual, (torch.float32,), 1)
    if gradient is not None:
        check_on_device("a dense gradient", gradient, DTYPES, 1)
        if len(gradient) != len(residual):
            raise TensorError(f"a dense gradient of {len(gradient)} elements: expected {len(residual)}")
        gradient = _aligned(gradient)
    assert residual.data_ptr() % (LANES * residual.itemsize) == 0, "it begins its own memory"
    device, size = residual.device, len(residual)
    tiles, listed = -(-size // TILE), -(-size // BITMAP_TILE)
    indices = torch.empty(capacity, dtype=torch.int64, device=device)
    values = torch.empty(capacity, 1, dtype=torch.float32, device=device)
    marks = torch.empty(tiles * TILE // 8, dtype=torch.uint8, device=device)
    state = scan_state(listed + 1, device)
    # In zeroed memory: if there are no tiles, no kernel writes the count.
    count = state[-1:]
    least = (threshold, 0) if isinstance(threshold, Tensor) else (0, _bits(threshold))
    name = number_name(torch.float32 if gradient is None else gradient.dtype)
    marked = (0 if gradient is None else gradient, residual, size, *bounds, *least, marks)
    launcher.launch("threshold_compact", f"mark_elements<{name}>", tiles, BLOCK, marked)
    if on_added is not None:
        on_added()
    args = (state, marks, residual, size, int(takes), capacity, indices, values, count)
    launcher.launch("threshold_compact", "list_marked", listed, BLOCK, args)
    return DeviceRows(indices, values, count)


def greatest(values: Tensor, most: int) -> Tensor:
    """The numbers of the ``most`` elements of the greatest magnitude, ascending; of equal ones the first."""
    order = _magnitudes(values).sort(descending=True, stable=True).indices
    return order[:most].sort().values


def sample(values: Tensor, rank: int) -> Tensor:
    """The magnitude that ``rank`` others precede in descending order, or the least: one element, float32."""
    return _magnitudes(values).topk(min(rank + 1, len(values))).values[-1:]


def count(values: Tensor, edges: NDArray[np.floating[Any]]) -> Tensor:
    """How many elements have |element| ≥ each of ``edges``, which ascend from 0 or more.

    It waits for the device, which tells how many reach the first edge.
    """
    magnitudes = _magnitudes(values)
    # Few elements reach the first edge. Its rounding to their dtype cannot leave one out.
    few = magnitudes[magnitudes >= float(edges[0])].double()
    ascending = torch.from_numpy(edges.astype(np.float64)).to(values.device)
    reached = torch.bucketize(few, ascending, right=True)
    exactly = torch.bincount(reached, minlength=len(edges) + 1)
    return exactly.flip(0).cumsum(0).flip(0)[1:]


def _magnitudes(values: Tensor) -> Tensor:
    return values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, at an address where packs begin."""
    return tensor if tensor.data_ptr() % (LANES * tensor.itemsize) == 0 else tensor.clone()


def _bits(threshold: float) -> int:
    """The bits of a float32 bound; a bound that is not greater than 0 excludes nothing."""
    with np.errstate(over="ignore"):
        return int(np.float32(threshold).view(np.int32)) if threshold > 0 else 0
