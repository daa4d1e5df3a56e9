"""Allgather: every rank gets an integer, or bytes, of each rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ..core.request import Options, Request
from ..process import PROCESS

_WORDS: Final = 32
"""Words of 8 bytes in a row of :func:`allgather_bytes`: its key and mask add 1/16 or less to what travels."""

_ROW_BYTES: Final = 8 * _WORDS

_FIRST_MASK: Final = 0x6A09_E667_F3BC_C908
"""An arbitrary word that data hardly ever contain."""


def allgather_int(value: int, name: str, options: Options = Options()) -> dict[int, int]:  # noqa: B008 - frozen
    """Returns the values of all ranks, in order of rank, without those that are 0.

    Args:
        value: this rank's.
        name: of the round, the same on all ranks. Errors are those of :func:`zenps.push_pull`.
        options: of the round.
    """
    return begin_allgather_int(value, name, options)()


def begin_allgather_int(value: int, name: str, options: Options = Options()) -> Callable[[], dict[int, int]]:  # noqa: B008 - frozen
    """Begins :func:`allgather_int`; what it returns waits for the values, and may be called again."""
    world = PROCESS.world
    # Not world.size: in an elastic job, ranks may see different numbers of workers.
    values = torch.zeros(world.full_size, dtype=torch.int64, device="cpu")
    values[world.rank] = value
    pending = world.begin(Request(values, name, options))

    def wait() -> dict[int, int]:
        gathered = pending.wait()
        return {rank: int(gathered[rank]) for rank in gathered.nonzero().flatten().tolist()}

    return wait


def allgather_bytes(data: Tensor, sizes: Mapping[int, int], name: str) -> dict[int, Tensor]:
    """Returns the bytes of all ranks, in order of rank. Each rank pushes its own and pulls all.

    The round sums a sparse table of int64 to which each rank contributes rows of its own: servers copy a row
    that only one rank has. No element is 0, because each word is xored with a mask that is none of its rank's
    words: schemes that do not sum by rows return zeros for what a server has summed without a lost rank.

    Args:
        data: this rank's: uint8 ``[sizes[rank]]`` on the CPU.
        sizes: the bytes of each rank, in order of rank; the same on all ranks.
        name: of the round, the same on all ranks. Errors are those of :func:`zenps.push_pull`.

    Returns:
        uint8 ``[sizes[rank]]`` of each rank on the CPU. In an elastic job without those of ranks that were
        lost meanwhile; all ranks return the same.
    """
    world = PROCESS.world
    counts = {rank: -(-size // _ROW_BYTES) for rank, size in sizes.items()}
    begins = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
    total = sum(counts.values())
    if not total:
        return dict.fromkeys(sizes, data)
    count, begin = counts[world.rank], begins[world.rank]
    padded = torch.zeros(count * _ROW_BYTES, dtype=torch.uint8, device="cpu")
    padded[: len(data)] = data
    words = padded.view(torch.int64).view(count, _WORDS)
    mask = next(mask for mask in itertools.count(_FIRST_MASK) if not (words == mask).any())
    rows = torch.empty((count, 1 + _WORDS), dtype=torch.int64, device="cpu")
    rows[:, 0] = mask
    torch.bitwise_xor(words, mask, out=rows[:, 1:])
    table = torch.sparse_coo_tensor(
        torch.arange(begin, begin + count, device="cpu").unsqueeze(0),
        rows,
        # Rounded up, because each size has a permutation of its own, which workers and servers keep.
        (1 << (total - 1).bit_length(), 1 + _WORDS),
        device="cpu",
        is_coalesced=True,
        check_invariants=False,
    )
    pulled = world.begin(Request(table, name, Options(purpose="control"))).wait()
    numbers, rows = pulled._indices()[0], pulled._values()
    parts = {}
    for rank, size in sizes.items():
        ends = torch.tensor([begins[rank], begins[rank] + counts[rank]], device="cpu")
        first, last = torch.searchsorted(numbers, ends).tolist()
        own = rows[first:last]
        if last - first == counts[rank] and own.all():
            parts[rank] = (own[:, 1:] ^ own[:, :1]).view(-1).view(torch.uint8)[:size]
    return parts
