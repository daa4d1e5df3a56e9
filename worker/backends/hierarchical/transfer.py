"""Transfer of one tensor on a host: what a rank gives, and how it lies in shared memory."""

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
from zenps.wire.messages import POSITION_BYTES
from zenps.wire.tensors import tensor_from_bytes

from ...core.pending import Pending
from ...core.request import table_shape
from ...core.statistics import Progress, Report
from ...core.transfer import Brought, dense_bytes
from ...encode.sparse import as_sparse, as_table
from ..negotiated_rounds import NegotiatedRound


class Part(NamedTuple):
    """A tensor on the CPU, as ranks of one host hand it on.

    Attributes:
        rows: of a sparse one, the numbers of its rows, int64 ``[n]``; of a strided one none.
        values: ``[n, columns]``; of a strided one all elements, ``[numel]``, or in its own shape until they
            are copied.
    """

    rows: Tensor
    values: Tensor

    def copy(self, pool: BufferPool) -> Part:
        """Of its own memory."""
        values = pool.empty(tuple(self.values.shape), self.values.dtype)
        return Part(torch.empty_like(self.rows), values).copy_(self)

    def copy_(self, other: Part) -> Part:
        """Becomes ``other``, in its own dtype; returns itself."""
        self.rows.copy_(other.rows)
        self.values.view(other.values.shape).copy_(other.values)
        return self

    def cut(self, begin: int, end: int) -> Part:
        """Some of its rows, or of a strided one's elements: on the same memory."""
        return Part(self.rows[begin:end], self.values[begin:end])


class Form(NamedTuple):
    """What a tensor is; the same on all ranks.

    Attributes:
        shape, dtype: its own.
        sparse_dim: -1 of a strided one.
    """

    shape: torch.Size
    dtype: torch.dtype
    sparse_dim: int

    def values_shape(self, rows: int) -> tuple[int, ...]:
        """That of a part's values."""
        if self.sparse_dim < 0:
            return (self.shape.numel(),)
        return rows, math.prod(self.shape[self.sparse_dim :])

    def size_bytes(self, rows: int) -> int:
        """What a part takes in memory."""
        return rows * POSITION_BYTES + math.prod(self.values_shape(rows)) * self.dtype.itemsize

    def place(self, memory: Tensor, rows: int) -> Part:
        """A part of so many rows, uninitialised, on uint8 ``[size_bytes]``."""
        begin = rows * POSITION_BYTES
        return Part(
            memory[:begin].view(torch.int64), memory[begin:].view(self.dtype).view(self.values_shape(rows))
        )

    def read(self, memory: memoryview, rows: int) -> Part:
        """A part, on this memory.

        Raises:
            ProtocolError: it takes another number of bytes.
        """
        begin = rows * POSITION_BYTES
        return Part(
            tensor_from_bytes(memory[:begin], torch.int64, (rows,)),
            tensor_from_bytes(memory[begin:], self.dtype, self.values_shape(rows)),
        )

    def tensor(self, part: Part, *, is_coalesced: bool) -> Tensor:
        """On the part's memory, in the dtype of its values."""
        if self.sparse_dim < 0:
            return part.values.view(self.shape)
        tensor = as_sparse(part.rows, part.values, self.shape, self.sparse_dim)
        return tensor if is_coalesced else tensor._coalesced_(False)


def part_of(tensor: Tensor, kernels: Kernels, pool: BufferPool | None) -> Part:
    """What a rank gives: duplicates are summed.

    Args:
        tensor: on the CPU.
        kernels: for the sum.
        pool: for a copy of a strided one, which the caller may outrun by changing it; None: no copy.

    Raises:
        TensorError: an index lies outside the tensor.
    """
    if not tensor.is_sparse:
        values = tensor.detach()
        if pool is not None:
            values = pool.empty((tensor.numel(),), tensor.dtype)
            values.view(tensor.shape).copy_(tensor.detach())
        return Part(torch.empty(0, dtype=torch.int64, device="cpu"), values)
    rows, values = as_table(tensor)
    check_rows(rows, max(table_shape(tensor)[0], 1))
    return Part(*kernels.compact(rows, values))


def added(parts: Sequence[Part], form: Form, pool: BufferPool) -> Tensor:
    """What a host pushes for its ranks, whose parts are given in rank order.

    A sparse one is not coalesced: whoever compacts it for servers adds rows in order of occurrence. Narrow
    values are widened to the dtype in which sums are accumulated, so that only the last sum is rounded.
    """
    wide = ACCUMULATE[form.dtype]
    if form.sparse_dim < 0:
        total = pool.empty((form.shape.numel(),), wide)
        total.copy_(parts[0].values.view(-1))
        for part in parts[1:]:
            total += part.values.view(-1)
        return total.view(form.shape)
    rows = torch.cat([part.rows for part in parts])
    values = pool.empty(form.values_shape(len(rows)), wide)
    torch.cat([part.values.to(wide) for part in parts], out=values)
    return form.tensor(Part(rows, values), is_coalesced=len(parts) == 1)


class HostTransfer(Brought):
    """A tensor that the ranks of a host reduce.

    Args:
        form: what it is.

    Attributes:
        over_servers: what the leader's round over servers has moved for this host.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.rows_given = 0
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
    part: Part
    """What this rank gives."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Of this round, among those of each rank that the leader stands for."""
    pushed: Pending | None = None
    """The leader's round over servers."""
    lease: Tensor | None = None
    """Keeps what was given, or the sum, in shared memory."""

    @property
    def has_answer(self) -> bool:
        """Whether the leader's round over servers is over."""
        return self.pushed is not None and self.pushed.has_ended
