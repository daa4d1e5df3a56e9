"""Negotiation messages: what each rank says about a tensor before ranks exchange it. Pure.

Ranks negotiate over a server: each pushes a small table that is zero except for its own row, and pulls the
sum, which has the rows of all ranks. This is an ordinary round. So a rank that is late, is lost or pushes
another tensor is found before any rank waits for another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
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


def parse_entries(table: Tensor) -> list[Entry]:
    """Returns the entries of all ranks, by rank."""
    entries = []
    for row in table:
        data = row.numpy().tobytes()
        number, rows = _HEAD.unpack_from(data)
        entries.append(Entry(number, rows, data[_HEAD.size :].rstrip(b"\0").decode(errors="replace")))
    return entries


def disagreement(entries: Sequence[Entry]) -> str:
    """Describes how the ranks' tensors differ; empty if all ranks push the same kind of tensor."""
    alike: dict[str, list[int]] = {}
    for rank, entry in enumerate(entries):
        alike.setdefault(entry.what, []).append(rank)
    if len(alike) == 1:
        return ""
    groups = [f"rank(s) {listing(ranks)} pushed {what}" for what, ranks in alike.items()]
    return "ranks disagree: " + listing(groups, "; ", most=4)
