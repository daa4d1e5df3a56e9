"""What workers tell one another of a tensor before they exchange it. Pure.

They meet at a server: each pushes a row of a small dense tensor, and has all of them once everybody has come. So
whoever is late, lost, or has another tensor is known, as of any round, before a rank waits for another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from zenps.errors import listing

__all__ = ["Entry", "disagreement", "entries", "entry_of", "table_of"]

_HEAD = struct.Struct("<qq")
ENTRY_BYTES = 128


class Entry(NamedTuple):
    """What one rank says.

    Attributes:
        number: by which it calls this round; that of rank 0 goes for all.
        rows: of a sparse tensor, once duplicates are summed.
        what: the tensor, in words; the same on all ranks.
    """

    number: int
    rows: int
    what: str


def entry_of(tensor: Tensor, number: int, rows: int, average: bool) -> Entry:
    """What this rank says of its tensor."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    kind = (
        f"sparse {dtype} {shape} by {tensor.sparse_dim()} dim(s)"
        if tensor.is_sparse
        else f"dense {dtype} {shape}"
    )
    return Entry(number, rows, f"{kind}, {'averaged' if average else 'summed'}")


def table_of(entry: Entry, rank: int, size: int) -> Tensor:
    """What this rank pushes: uint8 ``[size, ENTRY_BYTES]``, zero but for its own row."""
    what = entry.what.encode()
    most = ENTRY_BYTES - _HEAD.size
    if len(what) > most:  # of dozens of dimensions: the end is told apart, if not told
        what = what[: most - 17] + b"~" + xxhash.xxh3_64_hexdigest(what).encode()
    table = torch.zeros((size, ENTRY_BYTES), dtype=torch.uint8)
    row = _HEAD.pack(entry.number, entry.rows) + what
    table[rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    return table


def entries(table: Tensor) -> list[Entry]:
    """What each rank said, by rank."""
    rows = [row.numpy().tobytes() for row in table]
    return [
        Entry(*_HEAD.unpack_from(row), row[_HEAD.size :].rstrip(b"\0").decode(errors="replace"))
        for row in rows
    ]


def disagreement(said: Sequence[Entry]) -> str:
    """In what the ranks' tensors differ, where they may not; empty if they agree."""
    alike: dict[str, list[int]] = {}
    for rank, entry in enumerate(said):
        alike.setdefault(entry.what, []).append(rank)
    if len(alike) == 1:
        return ""
    groups = [f"rank(s) {listing(ranks)} pushed {what}" for what, ranks in alike.items()]
    return "ranks disagree: " + listing(groups, "; ", most=4)
