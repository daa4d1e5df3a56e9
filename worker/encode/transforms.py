"""Sparse tensors in another form: by element, as Zen keys them, or dense, as BytePS takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from zenps.errors import ProtocolError
from zenps.kernels.base import Kernels
from zenps.partition.layout import check_rows

from ..core.communicator import Pending
from .sparse import as_sparse, as_table, coalesced, row_numbers
from .transfer import table_shape


class Converted(Pending):
    """The result of another tensor's round, in the form of the one that was given.

    Args:
        inner: the round.
        back: makes its result what the caller expects.
    """

    def __init__(self, inner: Pending, back: Callable[[Tensor], Tensor]) -> None:
        self.name = inner.name
        self._inner = inner
        self._back = back
        self._result: Tensor | None = None

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> Tensor:
        result = self._inner.wait()
        if self._result is None:
            self._result = self._back(result)
        return self._result


def convert(
    tensor: Tensor, keys: Literal["elements", "none"], kernels: Kernels
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A sparse tensor as it travels, and what makes a sparse tensor of the sum again.

    Args:
        tensor: sparse COO, coalesced or not, on any device.
        keys: ``elements``: with one dimension, and each element of a row under a key of its own. ``none``:
            strided; the sum then has the rows that are not all zero, and forgets which others were touched.
        kernels: for a tensor on the CPU.

    Raises:
        TensorError: an index lies outside the tensor.
    """
    summed, (rows, columns) = coalesced(tensor, kernels), table_shape(tensor)
    if keys == "none" and tensor.is_cpu:
        check_rows(as_table(summed)[0], max(rows, 1))
    if keys == "none":
        return summed.to_dense(), lambda pulled: _rows_of(pulled, tensor.shape, tensor.sparse_dim())
    if columns <= 1:  # its rows are elements
        return summed, lambda pulled: pulled
    return _by_element(summed), lambda pulled: _by_row(pulled, tensor.shape, tensor.sparse_dim())


def _by_element(tensor: Tensor) -> Tensor:
    rows, columns = table_shape(tensor)
    numbers, _ = row_numbers(tensor._indices(), tuple(tensor.shape[: tensor.sparse_dim()]))
    elements = (numbers.unsqueeze(1) * columns + torch.arange(columns, device=tensor.device)).view(-1)
    values = tensor._values().reshape(-1)
    return as_sparse(elements, values, torch.Size([rows * columns]), 1)


def _by_row(tensor: Tensor, shape: torch.Size, sparse_dim: int) -> Tensor:
    columns = shape[sparse_dim:].numel()
    elements = tensor._indices()[0]
    rows = elements[::columns] // columns
    whole = (rows.unsqueeze(1) * columns + torch.arange(columns, device=tensor.device)).view(-1)
    if not torch.equal(whole, elements):
        raise ProtocolError("payload", f"elements that make no whole rows of {columns}")
    return as_sparse(rows, tensor._values(), shape, sparse_dim)


def _rows_of(tensor: Tensor, shape: torch.Size, sparse_dim: int) -> Tensor:
    table = tensor.reshape(shape[:sparse_dim].numel(), shape[sparse_dim:].numel())
    rows = (table != 0).any(1).nonzero()[:, 0]
    return as_sparse(rows, table[rows], shape, sparse_dim)
