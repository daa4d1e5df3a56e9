"""Average of tensors within a group of workers: reduce-scatter, then allgather. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zenps.errors import MismatchError
from zenps.kernels.base import ACCUMULATE

from ...transport.peer_group import Group

Header = tuple[int, int]
"""What members must agree about: the number of the step, and a hash of the model's name."""


class Averaged(NamedTuple):
    """This rank's measurements over its part of the elements, while the group averaged.

    Attributes:
        distance: Euclidean, of this rank's values from the averages.
        norm: of the averages.
    """

    distance: float
    norm: float

    @property
    def relative(self) -> float:
        """The distance, relative to the norm."""
        return self.distance / self.norm if self.norm else 0.0


def average_within(
    group: Group, members: Sequence[int], header: Header, tensors: Sequence[Tensor]
) -> Averaged:
    """Replaces tensors by their averages over some ranks, which get the same bits.

    Each member averages a part of the elements, in rank order and in the accumulating dtype, and sends it to
    the others: 2·(g - 1) ÷ g of the tensors' bytes in each direction, for g members.

    Args:
        group: of all ranks.
        members: the ranks, ascending; this one is among them.
        header: equal on all members.
        tensors: ``[n]`` on the CPU, contiguous, of floating-point dtypes; alike on all members.

    Raises:
        MismatchError: a member averages in another step, or other tensors.
        GroupError: a member was lost.
    """
    place, count = members.index(group.rank), len(members)
    parts = [[tensor[begin:end] for begin, end in _cuts(len(tensor), count)] for tensor in tensors]
    others = [(number, rank) for number, rank in enumerate(members) if rank != group.rank]

    headers = {rank: torch.empty(2, dtype=torch.int64, device="cpu") for _, rank in others}
    received = {rank: [torch.empty_like(part[place]) for part in parts] for _, rank in others}
    own = torch.tensor(header, dtype=torch.int64, device="cpu")
    group.exchange(
        {rank: [own, *(part[number] for part in parts)] for number, rank in others},
        {rank: [headers[rank], *received[rank]] for _, rank in others},
    )
    _check(header, headers)

    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for index, part in enumerate(parts):
        mine = part[place]
        values = [mine if rank == group.rank else received[rank][index] for rank in members]
        average = _average(values)
        for number, what in enumerate((mine - average, average)):
            squares[number] += torch.linalg.vector_norm(what, dtype=torch.float64) ** 2
        mine.copy_(average)

    group.exchange(
        {rank: [part[place] for part in parts] for _, rank in others},
        {rank: [part[number] for part in parts] for number, rank in others},
    )
    return Averaged(*squares.sqrt().tolist())


def _cuts(size: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise(size * number // parts for number in range(parts + 1)))


def _average(values: Sequence[Tensor]) -> Tensor:
    total = values[0].to(ACCUMULATE[values[0].dtype], copy=True)
    for other in values[1:]:
        total += other
    return (total / len(values)).to(values[0].dtype)


def _check(header: Header, headers: Mapping[int, Tensor]) -> None:
    for rank, other in headers.items():
        if tuple(other.tolist()) != header:
            raise MismatchError(
                f"step {header[0]} here averages with step {int(other[0])} of rank {rank}, or with another "
                "optimizer's model: expected that all ranks step equally often, their optimizers in one order"
            )
