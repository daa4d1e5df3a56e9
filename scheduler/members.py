"""The table of nodes: who they are, and how each was last heard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from zenps.errors import listing
from zenps.wire.messages import Load, Member, NodeStatus, Register, Role

from .rates import Rates

__all__ = ["Members", "Node", "names"]


class Node(msgspec.Struct, eq=False):
    """A worker or a server."""

    peer: bytes
    register: Register
    rank: int
    seen: float
    epoch: int = 0
    """Of the newest view that it has applied."""
    state: Literal["waiting", "present", "leaving", "left", "lost"] = "present"
    """``waiting``: a worker that came to a running job, and is no member yet. ``leaving``: a server that is
    being drained, and has no slots in the newest ring."""
    load: Load = {}
    rates: Rates = msgspec.field(default_factory=Rates)
    wave: int = 0

    @property
    def role(self) -> Role:
        """What it does."""
        return self.register.role

    @property
    def member(self) -> Member:
        """As others know it."""
        r = self.register
        return Member(r.role, max(self.rank, 0), r.host, r.pid, r.address, r.metrics, self.peer)


class Members:
    """All nodes of a job that have registered, by their routing identity."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def get(self, peer: bytes) -> Node | None:
        """None for one that has not registered."""
        return self._nodes.get(peer)

    def add(self, node: Node) -> None:
        """One that has registered. It takes the place of one that was lost, or has left, with its rank."""
        self._nodes[node.peer] = node
        self._replace(node)

    def forget(self, node: Node) -> None:
        """As if it had never come."""
        self._nodes.pop(node.peer, None)

    def present(self, role: Role | None = None) -> list[Node]:
        """Those that are members, servers first, in order of rank."""
        nodes = [n for n in self if n.state == "present" and (role is None or n.role == role)]
        return sorted(nodes, key=lambda n: (n.role, n.rank))

    def alive(self) -> list[Node]:
        """Those that can be told something."""
        return [node for node in self if node.state in ("waiting", "present", "leaving")]

    def with_state(self, role: Role, *states: str) -> list[Node]:
        """Those of a role that are in one of ``states``."""
        return [node for node in self if node.role == role and node.state in states]

    def assign_ranks(self, role: Role) -> None:
        """Wanted ranks as they are; the others in order of registration."""
        for node in self.alive():
            if node.role == role and node.rank < 0:
                node.rank = self.free_rank(role)
                self._replace(node)

    def free_rank(self, role: Role) -> int:
        """The lowest that nobody has who is alive."""
        taken = {node.rank for node in self.alive() if node.role == role}
        return next(rank for rank in itertools.count() if rank not in taken)

    def _replace(self, node: Node) -> None:
        for other in self:
            is_gone = other is not node and other.state in ("lost", "left")
            if is_gone and (other.role, other.rank) == (node.role, node.rank):
                self.forget(other)

    def status(
        self, owners: NDArray[np.uint16], late: dict[int, float], now: float
    ) -> tuple[NodeStatus, ...]:
        """The table for people, servers first."""
        return tuple(
            NodeStatus(
                role=node.role,
                rank=node.rank,
                host=node.register.host,
                pid=node.register.pid,
                address=node.register.address,
                metrics=node.register.metrics,
                epoch=node.epoch,
                state=node.state,
                slots=int((owners == node.rank).sum()) if node.role == "server" else 0,
                silent_seconds=round(now - node.seen, 3),
                load=node.load,
                late_seconds=round(late.get(node.rank, 0.0), 3) if node.role == "worker" else 0.0,
                rates=node.rates.per_second if node.state not in ("left", "lost") else {},
            )
            for node in sorted(self, key=lambda n: (n.role, n.rank))
        )


def names(nodes: Iterable[Node]) -> str:
    """For a message."""
    return listing(node.member for node in nodes)
