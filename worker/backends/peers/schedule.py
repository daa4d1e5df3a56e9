"""Group schedule of DS-Sync: which workers average their models in a step. Pure.

The source: Wang et al., "DS-Sync: Addressing Network Bottlenecks with Divide-and-Shuffle Synchronization for
Distributed DNN Training", INFOCOM '22. There, four workers take turns in two schedules of pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

SCHEDULES: Final = 8
"""The length of a random cycle."""

Schedule = tuple[tuple[int, ...], ...]
"""The groups of one step: each rank is in one of them, and ranks of a group are ascending."""


def make_cycle(size: int, group: int, seed: int) -> Sequence[Schedule]:
    """Returns the schedules of successive steps, which are repeated in a cycle. All ranks get the same.

    If ``size`` is a power of ``group``, ranks are a grid with as many dimensions, and each schedule has the
    lines of one dimension: after a cycle, each rank has averaged with all others, directly or not. The first
    lines are neighbours, such as workers of a host. Other sizes get random groups, as equal as possible.

    Args:
        size: of the world.
        group: workers of a group; at least 2.
        seed: of random groups.
    """
    if size <= group:
        return [(tuple(range(size)),)]
    strides = [1]
    while strides[-1] * group < size:
        strides.append(strides[-1] * group)
    if strides[-1] * group == size:
        return [_lines(size, group, stride) for stride in strides]
    return _random_cycle(size, group, random.Random(seed))


def members_of(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Returns the group of a rank."""
    return next(group for group in schedule if rank in group)


def _lines(size: int, group: int, stride: int) -> Schedule:
    """Returns the lines of a grid along the dimension in which neighbours are ``stride`` ranks apart."""
    firsts = [rank for rank in range(size) if rank // stride % group == 0]
    return tuple(tuple(range(first, first + group * stride, stride)) for first in firsts)


def _random_cycle(size: int, group: int, source: random.Random) -> list[Schedule]:
    nearest = (2 * size + group) // (2 * group)
    # At least two groups, because with one a step waits for all ranks. But no rank may be alone: three ranks
    # are one group.
    count = min(max(nearest, 2), size // 2)
    bounds = [size * number // count for number in range(count + 1)]
    while True:
        cycle = []
        for _ in range(SCHEDULES):
            ranks = source.sample(range(size), size)
            groups = [sorted(ranks[begin:end]) for begin, end in pairwise(bounds)]
            cycle.append(tuple(sorted(map(tuple, groups))))
        if _connects(cycle, size):
            return cycle


def _connects(cycle: Iterable[Schedule], size: int) -> bool:
    """Returns whether every two ranks average with each other, directly or through other ranks."""
    connected = {0}
    for _ in range(size):
        groups = [set(group) for schedule in cycle for group in schedule]
        larger = connected.union(*(group for group in groups if group & connected))
        if larger == connected:
            break
        connected = larger
    return len(connected) == size
