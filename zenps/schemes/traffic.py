"""What :mod:`zenps.schemes.costs` is about: the bytes of a tensor, a cluster's links, and a cost.

The letters are theirs.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from zenps.codecs.registry import CODECS, choose

BLOCK_ELEMENTS: Final = 256
"""OmniReduce's blocks (SIGCOMM '21, §4)."""

DELTA_OVER_ENTROPY: Final = 1.03
"""Measured, over densities of 0.01 % to 50 %; ``most_bytes`` of that codec is what none exceeds."""


class Tensor(Struct, frozen=True, kw_only=True):
    """A gradient as n workers have it.

    Attributes:
        rows, columns, item_bytes: the whole table; an element-sparse tensor has one column.
        density: d, the share of rows that one worker pushes, duplicates summed; the mean of all workers.
        unions: the density of the union of 2, 4, 8, … workers, and last of all n: D. ⌈log₂ n⌉ of them.
        skew: how many times its even share of a worker's rows the fullest of the servers' contiguous ranges
            has (Zen §2.2: skewness ratio); for schemes that partition so.
        union_skew: the same of the union's rows; None: as ``skew``.
        imbalance: the same of a permuted partition, for both.
        blocks, union_blocks: the share of blocks of 256 elements that are not all zero, for one worker and in
            the union; None: as if rows were spread at random.
        block_skew, union_block_skew: the skew of these; None: as of rows. Where rows lie close together, more
            of them share a block.
        is_sparse: otherwise it is reckoned whole under every scheme; what omnireduce saves by leaving out its
            blocks of zeros is not.
    """

    rows: int
    columns: int = 1
    item_bytes: int = 4
    density: float = 1.0
    unions: tuple[float, ...] = ()
    skew: float = 1.0
    union_skew: float | None = None
    imbalance: float = 1.0
    blocks: float | None = None
    union_blocks: float | None = None
    block_skew: float | None = None
    union_block_skew: float | None = None
    is_sparse: bool = True

    @property
    def row_bytes(self) -> int:
        """Of one row's values."""
        return self.columns * self.item_bytes

    @property
    def dense_bytes(self) -> int:
        """M."""
        return self.rows * self.row_bytes

    @property
    def union(self) -> float:
        """D."""
        return self.unions[-1] if self.unions else self.density

    def coo_bytes(self, density: float) -> float:
        """Of so many of the rows, each with its number."""
        return self.rows * density * (self.row_bytes + index_bytes(self.rows))

    def best_bytes(self, density: float) -> float:
        """The same by the codec that ``sync.codec = "auto"`` takes."""
        rows = round(self.rows * density)
        codec = choose("auto", rows, self.rows, self.row_bytes)
        if codec.name == "delta":
            positions = DELTA_OVER_ENTROPY * _entropy_bytes(rows, self.rows)
        else:
            positions = codec.most_bytes(rows, self.rows)
        return rows * self.row_bytes + positions

    def random_blocks(self, density: float) -> float:
        """The share of blocks with a row in them, were rows spread at random.

        Blocks run over the flattened tensor, so that rows straddle them. One of b elements begins in its row
        of c at a multiple of g = gcd(b, c), each as often as any. With q and r, quotient and remainder of
        (b - g) ÷ c, it lies on q + 1 rows, and in r of c cases on one more: the share is
        1 - (1 - x)^(q + 1)·(1 - x·r ÷ c) at density x.
        """
        size = min(BLOCK_ELEMENTS, self.rows * self.columns)
        whole, part = divmod(size - math.gcd(size, self.columns), self.columns)
        return 1 - math.pow(1 - density, whole + 1) * (1 - density * part / self.columns)


class Links(Struct, frozen=True, kw_only=True):
    """A cluster: hosts with one full-duplex link each, all alike, on a network that is never the bottleneck.

    Attributes:
        workers: n, one on each host.
        servers: k hosts that have nothing but a server; 0: one server on each worker's host.
        bytes_per_second: of a link, in each direction.
        latency_seconds: from the end of a message's last byte's sending to its use.
    """

    workers: int
    servers: int = 0
    bytes_per_second: float
    latency_seconds: float = 0.0

    @property
    def parts(self) -> int:
        """How many servers share a tensor."""
        return self.servers or self.workers


class Cost(Struct, frozen=True, kw_only=True):
    """Of one synchronisation.

    Attributes:
        push_bytes: in one direction of the busiest link, on their way to be summed.
        pull_bytes: the same, of sums.
        busiest_bytes: of both, in the busier direction of the busiest link.
        serial_bytes: what of both has to pass one after the other, because it shares a direction or because
            pulls begin when pushes have ended.
        rounds: messages that wait for one another.
        seconds: ``serial_bytes`` by bandwidth, and the latency of ``rounds``.
        variant: which of its algorithms the scheme takes, where it has several.
    """

    push_bytes: float
    pull_bytes: float
    busiest_bytes: float
    serial_bytes: float
    rounds: int
    seconds: float
    variant: str = ""


def skew_at(density: float, *skews: float | None) -> float:
    """The first of ``skews`` that is known, but no range is fuller than full."""
    known = next(skew for skew in skews if skew is not None)
    return min(known, 1 / density) if density else 1.0


def expected_imbalance(parts: int, rows: float) -> float:
    """How many times its even share the fullest of ``parts`` has, when ``rows`` are dealt at random.

    1 + √(2·k·ln k ÷ rows): the fullest of k bins (Raab and Steger, "Balls into Bins", 1998), which is Zen's
    theorem 2 with its constant.
    """
    if parts < 2 or rows <= 0:
        return 1.0
    return min(1 + math.sqrt(2 * parts * math.log(parts) / rows), float(parts))


def index_bytes(span: int) -> int:
    """Of the number of one row, or element, of ``span``."""
    return CODECS["coo"].most_bytes(1, span)


def _entropy_bytes(rows: int, span: int) -> float:
    """Of which ``rows`` of ``span`` there are, each as likely as any."""
    present = rows / span
    if present in (0.0, 1.0):
        return 0.0
    bits = -present * math.log2(present) - (1 - present) * math.log2(1 - present)
    return span * bits / 8
