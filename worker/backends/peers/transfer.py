"""Transfer of one tensor among workers: holds this rank's contribution and reduces it over all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from msgspec import structs
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import DeadlineError, MismatchError, TensorError, UsageError, ZenPSError
from zenps.kernels.base import ACCUMULATE, Kernels
from zenps.partition.layout import check_rows
from zenps.schemes.base import PeerAlgorithm

from ...core.request import table_shape
from ...core.statistics import Progress, Report, RowCounts
from ...core.transfer import SuppliedTransfer, dense_bytes
from ...encode.sparse import as_sparse, as_table
from ...sparsify.agreed import COUNTS, VALUES, Agreed, Further
from ...transport.peer_group import Group
from ..negotiated_rounds import NegotiatedRound
from .algorithms import ALGORITHMS, Table

LOCAL_ERRORS: Final = (DeadlineError, TensorError, UsageError)
"""Errors of this rank's sparsifier or device; a transfer raises them only once all ranks know of them."""


class PeerTransfer(SuppliedTransfer):
    """A copy of a tensor on the CPU, to be reduced over all ranks.

    Attributes:
        rows: of a sparse tensor once duplicates are summed; 0 of a dense one.
        pulled_rows: of the result, set by :meth:`reduce`.
        sent_bytes, received_bytes: by this rank, for this tensor.
    """

    rows = pulled_rows = sent_bytes = received_bytes = 0

    def __init__(self, tensor: Tensor, average: bool) -> None:
        super().__init__()
        self._shape, self._dtype, self._average = tensor.shape, tensor.dtype, average

    @abstractmethod
    def reduce(self, group: Group, rows: Sequence[int]) -> Tensor:
        """Returns the sum, or average, over all ranks. All ranks call it at the same point.

        Args:
            rows: :attr:`rows` of all ranks, by rank.

        Raises:
            GroupError: a rank was lost.
        """

    def report(self, progress: Progress) -> Report:
        return Report(
            pushed_bytes=self.sent_bytes,
            pulled_bytes=self.received_bytes,
            dense_bytes=dense_bytes(self._shape.numel(), self._dtype.itemsize),
            over="peers",
        )


class DensePeerTransfer(PeerTransfer):
    """A strided tensor, reduced by the group's allreduce in the dtype in which sums are accumulated."""

    def __init__(self, tensor: Tensor, average: bool, pool: BufferPool) -> None:
        super().__init__(tensor, average)
        self._values = pool.empty((tensor.numel(),), ACCUMULATE[tensor.dtype])
        self._values.view(tensor.shape).copy_(tensor.detach())

    def reduce(self, group: Group, rows: Sequence[int]) -> Tensor:
        if self._values.numel():
            group.allreduce(self._values)
        if self._average:
            self._values /= group.size
        return self._values.to(self._dtype).view(self._shape)


class SparsePeerTransfer(PeerTransfer):
    """A sparse COO tensor, reduced by ``algorithm``.

    Raises:
        TensorError: an index lies outside the tensor.
    """

    def __init__(self, tensor: Tensor, average: bool, algorithm: PeerAlgorithm, kernels: Kernels) -> None:
        super().__init__(tensor, average)
        self._kernels, self._algorithm = kernels, ALGORITHMS[algorithm]
        self._sparse_dim = tensor.sparse_dim()
        rows, values = as_table(tensor)
        self._rows_total, columns = table_shape(tensor)
        check_rows(rows, max(self._rows_total, 1))
        self._own = kernels.compact(rows, values)
        self.rows_given, self.rows = len(rows), len(self._own[0])
        self._table = Table(self._rows_total, columns, tensor.dtype)

    def reduce(self, group: Group, rows: Sequence[int]) -> Tensor:
        divisor = group.size if self._average else 1
        union, values = self._algorithm(group, self._own, self._table, divisor, self._kernels, rows)
        self.pulled_rows = len(union)
        return as_sparse(union, values, self._shape, self._sparse_dim)

    def report(self, progress: Progress) -> Report:
        moved = super().report(progress)
        if not self._rows_total:
            return moved
        rows = RowCounts(self.rows_given, self.rows, self.pulled_rows, self._rows_total)
        return structs.replace(moved, rows=rows)


class AgreedPeerTransfer(SparsePeerTransfer):
    """A sparsified gradient, by an agreed exchange: allgather of the indices, then allreduce at their union.

    Args:
        indices: sparse COO of no columns.
        agreed: has made the indices.
        pool: for values.
    """

    def __init__(
        self, indices: Tensor, average: bool, agreed: Agreed, kernels: Kernels, pool: BufferPool
    ) -> None:
        super().__init__(indices, average, "allgather", kernels)
        self._agreed = agreed
        self._pool = pool

    def reduce(self, group: Group, rows: Sequence[int]) -> Tensor:
        self._agreed.note_selected(sum(rows))
        union = super().reduce(group, rows)
        error: ZenPSError | None = None
        further: Further = {}
        try:
            further = self._agreed.continue_with(union)
        except LOCAL_ERRORS as raised:
            error = raised
        try:
            self._check_all(group, error, 0 if error else len(further[COUNTS]))
        except (MismatchError, *LOCAL_ERRORS):
            self._agreed.take_back()
            raise
        sums = {
            suffix: DensePeerTransfer(tensor, self._average and suffix == VALUES, self._pool).reduce(
                group, ()
            )
            for suffix, tensor in further.items()
        }
        self._agreed.note_counts(sums[COUNTS])
        return sums[VALUES]

    def _check_all(self, group: Group, error: ZenPSError | None, counts: int) -> None:
        """Raises this rank's error; on the others, one that says that ranks failed or count otherwise."""
        told = torch.tensor([error is not None, counts, counts * counts], dtype=torch.int64, device="cpu")
        group.allreduce(told)
        failed, total, squares = told.tolist()
        if error is not None:
            raise error
        if failed:
            raise MismatchError(f"a sparsifier or its device has failed on {failed} rank(s); see their logs")
        if total * total != group.size * squares:  # Cauchy-Schwarz: they are equal only if all counts are
            reason = f"ranks have counted vectors of different lengths, this one of {counts}"
            raise MismatchError(f"{reason}; correct the sparsifier's count()")

    def report(self, progress: Progress) -> Report:
        return structs.replace(super().report(progress), dense_bytes=self._agreed.dense_bytes)


class PeerRound(NegotiatedRound, kw_only=True):
    """A tensor in flight among workers."""

    transfer: PeerTransfer
    rows: Sequence[int] = ()
    """Those of all ranks' contributions, by rank, once they agree."""
