"""What workers tell one another of a tensor before they exchange it. Pure.

They meet at a server: each pushes one row of a small dense tensor, and gets all rows once everybody has come.
So it is known, as of any round, who is late, is lost or has another tensor, before a rank waits for another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from zenps.errors import listing

ENTRY_BYTES = 128
_HEAD = struct.Struct("<qq")


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
    how = "averaged" if average else "summed"
    if tensor.is_sparse:
        return Entry(number, rows, f"sparse {dtype} {shape} by {tensor.sparse_dim()} dimension(s), {how}")
    return Entry(number, rows, f"dense {dtype} {shape}, {how}")


def table_of(entry: Entry, rank: int, size: int) -> Tensor:
    """What this rank pushes: uint8 ``[size, ENTRY_BYTES]``, zero but for its own row."""
    what = entry.what.encode()
    most = ENTRY_BYTES - _HEAD.size
    if len(what) > most:  # of dozens of dimensions: the end is told apart, if not told
        what = what[: most - 17] + b"~" + xxhash.xxh3_64_hexdigest(what).encode()
    table = torch.zeros((size, ENTRY_BYTES), dtype=torch.uint8, device="cpu")
    row = _HEAD.pack(entry.number, entry.rows) + what
    table[rank, : len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    return table


def entries(table: Tensor) -> list[Entry]:
    """What each rank said, by rank."""
    said = []
    for row in table:
        data = row.numpy().tobytes()
        number, rows = _HEAD.unpack_from(data)
        said.append(Entry(number, rows, data[_HEAD.size :].rstrip(b"\0").decode(errors="replace")))
    return said


def disagreement(said: Sequence[Entry]) -> str:
    """In what the ranks' tensors differ, where they may not; empty if they agree."""
    alike: dict[str, list[int]] = {}
    for rank, entry in enumerate(said):
        alike.setdefault(entry.what, []).append(rank)
    if len(alike) == 1:
        return ""
    groups = [f"rank(s) {listing(ranks)} pushed {what}" for what, ranks in alike.items()]
    return "ranks disagree: " + listing(groups, "; ", most=4)
