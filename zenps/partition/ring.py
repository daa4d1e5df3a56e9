"""Consistent hashing with bounded loads: the ring, which assigns every slot to a server.

A strategy divides every tensor's permuted index space into ``SLOTS`` slots, and a *ring* is the owner
of each slot. The scheduler computes it once per epoch and publishes it; the other nodes only read it.

Bounds, for n servers (the tests check them over random histories):

- each server owns ⌊4096/n⌋ or ⌈4096/n⌉ slots;
- when one server joins n others, exactly ⌊4096/(n+1)⌋ slots move, all of them to it;
- when one of n servers leaves, exactly its own ⌊4096/n⌋ or ⌈4096/n⌉ slots move;
- so neither a join nor a leave moves a slot between two servers that stay;
- when several join and leave at once, as few slots move as the first bound allows.

The bounds are exact because each ring is computed from the previous one. A ring that is a function
of the members alone cannot keep them: with bounded loads one arrival can push slots from server to
server all along the circle.

Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018
(https://arxiv.org/abs/1608.01350); the bound here is the tightest, their ε = 0 rounded up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zenps.errors import ConfigError

SLOTS = 4096
VIRTUAL_NODES = 64
"""Points of each server on the circle: enough to spread a leaving server's slots over many others."""


def rebalance(owners: NDArray[np.uint16] | None, servers: Sequence[int]) -> NDArray[np.uint16]:
    """The slots' owners for the members ``servers``, moving as few slots as the load bound allows.

    Args:
        owners: uint16 ``[SLOTS]``, the rank that owned each slot until now; None for the first ring.
        servers: the ranks of the servers that are members now, in any order.

    Returns:
        uint16 ``[SLOTS]``, the rank that owns each slot. Equal on every machine for equal arguments.

    Raises:
        ConfigError: no server, more than ``SLOTS``, a rank twice, a rank that is not a uint16, or
            ``owners`` of another shape.
    """
    members = _members(servers)
    if owners is None:
        held_by = np.full(SLOTS, -1)
    elif owners.shape == (SLOTS,):
        held_by = _index_of(members, owners.astype(np.int64))
    else:
        raise ConfigError("owners", f"array of shape {owners.shape}", f"shape ({SLOTS},)")
    quotas = _quotas(np.bincount(held_by[held_by >= 0], minlength=len(members)))
    _release_excess(held_by, members, quotas)
    _hand_out(held_by, members, quotas)
    ranks: NDArray[np.uint16] = members[held_by].astype(np.uint16)
    return ranks


def _members(servers: Sequence[int]) -> NDArray[np.int64]:
    members = np.unique(np.asarray(servers, dtype=np.int64))
    if not 1 <= len(members) <= SLOTS:
        raise ConfigError("servers", f"{len(members)} servers", f"1 to {SLOTS} servers")
    if len(members) != len(servers):
        raise ConfigError("servers", sorted(servers), "each rank once")
    if members[0] < 0 or members[-1] > np.iinfo(np.uint16).max:
        raise ConfigError("servers", [int(members[0]), int(members[-1])], "ranks from 0 to 65535")
    return members


def _index_of(members: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each rank's index in the sorted ``members``; -1 for a rank that is not a member."""
    nearest = np.minimum(np.searchsorted(members, ranks), len(members) - 1)
    return np.where(members[nearest] == ranks, nearest, -1)


def _quotas(held: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many slots each member will own: ⌈4096/n⌉ for those that hold most now, ⌊4096/n⌋ for the rest.

    Because those that hold most get more, a single join or leave never moves a slot between two
    members that stay.
    """
    floor, larger = divmod(SLOTS, len(held))
    quotas = np.full(len(held), floor)
    quotas[np.argsort(-held, kind="stable")[:larger]] += 1
    return quotas


def _release_excess(
    held_by: NDArray[np.int64], members: NDArray[np.int64], quotas: NDArray[np.int64]
) -> None:
    """Frees, in place, the slots above each member's quota: first those nearest to a server with room."""
    excess = np.bincount(held_by[held_by >= 0], minlength=len(members)) - quotas
    if not (excess > 0).any():
        return
    points, _ = _circle(members, excess < 0)
    slot_points = _points("slots", SLOTS)
    next_points = points[np.searchsorted(points, slot_points) % len(points)]
    distances = next_points - slot_points  # uint64: the difference wraps just as the circle does
    for member in np.flatnonzero(excess > 0):
        own = np.flatnonzero(held_by == member)
        held_by[own[np.argsort(distances[own], kind="stable")[: excess[member]]]] = -1


def _hand_out(held_by: NDArray[np.int64], members: NDArray[np.int64], quotas: NDArray[np.int64]) -> None:
    """Gives, in place, each free slot to the first server with room, clockwise from the slot's point."""
    free = np.flatnonzero(held_by < 0)
    if not len(free):
        return
    room = quotas - np.bincount(held_by[held_by >= 0], minlength=len(members))
    points, point_owners = _circle(members, room > 0)
    starts = np.searchsorted(points, _points("slots", SLOTS)[free])
    rooms, circle = room.tolist(), point_owners.tolist()
    for slot, start in zip(free.tolist(), starts.tolist(), strict=True):
        at = start % len(circle)
        while not rooms[circle[at]]:
            at = (at + 1) % len(circle)
        held_by[slot] = circle[at]
        rooms[circle[at]] -= 1


def _circle(
    members: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The chosen members' virtual nodes, clockwise: their points, and the member index of each."""
    indices = np.flatnonzero(chosen)
    points = np.concatenate([_points(f"server {members[index]}", VIRTUAL_NODES) for index in indices])
    order = np.argsort(points, kind="stable")
    return points[order], np.repeat(indices, VIRTUAL_NODES)[order]


def _points(name: str, count: int) -> NDArray[np.uint64]:
    """``count`` points of the 64-bit circle that belong to ``name``, on any machine."""
    digest = hashlib.shake_128(name.encode()).digest(8 * count)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
