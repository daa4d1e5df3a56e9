"""Transfers among workers: what each kind of tensor becomes, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.local_group import on_all_ranks
from zenps.buffers import BufferPool
from zenps.errors import MismatchError, TensorError, UsageError, ZenPSError
from zenps.kernels.cpu import CpuKernels
from zenps.worker.backends.peers.transfer import (
    AgreedPeerTransfer,
    DensePeerTransfer,
    PeerTransfer,
    SparsePeerTransfer,
)
from zenps.worker.core.statistics import Progress, Report, RowCounts
from zenps.worker.sparsify.agreed import COUNTS, VALUES, Agreed, Further
from zenps.worker.transport.peer_group import Group

POOL = BufferPool(keep_bytes=0)
KERNELS = CpuKernels(POOL)


def reduce(size: int, make: Callable[[int], PeerTransfer]) -> list[tuple[Tensor | ZenPSError, Report]]:
    """What each rank gets, or the error that it raises; and what it reports."""
    transfers = [make(rank) for rank in range(size)]
    rows = [transfer.rows for transfer in transfers]

    def run(group: Group) -> tuple[Tensor | ZenPSError, Report]:
        transfer = transfers[group.rank]
        result: Tensor | ZenPSError
        try:
            result = transfer.reduce(group, rows)
        except ZenPSError as error:
            result = error
        transfer.sent_bytes, transfer.received_bytes = group.sent_bytes, 7
        return result, transfer.report(Progress(0))

    return on_all_ranks(size, run)


def table(indices: list[list[int]], shape: tuple[int, ...]) -> Tensor:
    """Every element of a row is its number, from 1 on."""
    values = torch.arange(1.0, len(indices[0]) + 1).view(-1, *[1] * (len(shape) - len(indices)))
    values = values.expand(-1, *shape[len(indices) :]).contiguous()
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape, check_invariants=True)


ROWS = [table([[5, 2, 5]], (9, 2)), table([[2, 8]], (9, 2)), table([[0]], (9, 2))]
PAIRS = [table([[1, 0], [2, 2]], (3, 4, 2)), table([[1, 1], [2, 3]], (3, 4, 2)), table([[], []], (3, 4, 2))]


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(("own", "union", "rows"), [(ROWS, 4, 9), (PAIRS, 3, 12)], ids=["rows", "pairs"])
def test_sparse_tensors_are_those_of_all_ranks_together(
    own: list[Tensor], union: int, rows: int, average: bool
) -> None:
    results = reduce(3, lambda rank: SparsePeerTransfer(own[rank], average, "allgather", KERNELS))
    total = torch.stack([each.to_dense() for each in own]).sum(0) / (3 if average else 1)
    for mine, (result, report) in zip(own, results, strict=True):
        assert isinstance(result, Tensor)
        assert (result.is_sparse, result.sparse_dim()) == (True, mine.sparse_dim())
        torch.testing.assert_close(result.to_dense(), total)
        pushed = mine.coalesce()._nnz()
        assert report.rows == RowCounts(mine._nnz(), pushed, union, rows)
        assert (report.dense_bytes, report.over) == (2 * 4 * mine.shape.numel(), "peers")
        count_bytes, row_bytes = 8, 4 + 2 * 4
        assert (report.pushed_bytes, report.pulled_bytes) == (2 * (count_bytes + pushed * row_bytes), 7)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_a_table_without_elements_is_reduced_too(shape: tuple[int, int]) -> None:
    empty = table([[0, 2] if shape[0] else []], shape)
    for result, report in reduce(2, lambda _: SparsePeerTransfer(empty, False, "sparcml", KERNELS)):
        assert isinstance(result, Tensor)
        assert result.shape == shape
        assert report.rows == (RowCounts(2, 2, 2, 3) if shape[0] else None)


def test_a_row_outside_the_table_is_refused() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[9]]), torch.ones(1, 2), (9, 2), check_invariants=False)
    with pytest.raises(TensorError, match="9"):
        SparsePeerTransfer(tensor, False, "allgather", KERNELS)


@pytest.mark.parametrize(("average", "expected"), [(False, 2050.0), (True, 2050.0 / 3)])
def test_dense_tensors_are_added_in_a_wider_dtype(average: bool, expected: float) -> None:
    """In float16, 2048 + 1 is 2048."""
    own = [torch.full((2, 3), value, dtype=torch.float16).t() for value in (2048.0, 1.0, 1.0)]
    for result, report in reduce(3, lambda rank: DensePeerTransfer(own[rank], average, POOL)):
        assert isinstance(result, Tensor)
        assert torch.equal(result, torch.full((3, 2), expected, dtype=torch.float16))
        assert (report.rows, report.dense_bytes, report.over) == (None, 2 * 2 * 6, "peers")
    assert [each[0, 0].item() for each in own] == [2048.0, 1.0, 1.0], "the caller's"


def test_a_dense_tensor_without_elements_is_not_sent() -> None:
    for result, report in reduce(2, lambda _: DensePeerTransfer(torch.empty(0, 3), True, POOL)):
        assert isinstance(result, Tensor)
        assert result.shape == (0, 3)
        assert report.pushed_bytes == 0


# ── agreed exchange ─────────────────────────────────────────────────────────────────────────────


class Counting(Agreed):
    """Each rank has its number at every element, and counts ``counts`` elements; a negative number of them
    raises an error: -1 as of a sparsifier, -2 as of its device.
    """

    def __init__(self, rank: int, counts: int) -> None:
        self._rank, self._count = rank, counts
        self.selected = self.taken_back = 0
        self.total = torch.empty(0)

    @property
    def dense_bytes(self) -> int:
        return 1000

    def note_selected(self, total: int) -> None:
        self.selected = total

    def continue_with(self, union: Tensor) -> Further:
        if self._count < 0:
            raise UsageError("planted") if self._count == -1 else TensorError("planted")
        values = torch.full((union._nnz(),), float(self._rank))
        return {VALUES: values, COUNTS: torch.ones(self._count, dtype=torch.int64)}

    def take_back(self) -> None:
        self.taken_back += 1

    def note_counts(self, total: Tensor) -> None:
        self.total = total


def exchange(*counts: int) -> tuple[list[Counting], list[tuple[Tensor | ZenPSError, Report]]]:
    agreed = [Counting(rank, count) for rank, count in enumerate(counts)]
    indices = [table([[2, 5]], (9, 0)), table([[5]], (9, 0)), table([[0, 5]], (9, 0))]
    make = [
        AgreedPeerTransfer(own, True, each, KERNELS, POOL) for own, each in zip(indices, agreed, strict=True)
    ]
    return agreed, reduce(3, make.__getitem__)


def test_values_of_the_union_are_averaged_and_counts_are_added() -> None:
    agreed, results = exchange(4, 4, 4)
    for each, (result, report) in zip(agreed, results, strict=True):
        assert isinstance(result, Tensor)
        assert result.tolist() == [1.0] * 3
        assert each.total.tolist() == [3] * 4
        assert (each.selected, each.taken_back, report.dense_bytes) == (5, 0, 1000)


@pytest.mark.parametrize(
    ("counts", "messages"),
    [
        ((4, -1, 4), ["failed on 1 rank", "planted", "failed on 1 rank"]),
        ((-1, -2, 4), ["planted", "planted", "failed on 2 rank"]),
        ((4, 0, 2), ["this one of 4", "this one of 0", "this one of 2"]),
        ((0, 0, 1), ["this one of 0", "this one of 0", "this one of 1"]),
    ],
)
def test_a_sparsifier_that_fails_somewhere_ends_the_round_on_all_ranks(
    counts: tuple[int, ...], messages: list[str]
) -> None:
    """What was taken from a residual is put back."""
    agreed, results = exchange(*counts)
    for message, each, (result, _) in zip(messages, agreed, results, strict=True):
        assert isinstance(result, (UsageError, TensorError) if message == "planted" else MismatchError)
        assert message in str(result)
        assert (each.taken_back, len(each.total)) == (1, 0)
