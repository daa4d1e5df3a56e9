"""Negotiation messages: what each rank says about a tensor before ranks exchange it. Pure.

Ranks negotiate over a server: each pushes a small table that is zero except for its own row, and pulls the
sum, which has the rows of all ranks. This is an ordinary round. So a rank that is late, is lost or pushes
another tensor is found before any rank waits for another.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from zenps.errors import listing

from ..core.request import Options, describe

ENTRY_BYTES = 128
_HEAD = struct.Struct("<qq")


class Entry(NamedTuple):
    """One rank's statement about its tensor.

    Attributes:
        number: the rank's number of this round. Ranks number rounds differently; all use that of rank 0.
        rows: of a sparse tensor, once duplicates are summed.
        what: description of the tensor, which must be the same on all ranks.
    """

    number: int
    rows: int
    what: str


def entry_of(tensor: Tensor, number: int, rows: int, options: Options) -> Entry:
    """Returns this rank's entry."""
    how = "averaged" if options.average else "summed"
    return Entry(number, rows, f"{options.given or describe(tensor)}, {how}")


def table_with(row: bytes, rank: int, size: int, row_bytes: int) -> Tensor:
    """Returns uint8 ``[size, row_bytes]``, zero but for this rank's ``row``: the sum has all rows."""
    table = torch.zeros((size, row_bytes), dtype=torch.uint8, device="cpu")
    table[rank] = torch.frombuffer(bytearray(row.ljust(row_bytes, b"\0")), dtype=torch.uint8)
    return table


def table_of(entry: Entry, rank: int, size: int) -> Tensor:
    """Returns what this rank pushes: uint8 ``[size, ENTRY_BYTES]``, zero except for its own row."""
    what = entry.what.encode()
    most = ENTRY_BYTES - _HEAD.size
    if len(what) > most:  # a shape of dozens of dimensions: its end is compared by a hash
        what = what[: most - 17] + b"~" + xxhash.xxh3_64_hexdigest(what).encode()
    return table_with(_HEAD.pack(entry.number, entry.rows) + what, rank, size, ENTRY_BYTES)


class Entries:
    """What all ranks say about their tensors. Loops over ranks would take milliseconds for a thousand.

    Args:
        table: the sum of what all ranks have pushed.

    Attributes:
        numbers, rows: of each rank, as in :class:`Entry`.
    """

    def __init__(self, table: Tensor) -> None:
        entries = table.numpy()
        self._texts = entries[:, _HEAD.size :]
        self.numbers: list[int]
        self.rows: list[int]
        self.numbers, self.rows = entries[:, : _HEAD.size].view("<i8").T.tolist()

    def disagreement(self) -> str:
        """Describes how the ranks' tensors differ; empty if all ranks push the same kind of tensor."""
        if (self._texts == self._texts[0]).all():
            return ""
        alike: dict[bytes, list[int]] = {}
        for rank, text in enumerate(self._texts):
            alike.setdefault(text.tobytes(), []).append(rank)
        groups = [
            f"rank(s) {listing(ranks)} pushed {text.rstrip(bytes(1)).decode(errors='replace')}"
            for text, ranks in alike.items()
        ]
        return "ranks disagree: " + listing(groups, "; ", most=4)
