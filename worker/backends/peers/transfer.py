"""One tensor's round among workers: what this rank brings, how it is summed, and who waits for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import ZenPSError
from zenps.kernels.base import ACCUMULATE, Kernels
from zenps.partition.layout import check_rows
from zenps.schemes.registry import SchemeName

from ...core.handle import Progress
from ...core.spans import Spans
from ...encode.sparse import as_sparse, as_table
from ...encode.transfer import table_shape
from ..negotiated_rounds import NegotiatedRound
from ..negotiation import Entry
from .algorithms import Table, gathered, merged, sparcml
from .group import Group


class Sum(ABC):
    """A tensor on the CPU, copied, and what the ranks make of it.

    Attributes:
        rows_given: rows of a sparse tensor before compaction.
        rows: after; 0 of a dense one.
        rows_total: that it could have.
        pulled_rows: of the result, once it is there.
        dense_bytes: what pushing and pulling the tensor whole would move.
    """

    rows_given = rows = rows_total = pulled_rows = 0

    def __init__(self, tensor: Tensor, average: bool) -> None:
        self._shape, self._dtype, self._average = tensor.shape, tensor.dtype, average
        self.dense_bytes = 2 * tensor.shape.numel() * tensor.dtype.itemsize

    @abstractmethod
    def over(self, group: Group, said: Sequence[Entry]) -> Tensor:
        """The sum, or average, over all ranks. All of them call it at the same point.

        Args:
            said: by all ranks, by rank, at their meeting.

        Raises:
            GroupError: a rank is gone.
        """


class DenseSum(Sum):
    """Of a strided tensor, by the group's allreduce, in the dtype in which sums are accumulated."""

    def __init__(self, tensor: Tensor, average: bool, pool: BufferPool) -> None:
        super().__init__(tensor, average)
        self._values = pool.empty((tensor.numel(),), ACCUMULATE[tensor.dtype])
        self._values.view(tensor.shape).copy_(tensor.detach())

    def over(self, group: Group, said: Sequence[Entry]) -> Tensor:
        if self._values.numel():
            group.allreduce(self._values)
        if self._average:
            self._values /= group.size
        return self._values.to(self._dtype).view(self._shape)


class SparseSum(Sum):
    """Of a sparse COO tensor, as ``scheme`` does it.

    Raises:
        TensorError: an index lies outside the tensor.
    """

    def __init__(self, tensor: Tensor, average: bool, scheme: SchemeName, kernels: Kernels) -> None:
        super().__init__(tensor, average)
        self._kernels, self._scheme = kernels, scheme
        self._sparse_dim = tensor.sparse_dim()
        rows, values = as_table(tensor)
        self.rows_total, columns = table_shape(tensor)
        check_rows(rows, max(self.rows_total, 1))
        self._own = kernels.compact(rows, values)
        self.rows_given, self.rows = len(rows), len(self._own[0])
        self._table = Table(self.rows_total, columns, tensor.dtype)

    def over(self, group: Group, said: Sequence[Entry]) -> Tensor:
        args = group, self._own, self._table, group.size if self._average else 1, self._kernels
        if self._scheme == "agsparse":
            rows, values = gathered(*args)
        elif self._scheme == "sparcml":
            rows, values = sparcml(*args, counts=[entry.rows for entry in said])
        else:
            rows, values = merged(*args, densifies=False)
        self.pulled_rows = len(rows)
        return as_sparse(rows, values, self._shape, self._sparse_dim)


class PeerRound(NegotiatedRound):
    """A tensor in flight among workers. The exchange's thread ends it; any thread may wait for it.

    Args:
        name: of the tensor.
        sum_: what this rank brings.
        timeout_seconds, spans: as for :class:`Awaited`.
        record: is called once with the seconds that the caller waited.
        began: when it did, by the performance counter.

    Attributes:
        progress: what is known of it, without the tensor.
        said: what they said, once they have met and agree.
        sent_bytes, received_bytes: by this rank, for this tensor.
    """

    def __init__(
        self,
        name: str,
        sum_: Sum,
        timeout_seconds: float,
        record: Callable[[PeerRound, float], None],
        spans: Spans,
        began: float,
    ) -> None:
        super().__init__(name, timeout_seconds, lambda waited: record(self, waited), spans)
        self.sum = sum_
        self.progress = Progress(0, began)
        self.began = began
        self.compacted_seconds = time.perf_counter() - began
        self.said: Sequence[Entry] = ()
        self.sent_bytes = self.received_bytes = 0

    def end(self, outcome: Tensor | ZenPSError) -> None:
        if self._outcome is None:
            if isinstance(outcome, Tensor):
                self.progress.pushed_rows = sum(entry.rows for entry in self.said)
                self.progress.pulled_rows = self.sum.pulled_rows
            self.progress.ended = True
        super().end(outcome)
