"""What a scheme costs: the bytes on the busiest link for one synchronisation, and the seconds they take.

Formulas are those of the papers, above all of Zen (OSDI '25, §2.4 and §3), with what our codecs really take.
Each scheme's function states its own, in these letters: n workers; d, the share of a tensor's rows that one
worker pushes; D, the share in the union of all; M, the bytes of the whole tensor; f = (n - 1) ÷ n, the share
of it that belongs to others where a server stands on each worker's host.

Pure and cheap, some microseconds each, and by the same arithmetic on every rank: what ranks decide by it,
they decide alike. CPU time, and what a step computes meanwhile, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from zenps.codecs.registry import CODECS, choose
from zenps.errors import UsageError
from zenps.ring import SLOTS

__all__ = ["COSTS", "Cost", "Links", "Tensor", "expected_imbalance", "predict", "predict_step"]

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


def predict(scheme: str, tensor: Tensor, links: Links) -> Cost:
    """What ``scheme``, one of :data:`COSTS`, costs for ``tensor``.

    Raises:
        UsageError: ``tensor`` is not described for as many workers as ``links`` has.
    """
    if not tensor.is_sparse:
        scheme = "byteps" if scheme in SERVED else "allreduce"
    elif len(tensor.unions) != (links.workers - 1).bit_length():
        raise UsageError(
            f"{len(tensor.unions)} unions for {links.workers} workers; expected those of 2, 4, … and all: "
            f"{(links.workers - 1).bit_length()}"
        )
    return COSTS[scheme](tensor, links)


def predict_step(scheme: str, tensors: Iterable[Tensor], links: Links) -> Cost:
    """What it costs to synchronise all of ``tensors``.

    Links carry one tensor's bytes after the other's. Servers take any number at once, so that latency counts
    once; collective operations follow one another.
    """
    costs = [predict(scheme, tensor, links) for tensor in tensors]
    rounds = [cost.rounds for cost in costs]
    return _cost(
        links,
        push=sum(cost.push_bytes for cost in costs),
        pull=sum(cost.pull_bytes for cost in costs),
        busiest=sum(cost.busiest_bytes for cost in costs),
        serial=sum(cost.serial_bytes for cost in costs),
        rounds=max(rounds, default=0) if scheme in SERVED else sum(rounds),
        variant=", ".join(sorted({cost.variant for cost in costs} - {""})),
    )


def expected_imbalance(parts: int, rows: float) -> float:
    """How many times its even share the fullest of ``parts`` has, when ``rows`` are dealt at random.

    1 + √(2·k·ln k ÷ rows): the fullest of k bins (Raab and Steger, "Balls into Bins", 1998), which is Zen's
    theorem 2 with its constant.
    """
    if parts < 2 or rows <= 0:
        return 1.0
    return min(1 + math.sqrt(2 * parts * math.log(parts) / rows), float(parts))


# ── over servers ────────────────────────────────────────────────────────────────────────────────


def _zenps(tensor: Tensor, links: Links) -> Cost:
    """f·(rows of d + rows of D), each with positions by the codec that ``sync.codec = "auto"`` takes.

    Zen's balanced parallelism (§3.1, eq. 1) by row, in chunks that are summed while the next travel.
    """
    push, pull = _by_best_codec(tensor, tensor.density), _by_best_codec(tensor, tensor.union)
    return _served(links, push, pull, tensor.imbalance, tensor.imbalance, streams=True)


def _zen(tensor: Tensor, links: Links) -> Cost:
    """f·E·(d·(v + 4) + D·v + 1/8), E elements of v bytes: pushed as COO, pulled as a hash bitmap (§3.3)."""
    elements = tensor.rows * tensor.columns
    index_bytes = _index_bytes(elements)
    push = elements * tensor.density * (tensor.item_bytes + index_bytes)
    pull = elements * (tensor.union * tensor.item_bytes + 1 / 8)
    return _served(links, push, pull, tensor.imbalance, tensor.imbalance, streams=False)


def _sparse_ps(tensor: Tensor, links: Links) -> Cost:
    """f·s·(COO of d + COO of D): contiguous ranges of rows, the fullest s times its share (Zen §2.4).

    With s = 1 and one column of float32 this is Zen's eq. 1, 2·f·(d + D)·M.
    """
    push, pull = _coo(tensor, tensor.density), _coo(tensor, tensor.union)
    push_skew, pull_skew = _skew(tensor, tensor.density), _union_skew(tensor, tensor.union)
    return _served(links, push, pull, push_skew, pull_skew, streams=False)


def _byteps(tensor: Tensor, links: Links) -> Cost:
    """2·f·M (BytePS, OSDI '20): everything is dense, in even ranges and in chunks."""
    return _served(links, tensor.dense_bytes, tensor.dense_bytes, 1.0, 1.0, streams=True)


def _omnireduce(tensor: Tensor, links: Links) -> Cost:
    """f·(b + s·B)·M or less, b of one worker's blocks not all zero, B of the union's (SIGCOMM '21, §3).

    Blocks say by themselves where they belong. Servers own contiguous ranges, and stream.
    """
    own = _blocks(tensor, tensor.density) if tensor.blocks is None else tensor.blocks
    union = _blocks(tensor, tensor.union) if tensor.union_blocks is None else tensor.union_blocks
    push, pull = own * tensor.dense_bytes, union * tensor.dense_bytes
    return _served(links, push, pull, _skew(tensor, own), _union_skew(tensor, union), streams=True)


def _served(
    links: Links, push: float, pull: float, push_skew: float, pull_skew: float, *, streams: bool
) -> Cost:
    """What a worker pushes and pulls in all, through servers of which one has more than its share.

    On hosts of their own, k servers take n·push ÷ k each, and give n·pull ÷ k; both directions of a link are
    then in use at once, if the scheme streams. On a worker's host a direction carries both pushes and pulls.
    """
    workers, parts = links.workers, links.parts
    share = math.ceil(SLOTS / parts) / SLOTS  # a server owns whole slots
    fullest_push, fullest_pull = (min(share * skew, 1.0) for skew in (push_skew, pull_skew))
    if links.servers:
        pushed = push * max(1.0, workers * fullest_push)
        pulled = pull * max(1.0, workers * fullest_pull)
        busiest = max(pushed, pulled)
    else:
        pushed, pulled = (workers - 1) * push * fullest_push, (workers - 1) * pull * fullest_pull
        # The fullest server's host: its worker pushes to other servers, and pulls from them, what is left.
        busiest = max(pushed + pull * (1 - fullest_pull), push * (1 - fullest_push) + pulled)
    serial = busiest if streams else pushed + pulled
    return _cost(links, push=pushed, pull=pulled, busiest=busiest, serial=serial, rounds=2)


# ── from worker to worker ───────────────────────────────────────────────────────────────────────


def _allreduce(tensor: Tensor, links: Links) -> Cost:
    """2·f·M, and 2·(n - 1) rounds: a ring (Patarasuk and Yuan, 2009), dense."""
    once = (links.workers - 1) / links.workers * tensor.dense_bytes
    return _cost(links, push=once, pull=once, serial=2 * once, rounds=2 * (links.workers - 1))


def _agsparse(tensor: Tensor, links: Links) -> Cost:
    """(n - 1) times COO of d: everybody gets what everybody has, around a ring, and sums it by itself.

    With one column of float32, 2·(n - 1)·d·M.
    """
    others = links.workers - 1
    gathered = others * _coo(tensor, tensor.density)
    return _cost(links, push=gathered, pull=0.0, serial=gathered, rounds=others)


def _hierarchical_centralization(tensor: Tensor, links: Links) -> Cost:
    """Σ COO of the union of 1, 2, 4, … n/2 workers, none more than M (Zen §2.4, eq. 2)."""
    levels = (tensor.density, *tensor.unions)
    sizes = [min(_coo(tensor, density), tensor.dense_bytes) for density in levels]
    return _doubling(sizes, links)


def _sparcml(tensor: Tensor, links: Links) -> Cost:
    """The fastest of SparCML's three (SC '19, §5.3)."""
    three = (_recursive_doubling, _split_sparse, _split_dense)
    return min((algorithm(tensor, links) for algorithm in three), key=lambda cost: cost.seconds)


def _recursive_doubling(tensor: Tensor, links: Links) -> Cost:
    """SSAR_Recursive_double: as hierarchical centralization, but a sum is dense once it might be smaller so.

    That is when its two terms, were all their rows different, would take as much as M.
    """
    levels = (tensor.density, *tensor.unions)
    sizes = [_coo(tensor, tensor.density)]
    for below, density in pairwise(levels):
        is_dense = 2 * _coo(tensor, below) >= tensor.dense_bytes
        sizes.append(tensor.dense_bytes if is_dense else _coo(tensor, density))
    return _doubling(sizes, links, "recursive doubling")


def _split_sparse(tensor: Tensor, links: Links) -> Cost:
    """SSAR_Split_allgather: f·s·COO of d to owners of ranges, whose sums are gathered by recursive doubling.

    Everybody receives f·COO of D; the owner of the fullest range sends that in each of log₂ n stages.
    """
    workers, stages = links.workers, (links.workers - 1).bit_length()
    others = (workers - 1) / workers
    union = _coo(tensor, tensor.union)
    push = others * _coo(tensor, tensor.density) * _skew(tensor, tensor.density)
    pull = max(others * union, stages * union * _union_skew(tensor, tensor.union) / workers)
    rounds = workers - 1 + stages
    return _cost(links, push=push, pull=pull, serial=push + pull, rounds=rounds, variant="split")


def _split_dense(tensor: Tensor, links: Links) -> Cost:
    """DSAR_Split_allgather: the same, but sums are dense: f·s·COO of d, and f·M."""
    workers = links.workers
    others = (workers - 1) / workers
    push = others * _coo(tensor, tensor.density) * _skew(tensor, tensor.density)
    pull = others * tensor.dense_bytes
    rounds = workers - 1 + (workers - 1).bit_length()
    return _cost(links, push=push, pull=pull, serial=push + pull, rounds=rounds, variant="split, dense")


def _doubling(sizes: Sequence[float], links: Links, variant: str = "") -> Cost:
    """Pairs exchange what they have summed, then pairs of pairs, and so on.

    Where n is no power of two, the workers beyond give theirs to others first and get the sum last.

    Args:
        sizes: bytes of the sum of 1, 2, 4, … and n workers.
    """
    stages = links.workers.bit_length() - 1
    is_power = links.workers == 1 << stages
    passed = sizes[:stages] if is_power else [sizes[0], *sizes[1 : stages + 1], sizes[-1]]
    total = sum(passed)
    return _cost(links, push=total, pull=0.0, serial=total, rounds=len(passed), variant=variant)


# ── bytes ───────────────────────────────────────────────────────────────────────────────────────


def _cost(
    links: Links,
    *,
    push: float,
    pull: float,
    serial: float,
    rounds: int,
    busiest: float | None = None,
    variant: str = "",
) -> Cost:
    return Cost(
        push_bytes=push,
        pull_bytes=pull,
        busiest_bytes=serial if busiest is None else busiest,
        serial_bytes=serial,
        rounds=rounds,
        seconds=serial / links.bytes_per_second + rounds * links.latency_seconds,
        variant=variant,
    )


def _coo(tensor: Tensor, density: float) -> float:
    return tensor.rows * density * (tensor.row_bytes + _index_bytes(tensor.rows))


def _by_best_codec(tensor: Tensor, density: float) -> float:
    rows = round(tensor.rows * density)
    codec = choose("auto", rows, tensor.rows, tensor.row_bytes)
    if codec.name == "delta":
        positions = DELTA_OVER_ENTROPY * _entropy_bytes(rows, tensor.rows)
    else:
        positions = codec.most_bytes(rows, tensor.rows)
    return rows * tensor.row_bytes + positions


def _entropy_bytes(rows: int, span: int) -> float:
    """Of which ``rows`` of ``span`` there are, each as likely as any."""
    present = rows / span
    if present in (0.0, 1.0):
        return 0.0
    bits = -present * math.log2(present) - (1 - present) * math.log2(1 - present)
    return span * bits / 8


def _index_bytes(span: int) -> int:
    return CODECS["coo"].most_bytes(1, span)


def _blocks(tensor: Tensor, density: float) -> float:
    """The share of blocks with a row in them, were rows spread at random.

    Blocks run over the flattened tensor, so that rows straddle them. One of b elements begins in its row of c
    at a multiple of g = gcd(b, c), each as often as any. With q and r, quotient and remainder of (b - g) ÷ c,
    it lies on q + 1 rows, and in r of c cases on one more: the share is 1 - (1 - x)^(q + 1)·(1 - x·r ÷ c) at
    density x.
    """
    size = min(BLOCK_ELEMENTS, tensor.rows * tensor.columns)
    whole, part = divmod(size - math.gcd(size, tensor.columns), tensor.columns)
    return 1 - math.pow(1 - density, whole + 1) * (1 - density * part / tensor.columns)


def _skew(tensor: Tensor, density: float) -> float:
    """No range is fuller than full."""
    return min(tensor.skew, 1 / density) if density else 1.0


def _union_skew(tensor: Tensor, density: float) -> float:
    skew = tensor.skew if tensor.union_skew is None else tensor.union_skew
    return min(skew, 1 / density) if density else 1.0


COSTS: Final[dict[str, Callable[[Tensor, Links], Cost]]] = {
    "zenps": _zenps,
    "zen": _zen,
    "sparse-ps": _sparse_ps,
    "byteps": _byteps,
    "omnireduce": _omnireduce,
    "allreduce": _allreduce,
    "agsparse": _agsparse,
    "sparcml": _sparcml,
    "hierarchical-centralization": _hierarchical_centralization,
}
"""Every scheme's."""

SERVED: Final = frozenset({"zenps", "zen", "sparse-ps", "byteps", "omnireduce"})
"""Those that go over servers."""
