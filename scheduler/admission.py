"""Workers that came to a running job, and wait for the end of a step to become members."""

from __future__ import annotations

from collections.abc import Sequence

from .members import Members, Node


class JoiningWorkers:
    """Who waits, and which members have asked for them to be let in."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._asked: set[bytes] = set()

    def add(self, node: Node) -> None:
        """One that has registered: it gets the rank that it wants, else the lowest that is free."""
        node.rank = node.rank if node.rank >= 0 else self._members.free_rank("worker")
        node.state = "waiting"
        self._members.add(node)

    def waiting(self) -> Sequence[Node]:
        """Those that are no members yet."""
        return self._members.with_state("worker", "waiting")

    def ask(self, node: Node) -> None:
        """A member has come to the end of a step, with nothing in flight, and waits for this."""
        self._asked.add(node.peer)

    def are_due(self) -> bool:
        """Whether all members that are present have asked."""
        members = {worker.peer for worker in self._members.present("worker")}
        return bool(members) and members <= self._asked

    def admit(self) -> None:
        """Those that wait become members, and all count watermarks from 0 again."""
        self._asked.clear()
        for node in self.waiting():
            self._members.turn(node, "present")
        for worker in self._members.present("worker"):
            self._members.report(worker, 0)
