"""Sum or average of one tensor in flight, with integers divided as Horovod and BytePS do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zenps import worker
from zenps.errors import TensorError
from zenps.worker.collectives.raw_bytes import DTYPES
from zenps.worker.core.request import NARROW, Options, Request, describe
from zenps.worker.process import PROCESS


class Reduction:
    """A sum or average over all ranks that has begun.

    Args:
        tensor: as :func:`zenps.push_pull_async` takes it.
        name: on the wire.
        average: divide by the number of ranks. Integers are summed as int64, so that the sum of narrow ones
            does not wrap before it is divided, and rounded towards zero.
        priority: as :func:`zenps.push_pull_async` takes it.

    Attributes:
        pending: the round.

    Raises:
        TensorError, UsageError: as :func:`zenps.push_pull_async`.
    """

    def __init__(self, tensor: Tensor, name: str, *, average: bool, priority: int = 0) -> None:
        self._dtype = tensor.dtype
        self._divides = average and not tensor.is_floating_point()
        tensor = tensor.detach()
        if not self._divides or tensor.dtype not in NARROW:
            self.pending = worker.push_pull_async(tensor, name, average and not self._divides, priority)
            return
        # Ranks with different integer dtypes must still fail, although all of them push int64.
        options = Options(priority=priority, given=describe(tensor))
        self.pending = PROCESS.world.begin(Request(tensor.to(torch.int64), name, options))

    def done(self) -> bool:
        """Returns whether :meth:`wait` would return at once."""
        return worker.poll(self.pending)

    def wait(self) -> Tensor:
        """Returns a new tensor. Errors are those of :func:`zenps.push_pull`."""
        result = worker.synchronize(self.pending)
        if not self._divides:
            return result
        return result.div(worker.size(), rounding_mode="trunc").to(self._dtype)


def check_in_place(tensors: Iterable[Tensor]) -> None:
    """Checks that results can be written to tensors, so that whoever has these sees them.

    Raises:
        TensorError: one is sparse. ``gradient.data`` of a sparse gradient, for example, is another tensor.
    """
    if any(tensor.is_sparse for tensor in tensors):
        raise TensorError(
            "in place: expected dense tensors, got a sparse one; use a call that returns a new tensor, and "
            "assign that, as in p.grad = allreduce(p.grad)"
        )


def description(tensor: Tensor, average: bool) -> list[Any]:
    """Returns as plain data what a rank needs to push zeros for a tensor: see :func:`as_zeros`."""
    return [str(tensor.dtype), list(tensor.shape), tensor.sparse_dim() if tensor.is_sparse else 0, average]


def as_zeros(described: list[Any]) -> Tensor:
    """Returns zeros in the dtype, shape and layout of a described tensor; a sparse one has no row."""
    name, shape, sparse_dim, _ = described
    dtype = DTYPES[name]
    if not sparse_dim:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device="cpu")
    values = torch.empty((0, *shape[sparse_dim:]), dtype=dtype, device="cpu")
    return torch.sparse_coo_tensor(indices, values, shape, device="cpu", check_invariants=False)
