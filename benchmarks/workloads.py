"""Benchmark workloads: gradients like those of the papers' models, scaled down for hosts on one machine.

Zen (OSDI '25, §2.2, §4.1) measures three models whose gradients are sparse by nature, in embedding tables,
and large language models whose gradients a sparsifier has thinned out. The workloads keep all that a scheme's
bytes depend on: density, overlap of the workers' rows, and the location of hot rows. The numbers of rows and
columns are scaled down. Rows are drawn by the Zipf-Mandelbrot law: the probability of the row of rank k falls
as (k + offset) ** -exponent.

``gradient(rank, step)`` is a sparse COO tensor of float32 on the CPU, the same whenever it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import msgspec
import torch
import xxhash
from torch import Tensor

SIZES: Final = (2, 4, 8, 16)
"""The numbers of workers for which the union is given."""

PARTS: Final = (2, 4, 8, 16, 128)
"""The numbers of ranges for which the skew is given."""

BLOCK: Final = 256
"""OmniReduce's: so many adjacent elements travel together (SIGCOMM '21, §4)."""


@dataclass(frozen=True)
class Workload(ABC):
    """A function (rank, step) → gradient.

    Attributes:
        name: on the command line.
        title: the model and its data.
        published: what the papers say about it; and about all, that above 60 % of what is not zero lies in
            the first of 8 ranges.
        rows: of the table; each is one index.
    """

    name: str
    title: str
    published: str
    rows: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the gradient, made dense."""

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def dense_bytes(self) -> int:
        """Of the gradient, made dense."""
        return 4 * self.rows * self.columns

    @abstractmethod
    def resized(self, factor: float) -> Workload:
        """The same with so many times the rows. Density, overlap and skew stay what they are."""

    @abstractmethod
    def ids(self, rank: int, step: int) -> Tensor:
        """The rows that a worker touches in a step, some perhaps twice: (k,) int64."""

    def gradient(self, rank: int, step: int) -> Tensor:
        """A worker's gradient: sparse COO, uncoalesced where a row was touched twice."""
        ids = self.ids(rank, step)
        columns = self.shape[1:]
        values = torch.randn(len(ids), *columns, generator=_generator(self.name, rank, step, "values"))
        return torch.sparse_coo_tensor(ids.unsqueeze(0), values, self.shape, check_invariants=False)


@dataclass(frozen=True)
class Rows(Workload):
    """An embedding table.

    Attributes:
        dim: columns.
        lookups: per worker and step.
        exponent: of Zipf's law.
        offset: of Mandelbrot's, in rows.
        scattered: the share of rows that do not lie by rank, the hottest first, but anywhere.
    """

    dim: int
    lookups: int
    exponent: float
    offset: float
    scattered: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.dim)

    def resized(self, factor: float) -> Workload:
        return replace(
            self,
            rows=round(factor * self.rows),
            lookups=round(factor * self.lookups),
            offset=factor * self.offset,
        )

    def ids(self, rank: int, step: int) -> Tensor:
        generator = _generator(self.name, rank, step, "ids")
        drawn = torch.rand(self.lookups, generator=generator, dtype=torch.float64)
        return self._row_of_rank[torch.searchsorted(self._cumulated, drawn).clamp_(max=self.rows - 1)]

    @cached_property
    def _cumulated(self) -> Tensor:
        weights = (torch.arange(1, self.rows + 1, dtype=torch.float64) + self.offset) ** -self.exponent
        return weights.cumsum(0) / weights.sum()

    @cached_property
    def _row_of_rank(self) -> Tensor:
        generator = _generator(self.name)
        rows = torch.arange(self.rows)
        (anywhere,) = (torch.rand(self.rows, generator=generator) < self.scattered).nonzero(as_tuple=True)
        rows[anywhere] = anywhere[torch.randperm(len(anywhere), generator=generator)]
        return rows


@dataclass(frozen=True)
class Elements(Workload):
    """A dense gradient of which a sparsifier has left the greatest elements.

    Each block of :data:`BLOCK` adjacent elements has a common scale, like the weights of one neuron, the same
    for all workers; scales are log-normal and fall along the tensor. An element is sent if it is above a
    threshold that a share of ``density`` of all elements exceed.

    Attributes:
        density: elements that are sent, over all.
        spread: standard deviation of the logarithm of a block's scale.
        fall: how much that logarithm is less at the tensor's end than at its beginning.
    """

    density: float
    spread: float
    fall: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows,)

    def resized(self, factor: float) -> Workload:
        return replace(self, rows=round(factor * self.rows / BLOCK) * BLOCK)

    def ids(self, rank: int, step: int) -> Tensor:
        drawn = torch.rand(self.rows, generator=_generator(self.name, rank, step, "ids"))
        return (drawn.view(-1, BLOCK) < self._chances).view(-1).nonzero().squeeze(1)

    @cached_property
    def _chances(self) -> Tensor:
        """The probability that an element of each block is sent, (blocks, 1)."""
        blocks = self.rows // BLOCK
        scales = self.spread * torch.randn(blocks, generator=_generator(self.name), dtype=torch.float64)
        scales -= self.fall * torch.arange(blocks, dtype=torch.float64) / blocks
        low, high = -20.0, 20.0
        for _ in range(60):
            threshold = (low + high) / 2
            chances = torch.special.erfc(torch.exp(threshold - scales) / 2**0.5)
            low, high = (threshold, high) if chances.mean() > self.density else (low, threshold)
        return chances.float().unsqueeze(1)


class Character(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a workload that a scheme's bytes depend on, measured in one step.

    Attributes:
        rows, columns: of the tensor.
        unique_rows: that a worker touches; the mean over workers.
        overlap: rows that two workers share, over those of the one that has fewer.
        union_rows: that n workers together touch, by n.
        skew: of n even ranges of rows, those of the fullest over the mean, by n; the mean over workers.
        union_skew: the same of what n workers together touch, in n ranges.
        blocks: the share of blocks of :data:`BLOCK` elements in which a worker touches any.
        union_blocks: the same of n workers together, by n.
        block_skew, union_block_skew: as ``skew`` and ``union_skew``, of these blocks.
    """

    rows: int
    columns: int
    unique_rows: float
    overlap: float
    union_rows: dict[int, int]
    skew: dict[int, float]
    union_skew: dict[int, float]
    blocks: float
    union_blocks: dict[int, float]
    block_skew: dict[int, float]
    union_block_skew: dict[int, float]

    @property
    def density(self) -> float:
        """Zen's d: the share of rows that a worker touches."""
        return self.unique_rows / self.rows

    def densification(self, workers: int) -> float:
        """Zen's γ: how much denser the union is than one worker's rows."""
        return self.union_rows[workers] / self.unique_rows


def characterise(workload: Workload, sizes: Sequence[int] = SIZES) -> Character:
    """Measures the gradients of step 0."""
    touched = [workload.ids(rank, 0).unique() for rank in range(max(2, *sizes))]
    first, second = touched[:2]
    count = sum(map(len, touched)) / len(touched)
    shared = torch.isin(first, second, assume_unique=True).sum().item()
    unions = {size: torch.cat(touched[:size]).unique() for size in sizes}
    width = max(1, BLOCK // workload.columns)
    total = -(-workload.rows // width)
    blocks = (first // width).unique()
    union_blocks = {size: (union // width).unique() for size, union in unions.items()}
    return Character(
        rows=workload.rows,
        columns=workload.columns,
        unique_rows=count,
        overlap=shared / min(len(first), len(second)),
        union_rows={size: len(union) for size, union in unions.items()},
        skew={
            parts: sum(_skew(ids, workload.rows, parts) for ids in touched) / len(touched) for parts in PARTS
        },
        union_skew={size: _skew(union, workload.rows, size) for size, union in unions.items()},
        blocks=len(blocks) / total,
        union_blocks={size: len(union) / total for size, union in union_blocks.items()},
        block_skew={size: _skew(blocks, total, size) for size in sizes},
        union_block_skew={size: _skew(union, total, size) for size, union in union_blocks.items()},
    )


def _skew(ids: Tensor, rows: int, parts: int) -> float:
    counts = torch.bincount(ids * parts // rows, minlength=parts)
    return counts.max().item() * parts / len(ids)


def _generator(*key: object) -> torch.Generator:
    """A generator of random numbers that depend only on ``key``."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(repr(key).encode()))


WORKLOADS: Final[dict[str, Workload]] = {
    workload.name: workload
    for workload in (
        Rows(
            name="lstm",
            title="LSTM, One Billion Word",
            published="406 M elements, density 1.13 %, skew above 70 in 128 ranges",
            rows=262_144,
            dim=64,
            lookups=7_400,
            exponent=2.6,
            offset=1_150,
        ),
        Rows(
            name="deepfm",
            title="DeepFM, Criteo",
            published="214 M elements, density 2.80 %, and 5.2 % over 8 workers",
            rows=300_000,
            dim=32,
            lookups=45_000,
            exponent=6.0,
            offset=9_000,
            scattered=0.35,
        ),
        Rows(
            name="nmt",
            title="NMT, IWSLT14 De-En",
            published="112 M elements, density 2.47 %",
            rows=110_000,
            dim=64,
            lookups=4_400,
            exponent=1.5,
            offset=350,
            scattered=0.2,
        ),
        Elements(
            name="opt",
            title="OPT-2.7B, the greatest 5 % by DGC",
            published="density 5 %, blocks of 256 elements with any of it above 30 %",
            rows=1 << 22,
            density=0.05,
            spread=0.3,
            fall=3.3,
        ),
    )
}
"""All of them by name."""
