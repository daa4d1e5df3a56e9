"""Traffic model: the bytes of a tensor, the links of a cluster, and the cost of one synchronisation.

:mod:`zenps.schemes.costs` predicts by it. The docstring of ``Scheme.cost`` explains the letters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct, structs

from zenps.codecs.registry import CODECS, choose
from zenps.partition.ring import SLOTS

BLOCK_ELEMENTS: Final = 256
"""OmniReduce's blocks (SIGCOMM '21, §4)."""

DELTA_OVER_ENTROPY: Final = 1.03
"""Measured, over densities of 0.01 % to 50 %; ``max_bytes`` of that codec is an upper bound."""


class Tensor(Struct, frozen=True, kw_only=True):
    """A gradient as n workers have it.

    Attributes:
        rows, columns, item_bytes: of the whole table; an element-sparse tensor has one column.
        density: d, the share of rows that one worker pushes, duplicates summed; the mean of all workers.
        unions: the density of the union of 2, 4, 8, … workers, and last of all n, D: ⌈log₂ n⌉ numbers.
        skew: of one worker's rows, when each server has a contiguous range of rows: the rows in the fullest
            range, divided by the mean over all ranges (Zen §2.2: skewness ratio).
        union_skew: the same for the union's rows; None: as ``skew``.
        imbalance: the same ratio for a permuted partition, of the rows that all workers push.
        union_imbalance: the same for the union's rows.
        element_imbalance, union_element_imbalance: the same if single elements are dealt to servers.
        blocks, union_blocks: the share of blocks of 256 elements that are not all zero, for one worker and in
            the union; None: as if rows were spread at random.
        block_skew, union_block_skew: the skew of these blocks; None: as of rows. It differs where rows lie
            close together, because then more of them share a block.
        is_sparse: False if the tensor travels whole under every scheme. Then the blocks of zeros that
            omnireduce leaves out are also counted.
    """

    rows: int
    columns: int = 1
    item_bytes: int = 4
    density: float = 1.0
    unions: tuple[float, ...] = ()
    skew: float = 1.0
    union_skew: float | None = None
    imbalance: float = 1.0
    union_imbalance: float = 1.0
    element_imbalance: float = 1.0
    union_element_imbalance: float = 1.0
    blocks: float | None = None
    union_blocks: float | None = None
    block_skew: float | None = None
    union_block_skew: float | None = None
    is_sparse: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of the values of one row."""
        return self.columns * self.item_bytes

    @property
    def dense_bytes(self) -> int:
        """M: the bytes of the whole tensor."""
        return self.rows * self.row_bytes

    @property
    def union(self) -> float:
        """D: the density of the union of all workers."""
        return self.unions[-1] if self.unions else self.density

    @property
    def by_element(self) -> Tensor:
        """The same tensor with its elements for rows."""
        return structs.replace(
            self,
            rows=self.rows * self.columns,
            columns=1,
            imbalance=self.element_imbalance,
            union_imbalance=self.union_element_imbalance,
        )

    def permuted(self, links: Links) -> Tensor:
        """The same tensor with the imbalance that is expected over the servers of ``links``."""
        pushed, union = self._expected_imbalances(self.rows, links)
        pushed_elements, union_elements = self._expected_imbalances(self.rows * self.columns, links)
        return structs.replace(
            self,
            imbalance=pushed,
            union_imbalance=union,
            element_imbalance=pushed_elements,
            union_element_imbalance=union_elements,
        )

    def _expected_imbalances(self, items: int, links: Links) -> tuple[float, float]:
        """The imbalance of what workers push and of the union, if ``items`` rows or elements are dealt."""
        union = expected_imbalance(links.parts, items, self.union)
        pushed = expected_imbalance(links.parts, items, self.density, links.workers)
        # What workers have in common goes to the same server, and so does not even out.
        return links.slot_imbalance * max(pushed, union), links.slot_imbalance * union

    @property
    def row_skews(self) -> tuple[float, float]:
        """The skew of a worker's rows and of the union's, over contiguous ranges."""
        return (
            _skew_at(self.density, self.skew),
            _skew_at(self.union, self.union_skew, self.skew),
        )

    @property
    def block_shares(self) -> tuple[float, float]:
        """The share of blocks that are not all zero, of one worker and in the union."""
        return (
            self.random_blocks(self.density) if self.blocks is None else self.blocks,
            self.random_blocks(self.union) if self.union_blocks is None else self.union_blocks,
        )

    @property
    def block_skews(self) -> tuple[float, float]:
        """The skew of a worker's blocks and of the union's, over contiguous ranges."""
        own, union = self.block_shares
        return (
            _skew_at(own, self.block_skew, self.skew),
            _skew_at(union, self.union_block_skew, self.union_skew, self.skew),
        )

    def coo_bytes(self, density: float) -> float:
        """Bytes of the share ``density`` of the rows, each with its index."""
        return self.rows * density * (self.row_bytes + index_bytes(self.rows))

    def best_bytes(self, density: float) -> float:
        """Bytes of the share ``density`` of the rows, encoded as ``sync.codec = "auto"`` does it."""
        rows = round(self.rows * density)
        codec = choose("auto", rows, self.rows, self.row_bytes)
        if codec.name == "delta":
            positions = DELTA_OVER_ENTROPY * _entropy_bytes(rows, self.rows)
        else:
            positions = codec.max_bytes(rows, self.rows)
        return rows * self.row_bytes + positions

    def random_blocks(self, density: float) -> float:
        """The share of blocks that contain a row, if rows are spread at random.

        Blocks run over the flattened tensor, so rows cross their edges. Let a block have b elements and a row
        c. A block begins within a row at a multiple of g = gcd(b, c), at each equally often. Let q and r be
        quotient and remainder of (b - g) ÷ c. Then a block lies on q + 1 rows, and in r of c cases on one
        more. So the share is 1 - (1 - x)^(q + 1)·(1 - x·r ÷ c) at density x.
        """
        size = min(BLOCK_ELEMENTS, self.rows * self.columns)
        whole, part = divmod(size - math.gcd(size, self.columns), self.columns)
        return 1 - math.pow(1 - density, whole + 1) * (1 - density * part / self.columns)


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of one synchronisation.

    Attributes:
        push_bytes: bytes that are not summed yet, in one direction of the busiest link.
        pull_bytes: bytes of sums, in one direction of that link.
        busiest_bytes: bytes of both in the busier direction of that link.
        serial_bytes: bytes of both that travel one after another, because they share a direction, or because
            pulls begin only when pushes have ended.
        rounds: the number of messages of which each waits for the one before it.
        seconds: the time that ``serial_bytes`` take at the link's bandwidth, plus ``rounds`` latencies.
        variant: the algorithm that the scheme takes, if it has several.
    """

    push_bytes: float
    pull_bytes: float
    busiest_bytes: float
    serial_bytes: float
    rounds: int
    seconds: float
    variant: str = ""


class Links(Struct, frozen=True, kw_only=True):
    """A cluster: hosts with one full-duplex link each, all alike, on a network that is never the bottleneck.

    Attributes:
        workers: n, one on each host.
        servers: k hosts that run only a server; 0: one server on each worker's host.
        bytes_per_second: of a link, in each direction.
        latency_seconds: from the end of sending a message's last byte to its use.
    """

    workers: int
    servers: int = 0
    bytes_per_second: float
    latency_seconds: float = 0.0

    @property
    def parts(self) -> int:
        """The number of servers that share a tensor."""
        return self.servers or self.workers

    @property
    def slot_imbalance(self) -> float:
        """The slots of the fullest server, divided by the mean: a server owns whole slots."""
        return math.ceil(SLOTS / self.parts) * self.parts / SLOTS

    def cost(
        self,
        *,
        push: float,
        pull: float,
        serial: float,
        rounds: int,
        busiest: float | None = None,
        variant: str = "",
    ) -> Cost:
        """The cost of these bytes and rounds; ``busiest`` is ``serial`` unless it is given."""
        return Cost(
            push_bytes=push,
            pull_bytes=pull,
            busiest_bytes=serial if busiest is None else busiest,
            serial_bytes=serial,
            rounds=rounds,
            seconds=serial / self.bytes_per_second + rounds * self.latency_seconds,
            variant=variant,
        )

    def served(self, push: float, pull: float, push_skew: float, pull_skew: float, *, streams: bool) -> Cost:
        """The cost over servers, of which the fullest may have more than its even share.

        On hosts of their own, k servers receive n·push ÷ k each, and send n·pull ÷ k. On a worker's host,
        each direction of the link carries both pushes and pulls.

        Args:
            push, pull: bytes that one worker pushes and pulls.
            push_skew, pull_skew: the share of them that the fullest server has, divided by the even share.
            streams: True if pulls begin before pushes have ended, which uses both directions at once.
        """
        workers = self.workers
        fullest_push, fullest_pull = (min(skew / self.parts, 1.0) for skew in (push_skew, pull_skew))
        if self.servers:
            pushed = push * max(1.0, workers * fullest_push)
            pulled = pull * max(1.0, workers * fullest_pull)
            busiest = max(pushed, pulled)
        else:
            pushed, pulled = (workers - 1) * push * fullest_push, (workers - 1) * pull * fullest_pull
            # The worker on the fullest server's host pushes the rest to other servers, and pulls it.
            busiest = max(pushed + pull * (1 - fullest_pull), push * (1 - fullest_push) + pulled)
        serial = busiest if streams else pushed + pulled
        return self.cost(push=pushed, pull=pulled, busiest=busiest, serial=serial, rounds=2)

    def doubling(self, sizes: Sequence[float], variant: str = "") -> Cost:
        """The cost of recursive doubling: pairs of workers exchange their sums, then pairs of pairs.

        If n is not a power of two, the workers beyond the greatest power of two below n send their rows to
        another worker first, and receive the sum last.

        Args:
            sizes: bytes of the sum of 1, 2, 4, … and n workers.
            variant: the algorithm, as for :class:`Cost`.
        """
        stages = self.workers.bit_length() - 1
        is_power = self.workers == 1 << stages
        passed = sizes[:stages] if is_power else [sizes[0], *sizes[1 : stages + 1], sizes[-1]]
        total = sum(passed)
        return self.cost(push=total, pull=0.0, serial=total, rounds=len(passed), variant=variant)


def expected_imbalance(parts: int, total: int, density: float, workers: int = 1) -> float:
    """The rows on the fullest of ``parts`` servers, divided by the mean, under a permuted partition, if all
    own equally many slots.

    1 + √(2·k·ln k·v): the fullest of k bins (Raab and Steger, "Balls into Bins", 1998), which is Zen's
    theorem 2 with its constant. For m balls v is 1 ÷ m. Here it is (1 - d) ÷ m, because the permutation deals
    each row of the table once; and more if some slots are a row larger than others.

    Args:
        parts: k.
        total: the rows of the table.
        density: d, the share of these that a worker has.
        workers: the number of workers that have as many each, independently; m rows together.
    """
    if parts < 2 or not density:
        return 1.0
    slot, larger = divmod(total, SLOTS)
    uneven = larger * (1 - larger / SLOTS)
    variance = (1 - density) / (workers * total * density) + uneven / total**2
    full = (slot + (larger > 0)) * SLOTS / total
    return min(1 + math.sqrt(2 * parts * math.log(parts) * variance), full / density, float(parts))


def index_bytes(span: int) -> int:
    """Bytes of the index of one row, or element, of ``span``."""
    return CODECS["coo"].max_bytes(1, span)


def _skew_at(density: float, *skews: float | None) -> float:
    """The first of ``skews`` that is not None. At most 1 ÷ density: then every row of the fullest range is
    present."""
    known = next(skew for skew in skews if skew is not None)
    return min(known, 1 / density) if density else 1.0


def _entropy_bytes(rows: int, span: int) -> float:
    """The entropy of a set of ``rows`` positions out of ``span``, if all sets are equally likely."""
    present = rows / span
    if present in (0.0, 1.0):
        return 0.0
    bits = -present * math.log2(present) - (1 - present) * math.log2(1 - present)
    return span * bits / 8
