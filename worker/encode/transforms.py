"""Transforms of a tensor before and after its transfer: by element (Zen), dense (BytePS), to the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from zenps.errors import ProtocolError
from zenps.kernels.base import Kernels
from zenps.partition.layout import check_rows
from zenps.schemes.base import Keys

from ..core.request import table_shape
from ..core.transfer import Transform
from .sparse import as_sparse, as_table, coalesced, row_numbers


def checked_sum(tensor: Tensor, kernels: Kernels) -> Tensor:
    """Sums the duplicate rows of a sparse tensor whose indices all lie inside its shape.

    Raises:
        TensorError: an index lies outside the shape.
    """
    rows, _ = table_shape(tensor)
    if not tensor.is_cpu:  # before it is coalesced, which makes valid indices of some that are not
        check_rows(row_numbers(tensor._indices(), tuple(tensor.shape[: tensor.sparse_dim()])), max(rows, 1))
    result = coalesced(tensor, kernels)
    if tensor.is_cpu:
        check_rows(as_table(result)[0], max(rows, 1))
    return result


class ToHost(Transform):
    """Copies a tensor from a device to the CPU, where it is reduced."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    def undo(self, result: Tensor) -> Tensor:
        return result.to(self._device)


class Densified(Transform):
    """Converts a sparse tensor to a strided one. The result has only the rows that are not all zero, because
    the strided sum does not tell which other rows were touched.

    Args:
        tensor: sparse COO, on any device.
        kernels: for a tensor on the CPU.
    """

    def __init__(self, tensor: Tensor, kernels: Kernels) -> None:
        self._shape, self._sparse_dim = tensor.shape, tensor.sparse_dim()
        self._kernels = kernels

    def apply(self, tensor: Tensor) -> Tensor:
        return checked_sum(tensor, self._kernels).to_dense()

    def undo(self, result: Tensor) -> Tensor:
        table = result.reshape(
            self._shape[: self._sparse_dim].numel(), self._shape[self._sparse_dim :].numel()
        )
        rows = (table != 0).any(1).nonzero()[:, 0]
        return as_sparse(rows, table[rows], self._shape, self._sparse_dim)


class ByElement(Transform):
    """Flattens a sparse tensor to one dimension, so that each element of a row has a key of its own.

    Args:
        tensor: sparse COO, on any device.
        kernels: for a tensor on the CPU.
        is_elastic: True if elements of a row may be missing in a sum, where they become 0: if a worker is
            lost that alone has pushed the row, one server may have its push and another not.
    """

    def __init__(self, tensor: Tensor, kernels: Kernels, *, is_elastic: bool = False) -> None:
        self._shape, self._sparse_dim = tensor.shape, tensor.sparse_dim()
        self._rows, self._columns = table_shape(tensor)
        self._kernels = kernels
        self._is_elastic = is_elastic

    def apply(self, tensor: Tensor) -> Tensor:
        summed = checked_sum(tensor, self._kernels)
        if self._columns <= 1:  # each row is one element
            return summed
        numbers = row_numbers(summed._indices(), tuple(self._shape[: self._sparse_dim]))
        within = torch.arange(self._columns, device=summed.device)
        elements = (numbers.unsqueeze(1) * self._columns + within).view(-1)
        size = torch.Size([self._rows * self._columns])
        return as_sparse(elements, summed._values().reshape(-1), size, 1)

    def undo(self, result: Tensor) -> Tensor:
        columns = self._columns
        if columns <= 1:
            return result
        elements = result._indices()[0]
        rows = elements[::columns] // columns
        whole = (rows.unsqueeze(1) * columns + torch.arange(columns, device=result.device)).view(-1)
        if torch.equal(whole, elements):
            return as_sparse(rows, result._values(), self._shape, self._sparse_dim)
        if not self._is_elastic:
            raise ProtocolError("payload", f"elements that do not form whole rows of {columns}")
        rows, places = torch.unique_consecutive(elements // columns, return_inverse=True)
        values = result._values().new_zeros((len(rows), columns))
        values[places, elements % columns] = result._values()
        return as_sparse(rows, values, self._shape, self._sparse_dim)


def wire_transforms(
    keys: Keys, tensor: Tensor, kernels: Kernels, *, is_elastic: bool = False
) -> list[Transform]:
    """Returns the transforms that a scheme applies to a tensor before it is encoded; none to a strided one.

    Args:
        keys: what positions count in the scheme.
        tensor: on any device.
        kernels: for a tensor on the CPU.
        is_elastic: as for :class:`ByElement`.
    """
    if not tensor.is_sparse or keys == "rows":
        return []
    if keys == "elements":
        return [ByElement(tensor, kernels, is_elastic=is_elastic)]
    return [Densified(tensor, kernels)]
