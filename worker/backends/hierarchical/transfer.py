"""Transfer of one tensor on a host: a rank's contribution, and its format in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from msgspec import field
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.kernels.base import ACCUMULATE, Kernels
from zenps.partition.layout import check_rows
from zenps.wire.tensors import POSITION_BYTES, tensor_from_bytes

from ...core.pending import Pending
from ...core.request import table_shape
from ...core.statistics import Progress, Report
from ...core.transfer import SuppliedTransfer, dense_bytes
from ...encode.sparse import as_sparse, as_table
from ..negotiated_rounds import NegotiatedRound


class Payload(NamedTuple):
    """The rows and values of a contribution, of a sum, or of a chunk of either; on the CPU.

    Attributes:
        rows: row numbers of a sparse tensor, int64 ``[n]``; empty for a strided one.
        values: ``[n, columns]`` of a sparse tensor; all elements of a strided one, ``[numel]``, or in the
            tensor's own shape until they are copied.
    """

    rows: Tensor
    values: Tensor

    def copy_(self, other: Payload) -> Payload:
        """Copies ``other`` into this memory and dtype; returns itself."""
        self.rows.copy_(other.rows)
        self.values.view(other.values.shape).copy_(other.values)
        return self

    def slice(self, begin: int, end: int) -> Payload:
        """Returns some rows of a sparse tensor, or elements of a strided one, on the same memory."""
        return Payload(self.rows[begin:end], self.values[begin:end])


class Form(NamedTuple):
    """Shape, dtype and layout of a tensor; the same on all ranks.

    Attributes:
        shape, dtype: of the tensor.
        sparse_dim: -1 if the tensor is strided.
    """

    shape: torch.Size
    dtype: torch.dtype
    sparse_dim: int

    def values_shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of a payload's values."""
        if self.sparse_dim < 0:
            return (self.shape.numel(),)
        return rows, math.prod(self.shape[self.sparse_dim :])

    def size_bytes(self, rows: int) -> int:
        """Returns the size of a payload in memory."""
        return rows * POSITION_BYTES + math.prod(self.values_shape(rows)) * self.dtype.itemsize

    def view(self, memory: Tensor, rows: int) -> Payload:
        """Returns an uninitialised payload on ``memory``, uint8 ``[size_bytes]``."""
        begin = rows * POSITION_BYTES
        return Payload(
            memory[:begin].view(torch.int64), memory[begin:].view(self.dtype).view(self.values_shape(rows))
        )

    def read(self, memory: memoryview, rows: int) -> Payload:
        """Returns the payload that lies in ``memory``.

        Raises:
            ProtocolError: ``memory`` has another size than the payload.
        """
        begin = rows * POSITION_BYTES
        return Payload(
            tensor_from_bytes(memory[:begin], torch.int64, (rows,)),
            tensor_from_bytes(memory[begin:], self.dtype, self.values_shape(rows)),
        )

    def without_rows(self) -> Tensor:
        """Returns a tensor as :func:`sum_of` does, but whose values take no memory and mean nothing."""
        dtype = ACCUMULATE[self.dtype]
        if self.sparse_dim < 0:
            return torch.zeros((), dtype=dtype, device="cpu").expand(self.shape)
        rows = torch.empty(0, dtype=torch.int64, device="cpu")
        values = torch.empty(self.values_shape(0), dtype=dtype, device="cpu")
        return self.tensor(Payload(rows, values), is_coalesced=True)

    def tensor(self, payload: Payload, *, is_coalesced: bool) -> Tensor:
        """Returns the tensor on the memory of ``payload``, in the dtype of its values."""
        if self.sparse_dim < 0:
            return payload.values.view(self.shape)
        tensor = as_sparse(payload.rows, payload.values, self.shape, self.sparse_dim)
        return tensor if is_coalesced else tensor._coalesced_(False)


def contribution_of(tensor: Tensor, kernels: Kernels, pool: BufferPool | None) -> Payload:
    """Returns a rank's contribution: duplicate rows are summed.

    Args:
        tensor: on the CPU.
        kernels: for the sum.
        pool: for a copy of a strided tensor, which its caller may change meanwhile; None: no copy.

    Raises:
        TensorError: an index lies outside the tensor.
    """
    if not tensor.is_sparse:
        values = tensor.detach()
        if pool is not None:
            values = pool.empty((tensor.numel(),), tensor.dtype)
            values.view(tensor.shape).copy_(tensor.detach())
        return Payload(torch.empty(0, dtype=torch.int64, device="cpu"), values)
    rows, values = as_table(tensor)
    check_rows(rows, max(table_shape(tensor)[0], 1))
    return Payload(*kernels.compact(rows, values))


def sum_of(contributions: Sequence[Payload], form: Form, pool: BufferPool) -> Tensor:
    """Returns the tensor that the leader pushes for its host, given the contributions in rank order.

    It has the dtype in which sums are accumulated, so that only the final sum is rounded. A sparse tensor is
    not coalesced: compaction for the servers adds rows in order of occurrence.
    """
    dtype = ACCUMULATE[form.dtype]
    if form.sparse_dim < 0:
        total = pool.empty((form.shape.numel(),), dtype)
        total.copy_(contributions[0].values.view(-1))
        for each in contributions[1:]:
            total += each.values.view(-1)
        return total.view(form.shape)
    rows = torch.cat([each.rows for each in contributions])
    values = pool.empty(form.values_shape(len(rows)), dtype)
    torch.cat([each.values.to(dtype) for each in contributions], out=values)
    return form.tensor(Payload(rows, values), is_coalesced=len(contributions) == 1)


class HostTransfer(SuppliedTransfer):
    """A tensor that the ranks of a host reduce.

    Args:
        form: of the tensor.

    Attributes:
        over_servers: report of the leader's round over servers; empty at followers.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.over_servers = Report()
        self._form = form

    def report(self, progress: Progress) -> Report:
        return Report(
            pushed_bytes=self.over_servers.pushed_bytes,
            pulled_bytes=self.over_servers.pulled_bytes,
            dense_bytes=dense_bytes(self._form.shape.numel(), self._form.dtype.itemsize),
            over="host",
        )


class HostRound(NegotiatedRound, kw_only=True):
    """A tensor in flight on a host."""

    transfer: HostTransfer
    form: Form
    contribution: Payload
    step: int = -1
    """How many negotiations of the tensor were before; all ranks count alike."""
    numbers: dict[int, int] = field(default_factory=dict)
    """At the leader: each follower's number of this round, by rank."""
    are_dropped: list[bool] = field(default_factory=list)
    """At the leader: whether each rank of the host throws its gradient away; set with their contributions."""
    pushed: Pending | None = None
    """The leader's round over servers."""

    def drop_contribution(self) -> None:
        """Frees its memory; a slice without elements would keep it until the round ends."""
        rows, values = self.contribution
        self.contribution = Payload(rows.new_empty(0), values.new_empty(0))
