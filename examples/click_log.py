"""Click logs in the format of Criteo's data sets: read by several ranks in turn, or made up.

A line is ``label \\t I1 … I13 \\t C1 … C26``: clicked (1) or not (0), 13 integers, and 26 categories that
are hashed to 32 bits and written in hexadecimal. Any of the 39 may be empty.
Source: https://ailab.criteo.com/download-criteo-1tb-click-logs-dataset
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 13
CATEGORIES = 26
MISSING = -1
HELD_OUT_EVERY = 10

# Distinct values of C1 … C26 in the data of Criteo's Kaggle challenge, rounded.
# fmt: off
CARDINALITIES = (
    1_400, 580, 10_000_000, 2_200_000, 300, 24, 12_500, 630, 3, 93_000, 5_700, 8_300_000, 3_200,
    27, 15_000, 5_500_000, 10, 5_600, 2_200, 4, 7_000_000, 18, 15, 290_000, 100, 140_000,
)
# fmt: on
ZIPF_EXPONENT = 1.1

_LINE = re.compile(
    rb"([01])((?:\t(?:-?[0-9]{1,15})?){%d})((?:\t[0-9A-Fa-f]{0,8}){%d})\r?\n?" % (NUMBERS, CATEGORIES)
)
# The golden ratio in 64 bits, as a signed number: adjacent values land far apart (Knuth, TAOCP 6.4).
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


class Clicks(NamedTuple):
    """A batch of n lines."""

    labels: Tensor
    """(n,), float32: 0 or 1."""
    numbers: Tensor
    """(n, 13), float32: log(1 + x); 0 where x is missing or negative."""
    categories: Tensor
    """(n, 26), int64: 32 bits, or MISSING."""


class ClickLog:
    """One rank's share of a file: lines ``rank``, ``rank + size``, …; every tenth of them is held out."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self._path, self._rank, self._size = path, rank, size
        self.malformed = 0
        """Lines that were skipped so far; counted in the first pass over the file."""

    def training_batches(self, batch: int) -> Iterator[Clicks]:
        """Batches of ``batch`` lines, pass after pass, without end."""
        rows = itertools.chain.from_iterable(self._rows(False, number) for number in itertools.count())
        while True:
            yield _collate(list(itertools.islice(rows, batch)))

    def held_out(self, limit: int) -> Clicks:
        """The first held-out lines, at most ``limit``."""
        return _collate(list(itertools.islice(self._rows(True, 0), limit)))

    def _rows(self, held_out: bool, pass_number: int) -> Iterator[tuple[int, list[int], list[int]]]:
        found = False
        with self._path.open("rb") as lines:
            for index, line in enumerate(itertools.islice(lines, self._rank, None, self._size)):
                if (index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) != held_out:
                    continue
                match = _LINE.fullmatch(line)
                if match is not None:
                    found = True
                    yield _parse(*match.groups())
                elif pass_number == 0:
                    self._count_malformed(index * self._size + self._rank + 1)
        if not found:
            kind = "held-out" if held_out else "training"
            raise ValueError(f"{self._path}: no {kind} line in Criteo's format for rank {self._rank}")

    def _count_malformed(self, line_number: int) -> None:
        if not self.malformed:
            print(f"{self._path}:{line_number}: not in Criteo's format, skipped", file=sys.stderr)
        self.malformed += 1


def _parse(label: bytes, numbers: bytes, categories: bytes) -> tuple[int, list[int], list[int]]:
    return (
        int(label),
        [int(field) if field else 0 for field in numbers[1:].split(b"\t")],
        [int(field, 16) if field else MISSING for field in categories[1:].split(b"\t")],
    )


def _collate(rows: list[tuple[int, list[int], list[int]]]) -> Clicks:
    labels, numbers, categories = zip(*rows, strict=True)
    return Clicks(
        torch.tensor(labels, dtype=torch.float32),
        torch.tensor(numbers, dtype=torch.float32).clamp_(min=0).log1p_(),
        torch.tensor(categories),
    )


def bucket(categories: Tensor, buckets: int) -> Tensor:
    """Hashes (n, 26) categories to rows of one table; equal values of two columns get different rows."""
    return (_mix(categories) >> 20) % buckets


def write_sample(path: Path, rows: int, seed: int) -> None:
    """Writes a click log whose categories follow Zipf's law, and whose labels can be learnt from them.

    Each value of a category has a weight, and so has each pair of values of adjacent columns; the sum of the
    weights decides how likely a click is.
    """
    generator = torch.Generator().manual_seed(seed)
    with path.open("w", encoding="ascii") as file:
        for begin in range(0, rows, 4096):
            file.writelines(_made_up(min(4096, rows - begin), generator))


def _made_up(rows: int, generator: torch.Generator) -> Iterator[str]:
    def uniform(columns: int) -> Tensor:
        return torch.rand(rows, columns, generator=generator, dtype=torch.float64)

    values = _mix(_zipf(uniform(CATEGORIES)))
    pairs = _mix(values[:, 1:] ^ values[:, :-1])
    numbers = (torch.randn(rows, NUMBERS, generator=generator) * 1.5 + 1).exp().long()
    score = 0.5 * _weight(values).sum(1) + 0.2 * _weight(pairs).sum(1) + 0.3 * numbers[:, 0].log1p() - 2
    labels = (uniform(1)[:, 0] < torch.sigmoid(score)).long()
    categories = (values >> 32).masked_fill_(uniform(CATEGORIES) < 0.05, MISSING)
    numbers = numbers.masked_fill_(uniform(NUMBERS) < 0.2, MISSING)
    # bytes.hex() writes a whole row at once. -1, which stands for missing, is ffffffff there.
    hexadecimal = (row.tobytes().hex("\t", 4) for row in categories.numpy().astype(">i4"))
    for label, ints, hexes in zip(labels.tolist(), numbers.tolist(), hexadecimal, strict=True):
        integers = "\t".join("" if number == MISSING else str(number) for number in ints)
        yield f"{label}\t{integers}\t{hexes.replace('ffffffff', '')}\n"


def _zipf(uniform: Tensor) -> Tensor:
    """Ranks from 0, by the inverse of the continuous distribution with density x^-s on [1, n + 1]."""
    power = 1 - ZIPF_EXPONENT
    largest = torch.tensor(CARDINALITIES, dtype=torch.float64) + 1
    return (1 + uniform * (largest**power - 1)).pow(1 / power).long() - 1


def _mix(values: Tensor) -> Tensor:
    """64 pseudo-random bits for each value of each column; (n, columns), int64."""
    mixed = (values + (torch.arange(values.shape[1]) << 33)) * _GOLDEN
    return (mixed ^ (mixed >> 29)) * _GOLDEN


def _weight(mixed: Tensor) -> Tensor:
    """A number in [-1, 1) from pseudo-random bits."""
    return (mixed >> 11).double() / (1 << 52)
