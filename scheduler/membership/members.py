"""Table of the nodes that have registered: who each node is, and what was last heard of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from zenps.config.values import is_loopback, parse_address
from zenps.errors import listing
from zenps.wire.fields import Load, Role
from zenps.wire.identity import public_identity
from zenps.wire.scheduler_messages import Member, NodeStatus, Register

from ..observe.rates import Rates

NodeState = Literal["waiting", "present", "leaving", "left", "lost"]
"""``waiting``: a worker that waits for its admission to a running job. ``present``: a member. ``leaving``: a
server that is being drained, and owns no slots in the newest ring. ``left``, ``lost``: gone."""


ALIVE: Final = frozenset[NodeState](("waiting", "present", "leaving"))
"""The states of nodes that still receive messages."""


class Node(msgspec.Struct, eq=False):
    """A worker or a server.

    Attributes:
        peer: its routing identity.
        register: the message with which it registered.
        rank: -1 until it is assigned.
        last_heard: when its last message came.
        epoch: that of the newest view that the node has applied.
        state: while the node is in the table, only :meth:`Members.set_state` changes it.
        load: that of its last heartbeat.
        rates: how fast the counters in its loads rise.
        watermark: the newest that it has reported, by :meth:`Members.report`.
        may_be_elsewhere: True if it is lost, but its process may run and be registered at another scheduler.
    """

    peer: bytes
    register: Register
    rank: int
    last_heard: float
    epoch: int = 0
    state: NodeState = "present"
    load: Load = {}
    rates: Rates = msgspec.field(default_factory=Rates)
    watermark: int = 0
    may_be_elsewhere: bool = False

    @property
    def role(self) -> Role:
        """Worker or server."""
        return self.register.role

    @property
    def member(self) -> Member:
        """The node as other nodes know it."""
        r = self.register
        identity = public_identity(self.peer)
        return Member(r.role, max(self.rank, 0), r.host, r.pid, r.address, r.metrics, identity)


class Members:
    """All registered nodes of a job, by their routing identity.

    Each heartbeat asks for the nodes in a state and for the least watermark. There may be thousands of
    nodes, so both answers are cached until something changes. Each registration asks who has a rank, and how
    many nodes there are; the answers are indexed, so that it does not look at all other nodes.

    Attributes:
        version: rises with every change of the table, or of a node's state.
    """

    def __init__(self) -> None:
        self.version = 0
        self._nodes: dict[bytes, Node] = {}
        self._counts: Counter[tuple[Role, NodeState]] = Counter()
        self._holders: dict[tuple[Role, int], dict[bytes, Node]] = {}
        """The nodes that have, or had, a rank."""
        self._on_loopback: dict[bytes, Node] = {}
        """The servers whose address other hosts cannot reach."""
        self._by_state: dict[tuple[Role | None, tuple[NodeState, ...]], Sequence[Node]] = {}
        self._next_watermark = 0
        self._counted: Sequence[Node] = ()
        """The workers whose reports ``_next_watermark`` was computed from."""
        self._behind: set[bytes] = set()
        """Those of them that have not reported ``_next_watermark`` yet."""

    def __iter__(self) -> Iterator[Node]:
        return iter(list(self._nodes.values()))

    def get(self, peer: bytes) -> Node | None:
        """Returns the node with this routing identity; None if it has not registered."""
        return self._nodes.get(peer)

    def add(self, node: Node) -> None:
        """Adds a registered node. It replaces a node of its rank that has left or is lost."""
        self.forget(node)
        self._nodes[node.peer] = node
        self._counts[node.role, node.state] += 1
        if node.role == "server" and is_on_loopback(node.register.address):
            self._on_loopback[node.peer] = node
        self._on_change(node.role)
        self._take_rank(node)

    def forget(self, node: Node) -> None:
        """Removes the node as if it had never registered."""
        if (known := self._nodes.pop(node.peer, None)) is not None:
            self._counts[known.role, known.state] -= 1
            self._holders.get((known.role, known.rank), {}).pop(known.peer, None)
            self._on_loopback.pop(known.peer, None)
            self._on_change(known.role)

    def set_state(self, node: Node, state: NodeState) -> None:
        """Changes the state of a node in the table."""
        self._counts[node.role, node.state] -= 1
        self._counts[node.role, state] += 1
        node.state = state
        self._on_change(node.role)

    def count(self, role: Role, *states: NodeState) -> int:
        """Returns how many nodes of a role are in one of ``states``."""
        return sum(self._counts[role, state] for state in states)

    def holder(self, role: Role, rank: int) -> Node | None:
        """Returns the living node that has this rank; None if there is none."""
        nodes = self._holders.get((role, rank), {}).values()
        return next((node for node in nodes if node.state in ALIVE), None)

    def is_taken(self, role: Role, rank: int) -> bool:
        """True if a node in the table has this rank, be it gone or not."""
        return bool(self._holders.get((role, rank)))

    def on_loopback(self) -> list[Node]:
        """Returns the living servers that other hosts cannot reach."""
        return [node for node in self._on_loopback.values() if node.state in ALIVE]

    def present(self, role: Role | None = None) -> Sequence[Node]:
        """Returns the members of a role, or of both with servers first, in order of rank."""
        return self.with_state(role, "present")

    def with_state(self, role: Role | None, *states: NodeState) -> Sequence[Node]:
        """Returns the nodes that are in one of ``states``, in order of role and rank."""
        # Each of thousands that register asks who has left, and changes what is kept.
        if role is not None and not self.count(role, *states):
            return ()
        if (role, states) not in self._by_state:
            nodes = (n for n in self if n.state in states and role in (None, n.role))
            self._by_state[role, states] = tuple(sorted(nodes, key=_role_and_rank))
        return self._by_state[role, states]

    def alive(self) -> list[Node]:
        """Returns the nodes that still receive messages, in order of registration."""
        return [node for node in self if node.state in ALIVE]

    def report(self, node: Node, watermark: int) -> None:
        """A worker has ended all rounds that were in flight when it heard of ``watermark``."""
        if watermark < node.watermark:  # the worker counts from 0 again
            self._behind.clear()
        elif watermark >= self._next_watermark:
            self._behind.discard(node.peer)
        node.watermark = watermark

    def next_watermark(self) -> int:
        """Returns one more than the least watermark that a present worker has reported."""
        workers = self.present("worker")
        if workers is not self._counted or not self._behind:
            self._counted = workers
            self._next_watermark = 1 + min((worker.watermark for worker in workers), default=0)
            self._behind = {worker.peer for worker in workers if worker.watermark < self._next_watermark}
        return self._next_watermark

    def assign_ranks(self, role: Role) -> None:
        """Gives each node without a rank the lowest free one, in order of registration."""
        ranks = itertools.count()
        for node in self.alive():
            if node.role == role and node.rank < 0:
                self._holders[role, node.rank].pop(node.peer)
                node.rank = next(rank for rank in ranks if self.holder(role, rank) is None)
                self._on_change(role)
                self._take_rank(node)

    def status(
        self, owners: NDArray[np.uint16], late_seconds: dict[int, float], now: float
    ) -> tuple[NodeStatus, ...]:
        """Returns the table as ``zenps status`` shows it, servers first.

        Args:
            owners: the rank of each slot's server.
            late_seconds: how long others have waited for each worker, by rank.
            now: the time.
        """
        slots = Counter(owners.tolist())
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
                slots=slots[node.rank] if node.role == "server" else 0,
                silent_seconds=round(now - node.last_heard, 3),
                load=node.load,
                late_seconds=round(late_seconds.get(node.rank, 0.0), 3) if node.role == "worker" else 0.0,
                rates=node.rates.per_second if node.state not in ("left", "lost") else {},
            )
            for node in sorted(self, key=_role_and_rank)
        )

    def _on_change(self, role: Role) -> None:
        self.version += 1
        for key in [key for key in self._by_state if key[0] in (role, None)]:
            del self._by_state[key]

    def _take_rank(self, node: Node) -> None:
        holders = self._holders.setdefault((node.role, node.rank), {})
        for other in list(holders.values()) if node.rank >= 0 else []:
            if other.state not in ALIVE:
                self.forget(other)
        holders[node.peer] = node


def _role_and_rank(node: Node) -> tuple[Role, int]:
    return node.role, node.rank


def is_on_loopback(address: str) -> bool:
    """Returns whether other hosts cannot reach ``address``."""
    try:
        return is_loopback(parse_address(address)[0])
    except ValueError:  # workers report a malformed address when they connect to it
        return False


def names(nodes: Iterable[Node]) -> str:
    """Lists the nodes for a message, such as ``worker 0 (host a, pid 7), worker 1 (host b, pid 8)``."""
    return listing(node.member for node in nodes)
