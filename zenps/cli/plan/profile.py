"""Sparsity statistics of a trace: density, overlap, densification and skewness (Zen, OSDI '25, §2.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from zenps.errors import UsageError
from zenps.observe.recording import Header, Push, Rows, thinned
from zenps.partition.ring import SLOTS
from zenps.schemes.traffic import BLOCK_ELEMENTS, Links, Tensor, expected_imbalance

FEWEST_SAMPLES: Final = 4
"""The slope of a curve and its change need three points, each twice the one before."""

GRANULES: Final = tuple(1 << bits for bits in range(9))
"""The values of ``sync.granule``."""

MAX_IMBALANCE: Final = 1.05
"""The largest expected load of the fullest server, over its even share, that a granule may cause."""


class Growth:
    """Accumulation curve: the number of different items in a number of samples.

    Up to the number of samples that there are, it is the mean over all choices of samples: exact and unbiased
    (rarefaction: Hurlbert 1971, "The Nonconcept of Species Diversity"). Beyond, it follows Heaps' law,
    with an exponent that keeps falling as it falls between a quarter of the samples and all: a plain power
    law overestimates the tail of a finite table.

    Args:
        counts: for each item that is in any sample, the number of samples that it is in.
        samples: their number, at least :data:`FEWEST_SAMPLES`.
        total: the number of items that exist.
    """

    def __init__(self, counts: NDArray[np.int64], samples: int, total: float) -> None:
        self._samples, self._total = samples, total
        self._frequencies = np.bincount(counts, minlength=samples + 1)
        self._chances: dict[int, NDArray[np.float64]] = {}
        quarter, half, whole = (self.items(samples // part) for part in (4, 2, 1))
        steps = [math.log((samples // 2) / (samples // 4)), math.log(samples / (samples // 2))]
        slopes = [
            math.log(above / below) / step if below else 0.0
            for (below, above), step in zip(pairwise((quarter, half, whole)), steps, strict=True)
        ]
        self._slope = slopes[1]
        self._bend = min(0.0, (slopes[1] - slopes[0]) / (sum(steps) / 2))

    def items(self, samples: int) -> float:
        """The expected number of different items in ``samples`` samples."""
        if samples <= self._samples:
            return float(self._frequencies @ self.chances(samples))
        distance = math.log(samples / self._samples)
        if self._bend:  # no further than to where the curve is flat
            distance = min(distance, -self._slope / self._bend)
        growth = math.exp(self._slope * distance + self._bend * distance**2 / 2)
        return min(self.items(self._samples) * growth, self._total)

    def chances(self, samples: int) -> NDArray[np.float64]:
        """``[m + 1]``: by j, the chance that an item in j of m samples is in any of ``samples`` of them."""
        every, samples = self._samples, min(samples, self._samples)
        if samples not in self._chances:
            # C(m - j, k) ÷ C(m, k) as a product: the numbers themselves may have a million digits.
            chosen = np.arange(every)
            missed = np.cumprod(np.maximum(every - samples - chosen, 0) / (every - chosen))
            self._chances[samples] = 1 - np.concatenate([[1.0], missed])
        return self._chances[samples]


class Occurrences:
    """The items, rows or blocks, that some samples contain.

    Args:
        items: the numbers of the items that are in any sample.
        counts: the number of samples that each of them is in.
        samples: their number, at least :data:`FEWEST_SAMPLES`.
        total: the number of items that exist.
        kept: the share of these that the samples were reduced to.
    """

    def __init__(
        self, items: Rows, counts: NDArray[np.int64], samples: int, total: int, kept: float = 1.0
    ) -> None:
        self._counts, self._slots = counts, items * SLOTS // total
        self._looked_at = total * kept
        self._growth = Growth(counts, samples, self._looked_at)

    def density(self, workers: int) -> float:
        """The density of the union of this many workers."""
        return min(self._growth.items(workers) / self._looked_at, 1.0)

    def skew(self, parts: int, workers: int = 0) -> float:
        """How many times its even share the fullest of ``parts`` contiguous ranges has.

        Args:
            parts: the number of servers; among workers, the number of these.
            workers: the number of workers in whose union items are counted; 0: items are counted once for
                each worker that pushes them.
        """
        weights = self._growth.chances(workers)[self._counts] if workers else self._counts
        by_slot = np.bincount(self._slots, weights, minlength=SLOTS)
        counts = np.array([part.sum() for part in np.array_split(by_slot, parts)])  # servers own whole slots
        return float(counts.max() / counts.mean()) if counts.any() else 1.0


class Profile:
    """The statistics of one tensor. A dense tensor has fewer of them.

    Args:
        pushes: all pushes of the tensor, of all workers and steps, each with the worker's rank.

    Raises:
        UsageError: there are fewer than :data:`FEWEST_SAMPLES`, or they differ in shape.
    """

    def __init__(self, pushes: Sequence[tuple[int, Push]]) -> None:
        first = pushes[0][1]
        self.tensor, self.item_bytes = first.tensor, first.item_bytes
        if len({(push.shape, push.sparse_dims, push.item_bytes) for _, push in pushes}) > 1:
            raise UsageError(f"tensor {self.tensor!r} changes its shape or dtype; expected one for all steps")
        times = len({(rank, push.step) for rank, push in pushes})  # a trace may have a worker's file twice
        if times < FEWEST_SAMPLES:
            raise UsageError(
                f"tensor {self.tensor!r} was pushed {times} time(s); expected at least "
                f"{FEWEST_SAMPLES}: record more steps, by --steps"
            )
        ranks = {rank for rank, _ in pushes}
        self.workers = len(ranks)
        self.is_sparse = first.sparse_dims > 0
        self.rows, self.columns = max(first.rows_total, 1), max(first.columns, 1)
        self.density = sum(push.pushed for _, push in pushes) / len(pushes) / self.rows
        self.overlap = self.step_overlap = math.nan
        if not self.is_sparse:
            self.rows, self.density = self.columns, self.density / self.columns
            self.columns = 1
            return
        halvings = max(push.halvings for _, push in pushes)
        samples = {(rank, push.step): thinned(push.row_numbers(), halvings) for rank, push in pushes}
        self.samples = len(samples)
        items, counts = _counted(samples.values())
        self._rows = Occurrences(items, counts, self.samples, self.rows, 0.5**halvings)
        self.overlap = _mean_overlap(samples, others=True)
        self.step_overlap = _mean_overlap(samples, others=False)
        self._equal_granules = {
            granule: self.rows * self.density / granule
            if halvings
            else float(np.mean([_equal_granules(rows // granule) for rows in samples.values()]))
            for granule in (GRANULES if self.columns == 1 else ())
        }
        self._blocks: Occurrences | None = None
        if not halvings:
            self._blocks = self._blocks_of(items, counts, list(samples.values()))

    def _blocks_of(self, items: Rows, counts: NDArray[np.int64], samples: Sequence[Rows]) -> Occurrences:
        """The blocks of the flattened tensor. A row may straddle two and more.

        Args:
            items: the rows that are in any of ``samples``.
            counts: the number of samples that each of them is in.
            samples: the rows of each push.
        """
        ends, at_ends = _counted(np.unique(np.concatenate(self._first_and_last(rows))) for rows in samples)
        # A block between the first and the last of a wide row contains no other row.
        first, last = self._first_and_last(items)
        widths = np.maximum(last - first - 1, 0)
        between = np.repeat(last - np.cumsum(widths), widths) + np.arange(widths.sum())
        return Occurrences(
            np.concatenate([ends, between]),
            np.concatenate([at_ends, np.repeat(counts, widths)]),
            len(samples),
            -(-self.rows * self.columns // BLOCK_ELEMENTS),
        )

    def _first_and_last(self, rows: Rows) -> tuple[Rows, Rows]:
        """The block in which each of ``rows`` begins, and the one in which it ends."""
        begins = rows * self.columns
        return begins // BLOCK_ELEMENTS, (begins + self.columns - 1) // BLOCK_ELEMENTS

    def densification(self, workers: int) -> float:
        """γ: the rows of the union of ``workers``, divided by those of one worker."""
        return self.union(workers) / self.union(1) if self.union(1) else 1.0

    def union(self, workers: int) -> float:
        """The density of the union of ``workers``."""
        return self._rows.density(workers)

    def skew(self, parts: int, workers: int = 0) -> float:
        """The skew of rows, as for :meth:`Occurrences.skew`."""
        return self._rows.skew(parts, workers)

    @property
    def has_elements(self) -> bool:
        """True if rows are single elements, which may be dealt to servers in granules."""
        return self.is_sparse and self.columns == 1

    def granule(self, parts: int) -> int | None:
        """The largest granule with which ``parts`` servers have nearly even shares of what a worker pushes.

        None if rows are not single elements, because a granule is then one row, or if even single elements
        are too few for nearly even shares. A thinned trace does not tell which adjacent elements are present,
        so all elements of a granule are assumed to be.
        """
        if not self.has_elements:
            return None
        even = (size for size in GRANULES if self._imbalance(parts, size) <= MAX_IMBALANCE)
        return max(even, default=None)

    def _imbalance(self, parts: int, granule: int) -> float:
        """The expected imbalance of what a worker pushes, in granules of this size."""
        granules = -(-self.rows // granule)
        return expected_imbalance(parts, granules, self._equal_granules[granule] / granules)

    def as_tensor(self, links: Links) -> Tensor:
        """The tensor as the cost model takes it, for the workers and servers of ``links``."""
        if not self.is_sparse:
            return Tensor(rows=self.rows, item_bytes=self.item_bytes, is_sparse=False)
        workers, parts = links.workers, links.parts
        unions = tuple(
            self.union(min(1 << level, workers)) for level in range(1, (workers - 1).bit_length() + 1)
        )
        tensor = Tensor(
            rows=self.rows,
            columns=self.columns,
            item_bytes=self.item_bytes,
            density=self.density,
            unions=unions,
            skew=self.skew(parts),
            union_skew=self.skew(parts, workers),
        ).permuted(links)
        if self._blocks is None:
            return tensor
        return structs.replace(
            tensor,
            blocks=self._blocks.density(1),
            union_blocks=self._blocks.density(workers),
            block_skew=self._blocks.skew(parts),
            union_block_skew=self._blocks.skew(parts, workers),
        )


def profiles(trace: Iterable[tuple[Header, Push]]) -> tuple[list[Profile], list[str]]:
    """The profile of each tensor, the largest first; and the names of tensors left out as rare.

    A tensor is rare if fewer than half of the steps pushed it.

    Raises:
        UsageError: as for :class:`Profile`, or no tensor is left.
    """
    by_name: dict[str, list[tuple[int, Push]]] = {}
    for header, push in trace:
        by_name.setdefault(push.tensor, []).append((header.rank, push))
    steps = 1 + max((push.step for pushes in by_name.values() for _, push in pushes), default=-1)
    rare = [name for name, pushes in by_name.items() if 2 * len({push.step for _, push in pushes}) < steps]
    found = [Profile(pushes) for name, pushes in by_name.items() if name not in rare]
    if not found:
        raise UsageError(
            "nothing was pushed; does the training call zenps.push_pull or DistributedOptimizer?"
        )
    found.sort(key=lambda profile: -profile.rows * profile.columns * profile.item_bytes)
    return found, rare


def _equal_granules(granules: Rows) -> float:
    """The number of granules of equal size that would be dealt to servers as unevenly as these.

    It is (Σw)² ÷ Σw² for granules of w elements: they are dealt at random, and variances add up.

    Args:
        granules: the granule of each element, sorted.
    """
    begins = np.flatnonzero(np.diff(granules, prepend=-1))
    weights = np.diff(begins, append=len(granules)).astype(np.float64)
    return float(weights.sum() ** 2 / (weights @ weights)) if len(weights) else 0.0


def _counted(samples: Iterable[Rows]) -> tuple[Rows, NDArray[np.int64]]:
    """The items that are in any of ``samples``, and the number of samples that each is in."""
    return np.unique(np.concatenate(list(samples)), return_counts=True)


def _mean_overlap(samples: dict[tuple[int, int], Rows], *, others: bool) -> float:
    """|A ∩ B| ÷ min(|A|, |B|), of consecutive ranks in one step; or of one rank in consecutive steps."""
    ratios = []
    for (rank, step), rows in samples.items():
        following = samples.get((rank + 1, step) if others else (rank, step + 1))
        if following is not None and (smaller := min(len(rows), len(following))):
            ratios.append(len(np.intersect1d(rows, following, assume_unique=True)) / smaller)
    return float(np.mean(ratios)) if ratios else math.nan
