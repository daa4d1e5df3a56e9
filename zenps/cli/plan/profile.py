"""What a trace says of each tensor: density, overlap, densification, skewness (Zen, OSDI '25, §2.2)."""

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
from zenps.schemes import traffic
from zenps.schemes.traffic import BLOCK_ELEMENTS, Links, expected_imbalance

FEWEST_SAMPLES: Final = 4
"""A curve's slope, and how it changes, takes three points, each twice the one before."""

GRANULES: Final = tuple(1 << bits for bits in range(9))
"""What ``sync.granule`` can be."""

MOST_IMBALANCE: Final = 1.05
"""Expected of the fullest server, over its even share, with a granule that is not too large."""


class Growth:
    """How many different items some samples have among them: an accumulation curve.

    Up to as many samples as there are, the mean over all choices of them: exact, and free of bias
    (rarefaction: Hurlbert 1971, "The Nonconcept of Species Diversity"). Beyond, Heaps' law with an exponent
    that falls on as it falls between a quarter of the samples and all: a power law alone overrates the tail
    of a finite table.

    Args:
        counts: in how many samples each item is that is in any.
        samples: how many there are, at least :data:`FEWEST_SAMPLES`.
        total: how many items there could be.
    """

    def __init__(self, counts: NDArray[np.int64], samples: int, total: float) -> None:
        self._samples, self._total = samples, total
        self._frequencies = np.bincount(counts, minlength=samples + 1)
        quarter, half, whole = (self.items(samples // part) for part in (4, 2, 1))
        steps = [math.log((samples // 2) / (samples // 4)), math.log(samples / (samples // 2))]
        slopes = [
            math.log(above / below) / step if below else 0.0
            for (below, above), step in zip(pairwise((quarter, half, whole)), steps, strict=True)
        ]
        self._slope = slopes[1]
        self._bend = min(0.0, (slopes[1] - slopes[0]) / (sum(steps) / 2))

    def items(self, samples: int) -> float:
        """Expected in ``samples`` of them together."""
        if samples <= self._samples:
            return float(self._frequencies @ self.chances(samples))
        distance = math.log(samples / self._samples)
        if self._bend:  # to where the curve is flat
            distance = min(distance, -self._slope / self._bend)
        growth = math.exp(self._slope * distance + self._bend * distance**2 / 2)
        return min(self.items(self._samples) * growth, self._total)

    def chances(self, samples: int) -> NDArray[np.float64]:
        """``[m + 1]``: of an item that is in j of all m samples, to be in one of ``samples`` of them."""
        every, samples = self._samples, min(samples, self._samples)
        ways = math.comb(every, samples)
        return np.array([1 - math.comb(every - j, samples) / ways for j in range(every + 1)])


class Occurrences:
    """Which items, rows or blocks, are in some samples.

    Args:
        items: their numbers, of all that are in any.
        counts: in how many samples each is.
        samples: how many there are, at least :data:`FEWEST_SAMPLES`.
        total: of how many items.
        kept: the share of all items that was looked at.
    """

    def __init__(
        self, items: Rows, counts: NDArray[np.int64], samples: int, total: int, kept: float = 1.0
    ) -> None:
        self._counts, self._slots = counts, items * SLOTS // total
        self._looked_at = total * kept
        self._growth = Growth(counts, samples, self._looked_at)

    def density(self, workers: int) -> float:
        """Of the union of so many."""
        return min(self._growth.items(workers) / self._looked_at, 1.0)

    def skew(self, parts: int, workers: int = 0) -> float:
        """How many times its even share the fullest of ``parts`` contiguous ranges has.

        Args:
            parts: at most 4096.
            workers: of whose union; 0: of what is pushed to it, by all together.
        """
        weights = self._growth.chances(workers)[self._counts] if workers else self._counts
        by_slot = np.bincount(self._slots, weights, minlength=SLOTS)
        counts = np.array([part.sum() for part in np.array_split(by_slot, parts)])  # servers own whole slots
        return float(counts.max() / counts.mean()) if counts.any() else 1.0


class Profile:
    """One sparse tensor; or a dense one, of which there is less to know.

    Args:
        pushes: all of its, of all workers and steps, with their ranks.

    Raises:
        UsageError: there are fewer than :data:`FEWEST_SAMPLES`, or they differ in shape.
    """

    def __init__(self, pushes: Sequence[tuple[int, Push]]) -> None:
        first = pushes[0][1]
        self.tensor, self.item_bytes = first.tensor, first.item_bytes
        if len({(push.shape, push.sparse_dims, push.item_bytes) for _, push in pushes}) > 1:
            raise UsageError(f"tensor {self.tensor!r} changes its shape or dtype; expected one for all steps")
        if len(pushes) < FEWEST_SAMPLES:
            raise UsageError(
                f"tensor {self.tensor!r} was pushed {len(pushes)} time(s); expected at least "
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
        """Those of the flattened tensor, in which a row may straddle two and more.

        Args:
            items: the rows that are in any of ``samples``.
            counts: in how many.
        """
        ends, at_ends = _counted(np.unique(np.concatenate(self._first_and_last(rows))) for rows in samples)
        # A block between a wide row's first and last has nothing of other rows: it is there when that row is.
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
        """The blocks in which each of ``rows`` begins, and ends."""
        begins = rows * self.columns
        return begins // BLOCK_ELEMENTS, (begins + self.columns - 1) // BLOCK_ELEMENTS

    def densification(self, workers: int) -> float:
        """γ: how many times the rows of one worker the union of ``workers`` has."""
        return self.union(workers) / self.union(1) if self.union(1) else 1.0

    def union(self, workers: int) -> float:
        """The density of the union of ``workers``."""
        return self._rows.density(workers)

    def skew(self, parts: int, workers: int = 0) -> float:
        """As :meth:`Occurrences.skew`, of rows."""
        return self._rows.skew(parts, workers)

    def granule(self, parts: int) -> int | None:
        """The largest with which ``parts`` servers nearly have their even share of what a worker pushes.

        None where rows are no single elements: one row is one granule then. Of a thinned trace, which says
        nothing of neighbours, all that could be in a granule are taken to be there.
        """
        if not self.is_sparse or self.columns > 1:
            return None
        equal = self._equal_granules
        even = (size for size in GRANULES if expected_imbalance(parts, equal[size]) <= MOST_IMBALANCE)
        return max(even, default=1)

    def as_tensor(self, links: Links) -> traffic.Tensor:
        """As it looks to the cluster that ``links`` describe."""
        if not self.is_sparse:
            return traffic.Tensor(rows=self.rows, item_bytes=self.item_bytes, is_sparse=False)
        workers, parts = links.workers, min(links.parts, SLOTS)
        unions = tuple(
            self.union(min(1 << level, workers)) for level in range(1, (workers - 1).bit_length() + 1)
        )
        tensor = traffic.Tensor(
            rows=self.rows,
            columns=self.columns,
            item_bytes=self.item_bytes,
            density=self.density,
            unions=unions,
            skew=self.skew(parts),
            union_skew=self.skew(parts, workers),
            imbalance=expected_imbalance(parts, self.union(workers) * self.rows),
        )
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
    """Of each tensor, the largest first; and the names of those that fewer than half of the steps pushed.

    Raises:
        UsageError: as :class:`Profile`, or there is none.
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
    """How many granules of one size would be dealt as unevenly as those of which each element is in one.

    (Σw)² ÷ Σw² for granules of w elements: they are dealt at random, and variances add up.

    Args:
        granules: sorted.
    """
    begins = np.flatnonzero(np.diff(granules, prepend=-1))
    weights = np.diff(begins, append=len(granules)).astype(np.float64)
    return float(weights.sum() ** 2 / (weights @ weights)) if len(weights) else 0.0


def _counted(samples: Iterable[Rows]) -> tuple[Rows, NDArray[np.int64]]:
    """Which items are in any of ``samples``, and in how many."""
    return np.unique(np.concatenate(list(samples)), return_counts=True)


def _mean_overlap(samples: dict[tuple[int, int], Rows], *, others: bool) -> float:
    """|A ∩ B| ÷ min(|A|, |B|), of neighbouring ranks in one step; or of one rank in neighbouring steps."""
    ratios = []
    for (rank, step), rows in samples.items():
        peer_memory = samples.get((rank + 1, step) if others else (rank, step + 1))
        if peer_memory is not None and (smaller := min(len(rows), len(peer_memory))):
            ratios.append(len(np.intersect1d(rows, peer_memory, assume_unique=True)) / smaller)
    return float(np.mean(ratios)) if ratios else math.nan
