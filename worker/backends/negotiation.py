"""Negotiation messages: what each rank says about a tensor before ranks exchange it. Pure.

Ranks negotiate over a server: each pushes a small table that is zero except for its own row, and pulls the
sum, which has the rows of all ranks. This is an ordinary round, with a description of the tensor. So a rank
that is late, is lost or pushes another tensor is found before any rank waits for another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.request import Options, describe


class Entries(NamedTuple):
    """What all ranks say about a tensor, by rank.

    Attributes:
        numbers: each rank's number of this round. Ranks number rounds differently; all use that of rank 0.
        rows: of a sparse tensor, once duplicates are summed.
    """

    numbers: list[int]
    rows: list[int]


def description(tensor: Tensor, options: Options) -> str:
    """Describes a tensor, for servers to compare; must be the same on all ranks."""
    how = "averaged" if options.average else "summed"
    return f"{options.given or describe(tensor)}, {how} among workers"


def table_of(number: int, rows: int, rank: int, size: int) -> Tensor:
    """Returns what this rank pushes: int64 ``[size, 2]``, zero except for its own row."""
    table = torch.zeros((size, 2), dtype=torch.int64, device="cpu")
    table[rank, 0], table[rank, 1] = number, rows
    return table


def entries_of(table: Tensor) -> Entries:
    """Returns the entries of all ranks, from the sum of what they have pushed."""
    numbers, rows = table.t().tolist()
    return Entries(numbers, rows)


def table_with(row: bytes, rank: int, size: int, row_bytes: int) -> Tensor:
    """Returns uint8 ``[size, row_bytes]``, zero but for this rank's ``row``: the sum has all rows."""
    table = torch.zeros((size, row_bytes), dtype=torch.uint8, device="cpu")
    table[rank] = torch.frombuffer(bytearray(row.ljust(row_bytes, b"\0")), dtype=torch.uint8)
    return table
