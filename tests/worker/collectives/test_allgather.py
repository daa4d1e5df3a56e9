"""Allgather of bytes: what a lost rank has pushed only in part does not pass for its data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.worker.encode.test_transfer import KERNELS
from zenps.config.settings import Config
from zenps.worker.collectives.allgather import allgather_bytes
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.encode.transforms import ByElement, Densified
from zenps.worker.process import PROCESS
from zenps.worker.world import LocalWorld

SIZES = {0: 500, 1: 700}
COLUMNS = 33
BEGIN, END = 2 * COLUMNS, 5 * COLUMNS
"""The elements of rank 1, whose 700 bytes take three rows; those of rank 0 come before."""


class Rank(LocalWorld):
    """One rank, which gets ``pulled`` instead of its own table."""

    def __init__(self, rank: int, pulled: Tensor | None = None) -> None:
        super().__init__(Config())
        self.rank = rank
        self.table: Tensor | None = None
        self._pulled = pulled

    def begin(self, request: Request) -> Pending:
        self.table = request.tensor
        return super().begin(request if self._pulled is None else request._replace(tensor=self._pulled))


def data_of(rank: int) -> Tensor:
    """Returns words of 0, and others."""
    data = torch.arange(SIZES[rank], dtype=torch.uint8)
    data[: SIZES[rank] // 2] = 0
    return data


def gather(monkeypatch: pytest.MonkeyPatch, world: Rank) -> dict[int, Tensor]:
    monkeypatch.setattr(PROCESS, "_world", world)
    return allgather_bytes(data_of(world.rank), SIZES, "x")


def sum_without(
    monkeypatch: pytest.MonkeyPatch, transform: type[Densified | ByElement], lost: tuple[int, int]
) -> Tensor:
    """Returns the sum of both ranks' tables, without a range of elements."""
    tables = []
    for world in (Rank(0), Rank(1)):
        gather(monkeypatch, world)
        assert world.table is not None
        tables.append(world.table)
    total = (tables[0] + tables[1]).coalesce()
    if transform is Densified:
        made = Densified(total, KERNELS)
        dense = made.apply(total)
        dense.view(-1)[slice(*lost)] = 0
        return made.undo(dense)
    by_element = ByElement(total, KERNELS, is_elastic=True)
    travels = by_element.apply(total)
    elements = travels._indices()[0]
    kept = (elements < lost[0]) | (elements >= lost[1])
    left = torch.sparse_coo_tensor(
        elements[kept].unsqueeze(0), travels._values()[kept], travels.shape, check_invariants=True
    )
    return by_element.undo(left)


@pytest.mark.parametrize("transform", [Densified, ByElement])
@pytest.mark.parametrize(
    "lost", [(BEGIN, BEGIN + 1), (BEGIN + 1, BEGIN + 9), (BEGIN + 40, END), (END - 1, END), (BEGIN, END)]
)
def test_a_rank_is_left_out_if_an_element_of_its_rows_is_missing(
    transform: type[Densified | ByElement], lost: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = gather(monkeypatch, Rank(0, sum_without(monkeypatch, transform, lost)))
    assert list(gathered) == [0]
    assert torch.equal(gathered[0], data_of(0))


@pytest.mark.parametrize("transform", [Densified, ByElement])
def test_words_of_0_arrive(transform: type[Densified | ByElement], monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = gather(monkeypatch, Rank(0, sum_without(monkeypatch, transform, (END, END))))
    assert list(gathered) == [0, 1]
    assert all(torch.equal(gathered[rank], data_of(rank)) for rank in gathered)


def test_the_word_that_would_mask_others_first_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Rank(0)
    monkeypatch.setattr(PROCESS, "_world", world)
    allgather_bytes(torch.zeros(8, dtype=torch.uint8), {0: 8}, "x")
    assert world.table is not None
    mask = world.table._values()[0, :1].view(torch.uint8)
    assert torch.equal(allgather_bytes(mask, {0: 8}, "x")[0], mask)
    assert bool(world.table._values().all())
