"""Who was a member before this scheduler began, and has come back to it.

A scheduler keeps nothing on disk. It asks nodes that it does not know to register again, and those that have
a view tell it theirs: the newest of these is the job as it was.
"""

from __future__ import annotations

from zenps.wire.messages import Member, Register, View

from .members import Members, Node

# How much longer than a lease members have to come back: ZeroMQ tries to connect every two seconds, and a
# node beats four times in a lease.
RETURN_SECONDS = 5.0


class Return:
    """Fills the table of nodes again.

    Attributes:
        newest: the newest view of any that has come; None before the first.
        generation: the newest of workers that have come and were no members: torchrun has started them.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self.newest: View | None = None
        self.generation = 0

    def admit(self, peer: bytes, message: Register, now: float) -> bool:
        """Takes in one that was a member; False for any other, who may ask again later."""
        view = message.view
        if view is not None and (self.newest is None or view.epoch > self.newest.epoch):
            self.newest = view
            for node in self._members:  # one that was stopped, and comes with an old view, is no member
                if self._rank_before(node.register) != node.rank:
                    self._members.forget(node)
        rank = self._rank_before(message)
        if rank is None:
            self.generation = max(self.generation, message.generation)
            return False
        if any((node.role, node.rank) == (message.role, rank) for node in self._members):
            return False
        self._members.add(Node(peer, message, rank, seen=now, epoch=view.epoch if view else 0))
        return True

    def missing(self) -> list[Member]:
        """The members of the newest view that have not come."""
        nodes = [*self._members.present(), *self._members.with_state("worker", "left")]
        here = {(node.role, node.rank) for node in nodes}
        return [member for member in self._before() if (member.role, member.rank) not in here]

    def barriers(self) -> int:
        """How many of them workers have passed that count from the newest admission."""
        registers = [node.register for node in self._members if node.role == "worker"]
        counts = (r.barriers for r in registers if r.view and r.view.admitted == self._view.admitted)
        return max(counts, default=0)

    def is_ring_changed(self) -> bool:
        """Whether servers are others than in the newest view."""
        before = {member.rank for member in self._view.servers}
        return before != {node.rank for node in self._members.present("server")}

    def is_changed(self) -> bool:
        """Whether those that are here now are others than in the newest view, or do not all have it."""
        before = {(member.role, member.rank) for member in self._before()}
        present = self._members.present()
        is_behind = any(node.epoch < self._view.epoch for node in present)
        return is_behind or before != {(node.role, node.rank) for node in present}

    def restore_left(self, now: float) -> None:
        """Those that had left before are in the table again: rounds and barriers cannot do without them."""
        for m in self._view.workers:
            if m.rank in self._view.left:
                for node in self._members:
                    if (node.role, node.rank) == ("worker", m.rank):  # it said that it left, and came again
                        self._members.forget(node)
                peer = str(m).encode()
                register = Register(m.role, m.rank, m.host, m.pid, m.address, m.metrics, {})
                self._members.add(Node(peer, register, m.rank, seen=now, state="left"))

    @property
    def _view(self) -> View:
        assert self.newest is not None
        return self.newest

    def _before(self) -> list[Member]:
        workers = [member for member in self._view.workers if member.rank not in self._view.left]
        return [*workers, *self._view.servers]

    def _rank_before(self, message: Register) -> int | None:
        """Its rank in the newest view, by host and process: its own view may be older, or none."""
        process = (message.role, message.host, message.pid, message.address)
        ranks = [m.rank for m in self._before() if (m.role, m.host, m.pid, m.address) == process]
        # Containers on one machine's network have its name, and each has a process 1.
        return message.rank if message.rank in ranks else next(iter(ranks), None)
