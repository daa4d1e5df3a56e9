"""Sparse COO tensors as tables of rows, and back."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from zenps.errors import TensorError
from zenps.kernels.base import Kernels, Rows

from ..core.request import table_shape


def as_table(tensor: Tensor) -> Rows:
    """A sparse COO tensor's row numbers ``[nnz]`` int64 and values ``[nnz, columns]``, contiguous.

    Raises:
        TensorError: of several sparse dimensions, an index lies outside its own.
    """
    _, columns = table_shape(tensor)
    indices, values = tensor._indices(), tensor._values().detach()
    # A sparse tensor of no dimensions has one row, and no index to say so.
    rows = indices[0] if tensor.sparse_dim() else indices.new_zeros(indices.shape[1])
    if tensor.sparse_dim() > 1:
        dims = tuple(tensor.shape[: tensor.sparse_dim()])
        try:
            rows = torch.from_numpy(np.ravel_multi_index(tuple(indices.numpy()), dims))
        except ValueError as error:
            raise TensorError(f"sparse indices of shape {dims}: {error}; check them against it") from None
    return rows.contiguous(), values.reshape(len(rows), columns).contiguous()


def as_sparse(rows: Tensor, values: Tensor, shape: torch.Size, sparse_dim: int) -> Tensor:
    """The inverse of :func:`as_table` for sorted unique ``rows``: a coalesced sparse COO tensor."""
    indices = rows.unsqueeze(0)[:sparse_dim]
    if sparse_dim > 1:
        indices = torch.stack(torch.unravel_index(rows, shape[:sparse_dim]))
    values = values.view(len(rows), *shape[sparse_dim:])
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def coalesced(tensor: Tensor, kernels: Kernels) -> Tensor:
    """A sparse COO tensor without duplicates; on the CPU, they are added in order of occurrence.

    Raises:
        TensorError: of several sparse dimensions, an index lies outside its own.
    """
    if not tensor.is_cpu:
        return tensor.detach().coalesce()
    rows, values = kernels.compact(*as_table(tensor))
    return as_sparse(rows, values, tensor.shape, tensor.sparse_dim())


def row_numbers(indices: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The row numbers ``[nnz]`` of sparse indices, on whichever device they lie, without waiting for it.

    Args:
        indices: int64 ``[len(dims), nnz]``.
        dims: the sparse dimensions.

    Returns:
        int64 ``[nnz]``, contiguous; and int64 ``[1]``, 1 where an index lies outside its own dimension. A
        sole dimension is checked by whoever reads the row numbers.
    """
    outside = torch.zeros(1, dtype=torch.int64, device=indices.device)
    if len(dims) == 1:
        return indices[0].contiguous(), outside
    rows = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for place, (index, size) in enumerate(zip(indices, dims, strict=True)):
        rows += index * math.prod(dims[place + 1 :])
        outside |= ((index < 0) | (index >= size)).any()
    return rows, outside
