"""The table of nodes: who they are, and how each was last heard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from zenps.errors import listing
from zenps.wire.messages import Load, Member, NodeStatus, Register, Role

from .page.rates import Rates

NodeState = Literal["waiting", "present", "leaving", "left", "lost"]


class Node(msgspec.Struct, eq=False):
    """A worker or a server."""

    peer: bytes
    register: Register
    rank: int
    seen: float
    epoch: int = 0
    """Of the newest view that it has applied."""
    state: NodeState = "present"
    """``waiting``: a worker that came to a running job, and is no member yet. ``leaving``: a server that is
    being drained, and has no slots in the newest ring. Of one in the table :meth:`Members.turn` sets it."""
    load: Load = {}
    rates: Rates = msgspec.field(default_factory=Rates)
    watermark: int = 0
    """The newest that it has reported, by :meth:`Members.report`."""

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
    """All nodes of a job that have registered, by their routing identity.

    Each heartbeat asks who is present, and for the least watermark. There may be thousands of nodes, so
    answers are kept until something changes.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._found: dict[tuple[Role | None, tuple[NodeState, ...]], Sequence[Node]] = {}
        self._watermark = 0
        self._counted: Sequence[Node] = ()
        """The workers among which that is the least."""
        self._behind: set[bytes] = set()
        """Those of them that have not reported it yet."""

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def get(self, peer: bytes) -> Node | None:
        """None for one that has not registered."""
        return self._nodes.get(peer)

    def add(self, node: Node) -> None:
        """One that has registered. It takes the place of one that was lost, or has left, with its rank."""
        self._nodes[node.peer] = node
        self._found.clear()
        self._replace(node)

    def turn(self, node: Node, state: NodeState) -> None:
        """The node is in another state."""
        node.state = state
        self._found.clear()

    def forget(self, node: Node) -> None:
        """As if it had never come."""
        self._nodes.pop(node.peer, None)
        self._found.clear()

    def present(self, role: Role | None = None) -> Sequence[Node]:
        """Those that are members, servers first, in order of rank."""
        return self.with_state(role, "present")

    def alive(self) -> list[Node]:
        """Those that can be told something."""
        return [node for node in self if node.state in ("waiting", "present", "leaving")]

    def with_state(self, role: Role | None, *states: NodeState) -> Sequence[Node]:
        """Those of a role that are in one of ``states``, in order of rank."""
        if (role, states) not in self._found:
            nodes = (n for n in self if n.state in states and role in (None, n.role))
            self._found[role, states] = tuple(sorted(nodes, key=lambda n: (n.role, n.rank)))
        return self._found[role, states]

    def report(self, node: Node, watermark: int) -> None:
        """All rounds of a worker that were in flight when it heard of ``watermark`` have ended."""
        if watermark < node.watermark:  # it counts anew
            self._behind.clear()
        elif watermark >= self._watermark:
            self._behind.discard(node.peer)
        node.watermark = watermark

    def next_watermark(self) -> int:
        """One more than the least that a worker that is present has reported."""
        workers = self.present("worker")
        if workers is not self._counted or not self._behind:
            self._counted = workers
            self._watermark = 1 + min((worker.watermark for worker in workers), default=0)
            self._behind = {worker.peer for worker in workers if worker.watermark < self._watermark}
        return self._watermark

    def assign_ranks(self, role: Role) -> None:
        """Wanted ranks as they are; the others in order of registration."""
        for node in self.alive():
            if node.role == role and node.rank < 0:
                node.rank = self.free_rank(role)
                self._found.clear()
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
