"""Requests to synchronise a tensor, and their options."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from zenps.errors import TensorError, UsageError
from zenps.kernels.base import ACCUMULATE
from zenps.wire.messages import MAX_COLUMNS

# uint8 is for broadcasts, which carry any dtype as bytes.
_SUPPORTED = tuple(dtype for dtype in ACCUMULATE if dtype != torch.uint8)

# Half a character: Python's str may hold one, UTF-8 may not.
_SURROGATE = re.compile("[\ud800-\udfff]")

Purpose = Literal["gradient", "value", "broadcast", "control"]
"""What a tensor is to the training. A *gradient* may be quantized; a *value* arrives exactly; a *broadcast*
is pushed by one rank and pulled by all; *control* is what ranks tell one another."""


class Options(Struct, frozen=True):
    """How a tensor is synchronised. Rounds keep these, and never the tensor."""

    average: bool = False
    """Divide the sum by the number of ranks."""
    contributes: bool = True
    """Whether this rank's values count. If not, it pulls the sum of the others."""
    stands_for: tuple[int, ...] = ()
    """The other ranks of this host whose values are in this rank's (hierarchical reduction)."""
    priority: int = 0
    """The highest is sent first, where the scheme has priorities; other schemes send in order."""
    purpose: Purpose = "value"

    @property
    def is_reduction(self) -> bool:
        """True for tensors of the training itself: any backend may reduce them its own way.

        Broadcasts and control always go over servers.
        """
        return self.purpose in ("gradient", "value")


class Request(NamedTuple):
    """A tensor to synchronise.

    Attributes:
        tensor: on the CPU or a CUDA device, strided or sparse COO.
        name: the same on all ranks.
    """

    tensor: Tensor
    name: str
    options: Options = Options()


def check_request(request: Request) -> None:
    """Refuses what cannot be synchronised, before anything is sent.

    Raises:
        UsageError: the name is no string of 1 to 1024 characters that UTF-8 can write, or the priority is no
            integer.
        TensorError: the tensor has an unsupported device, layout or dtype, or is an average of integers.
    """
    tensor, name, options = request
    _check_name(name)
    if options.is_reduction:
        _check_tensor(tensor, options.average)
    _check_priority(name, options.priority)


# Callers need not be typed.


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= 1024 or _SURROGATE.search(name):
        raise UsageError(f"tensor name {name!r:.60}: expected a string of 1 to 1024 characters")


def _check_priority(name: str, priority: object) -> None:
    if not isinstance(priority, int):
        raise UsageError(f"tensor {name!r}: priority {priority!r:.60}: expected an integer")


def _check_tensor(tensor: object, average: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise TensorError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TensorError(f"device {tensor.device}: expected cpu or cuda; move it with .cpu()")
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        raise TensorError(f"layout {tensor.layout}: expected strided or sparse COO; use .to_sparse_coo()")
    if tensor.is_sparse and table_shape(tensor)[1] > MAX_COLUMNS:
        raise TensorError(f"rows of {table_shape(tensor)[1]} elements: expected at most {MAX_COLUMNS}")
    if tensor.dtype not in _SUPPORTED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SUPPORTED)
        raise TensorError(f"dtype {tensor.dtype}: expected one of {names}")
    if average and not tensor.dtype.is_floating_point:
        raise TensorError(f"dtype {tensor.dtype} cannot be averaged exactly; pass average=False")


def table_shape(tensor: Tensor) -> tuple[int, int]:
    """A sparse tensor's shape as a table, (rows, columns): sparse dimensions flattened, then dense ones."""
    sparse_dim = tensor.sparse_dim()
    return math.prod(tensor.shape[:sparse_dim]), math.prod(tensor.shape[sparse_dim:])
