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

from zenps.errors import UsageError
from zenps.partition.ring import SLOTS

from .sparcml import choose, is_worth_dense
from .traffic import Cost, Links, Tensor, index_bytes, skew_at


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


# ── over servers ────────────────────────────────────────────────────────────────────────────────


def _zenps(tensor: Tensor, links: Links) -> Cost:
    """f·(rows of d + rows of D), each with positions by the codec that ``sync.codec = "auto"`` takes.

    Zen's balanced parallelism (§3.1, eq. 1) by row, in chunks that are summed while the next travel.
    """
    push, pull = tensor.best_bytes(tensor.density), tensor.best_bytes(tensor.union)
    return _served(links, push, pull, tensor.imbalance, tensor.imbalance, streams=True)


def _zen(tensor: Tensor, links: Links) -> Cost:
    """f·E·(d·(v + 4) + D·v + 1/8), E elements of v bytes: pushed as COO, pulled as a hash bitmap (§3.3)."""
    elements = tensor.rows * tensor.columns
    push = elements * tensor.density * (tensor.item_bytes + index_bytes(elements))
    pull = elements * (tensor.union * tensor.item_bytes + 1 / 8)
    return _served(links, push, pull, tensor.imbalance, tensor.imbalance, streams=False)


def _sparse_ps(tensor: Tensor, links: Links) -> Cost:
    """f·s·(COO of d + COO of D): contiguous ranges of rows, the fullest s times its share (Zen §2.4).

    With s = 1 and one column of float32 this is Zen's eq. 1, 2·f·(d + D)·M.
    """
    push, pull = tensor.coo_bytes(tensor.density), tensor.coo_bytes(tensor.union)
    push_skew = skew_at(tensor.density, tensor.skew)
    pull_skew = skew_at(tensor.union, tensor.union_skew, tensor.skew)
    return _served(links, push, pull, push_skew, pull_skew, streams=False)


def _byteps(tensor: Tensor, links: Links) -> Cost:
    """2·f·M (BytePS, OSDI '20): everything is dense, in even ranges and in chunks."""
    return _served(links, tensor.dense_bytes, tensor.dense_bytes, 1.0, 1.0, streams=True)


def _omnireduce(tensor: Tensor, links: Links) -> Cost:
    """f·(b + s·B)·M or less, b of one worker's blocks not all zero, B of the union's (SIGCOMM '21, §3).

    Blocks say by themselves where they belong. Servers own contiguous ranges, and stream.
    """
    own = tensor.random_blocks(tensor.density) if tensor.blocks is None else tensor.blocks
    union = tensor.random_blocks(tensor.union) if tensor.union_blocks is None else tensor.union_blocks
    push, pull = own * tensor.dense_bytes, union * tensor.dense_bytes
    push_skew = skew_at(own, tensor.block_skew, tensor.skew)
    pull_skew = skew_at(union, tensor.union_block_skew, tensor.union_skew, tensor.skew)
    return _served(links, push, pull, push_skew, pull_skew, streams=True)


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
    gathered = others * tensor.coo_bytes(tensor.density)
    return _cost(links, push=gathered, pull=0.0, serial=gathered, rounds=others)


def _hierarchical_centralization(tensor: Tensor, links: Links) -> Cost:
    """Σ COO of the union of 1, 2, 4, … n/2 workers, none more than M (Zen §2.4, eq. 2)."""
    levels = (tensor.density, *tensor.unions)
    sizes = [min(tensor.coo_bytes(density), tensor.dense_bytes) for density in levels]
    return _doubling(sizes, links)


def _sparcml(tensor: Tensor, links: Links) -> Cost:
    """What takes least if workers touch rows uniformly and independently: more nobody knows beforehand."""
    rows = [tensor.density * tensor.rows] * links.workers
    match choose(tensor.rows, tensor.row_bytes, rows):
        case "recursive doubling":
            return _recursive_doubling(tensor, links)
        case "split":
            return _split_sparse(tensor, links)
        case "dense split":
            return _split_dense(tensor, links)


def _recursive_doubling(tensor: Tensor, links: Links) -> Cost:
    """SSAR_Recursive_double: as hierarchical centralization, but a sum is dense once it might be smaller so.

    That is when its two terms, were all their rows different, would take as much as M.
    """
    levels = (tensor.density, *tensor.unions)
    sizes = [tensor.coo_bytes(tensor.density)]
    for below, density in pairwise(levels):
        is_dense = is_worth_dense(2 * tensor.rows * below, tensor.rows, tensor.row_bytes)
        sizes.append(tensor.dense_bytes if is_dense else tensor.coo_bytes(density))
    return _doubling(sizes, links, "recursive doubling")


def _split_sparse(tensor: Tensor, links: Links) -> Cost:
    """SSAR_Split_allgather: f·s·COO of d to owners of ranges, whose sums are gathered by recursive doubling.

    Everybody receives f·COO of D; the owner of the fullest range sends that in each of log₂ n stages.
    """
    workers, stages = links.workers, (links.workers - 1).bit_length()
    others = (workers - 1) / workers
    own, union = tensor.coo_bytes(tensor.density), tensor.coo_bytes(tensor.union)
    push = others * own * skew_at(tensor.density, tensor.skew)
    pull_skew = skew_at(tensor.union, tensor.union_skew, tensor.skew)
    pull = max(others * union, stages * union * pull_skew / workers)
    # That owner's link carries the others' rows in one direction, and its range in the other.
    busiest = max(push + others * union, others * own + pull)
    rounds = workers - 1 + stages
    return _cost(
        links, push=push, pull=pull, busiest=busiest, serial=push + pull, rounds=rounds, variant="split"
    )


def _split_dense(tensor: Tensor, links: Links) -> Cost:
    """DSAR_Split_allgather: the same, but sums are dense: f·s·COO of d, and f·M."""
    workers = links.workers
    others = (workers - 1) / workers
    push = others * tensor.coo_bytes(tensor.density) * skew_at(tensor.density, tensor.skew)
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
