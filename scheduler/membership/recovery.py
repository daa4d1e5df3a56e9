"""Recovery of a restarted scheduler: it learns from returning members what the job was.

A scheduler keeps nothing on disk. It asks nodes that it does not know to register again. Members register
with their view, and the newest of these views is the job as it was.
"""

from __future__ import annotations

from zenps.wire.messages import Member, Register, View

from .members import Members, Node

RECOVERY_GRACE_SECONDS = 5.0
"""How much longer than a lease members have to return: ZeroMQ tries to connect every two seconds, and a node
sends four heartbeats in a lease."""


class Recovery:
    """Fills the table of nodes again.

    Attributes:
        newest: the newest view of any member that has returned; None before the first.
        generation: the newest generation of workers that registered and were no members: torchrun has
            started them.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self.newest: View | None = None
        self.generation = 0

    def readmit(self, peer: bytes, message: Register, now: float) -> bool:
        """Adds a node that was a member. False for any other node, which may register later."""
        view = message.view
        if view is not None and (self.newest is None or view.epoch > self.newest.epoch):
            self.newest = view
            for node in self._members:  # nodes that returned with an older view may be members no more
                if self._rank_before(node.register) != node.rank:
                    self._members.forget(node)
        rank = self._rank_before(message)
        if rank is None:
            self.generation = max(self.generation, message.generation)
            return False
        if any((node.role, node.rank) == (message.role, rank) for node in self._members):
            return False
        self._members.add(Node(peer, message, rank, last_heard=now, epoch=view.epoch if view else 0))
        return True

    def missing(self) -> list[Member]:
        """Returns the members of the newest view that have not returned."""
        nodes = [*self._members.present(), *self._members.with_state("worker", "left")]
        here = {(node.role, node.rank) for node in nodes}
        return [member for member in self._before() if (member.role, member.rank) not in here]

    def passed_barriers(self) -> int:
        """Returns how many barriers workers have passed since the newest admission."""
        registers = [node.register for node in self._members if node.role == "worker"]
        counts = (r.barriers for r in registers if r.view and r.view.admitted == self._view.admitted)
        return max(counts, default=0)

    def is_ring_changed(self) -> bool:
        """True if the servers are not those of the newest view."""
        before = {member.rank for member in self._view.servers}
        return before != {node.rank for node in self._members.present("server")}

    def is_changed(self) -> bool:
        """True if the members are not those of the newest view, or some do not have it."""
        before = {(member.role, member.rank) for member in self._before()}
        present = self._members.present()
        is_behind = any(node.epoch < self._view.epoch for node in present)
        return is_behind or before != {(node.role, node.rank) for node in present}

    def restore_left(self, now: float) -> None:
        """Adds the workers that had left before: rounds and barriers that wait for them have to fail."""
        for m in self._view.workers:
            if m.rank in self._view.left:
                for node in self._members:
                    if (node.role, node.rank) == ("worker", m.rank):  # it has left, and registered once more
                        self._members.forget(node)
                peer = str(m).encode()
                register = Register(m.role, m.rank, m.host, m.pid, m.address, m.metrics, {})
                self._members.add(Node(peer, register, m.rank, last_heard=now, state="left"))

    @property
    def _view(self) -> View:
        assert self.newest is not None
        return self.newest

    def _before(self) -> list[Member]:
        workers = [member for member in self._view.workers if member.rank not in self._view.left]
        return [*workers, *self._view.servers]

    def _rank_before(self, message: Register) -> int | None:
        """Returns the node's rank in the newest view, by host and process: its own view may be older."""
        process = (message.role, message.host, message.pid, message.address)
        ranks = [m.rank for m in self._before() if (m.role, m.host, m.pid, m.address) == process]
        # Containers on one machine's network have its name, and each has a process 1.
        return message.rank if message.rank in ranks else next(iter(ranks), None)
