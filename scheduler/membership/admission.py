"""Admission of workers that join a running elastic job, at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

from .members import Members, Node


class JoiningWorkers:
    """The workers that wait for admission, and the members that are ready for them."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._ready: set[bytes] = set()

    def add(self, node: Node) -> None:
        """Adds a registered worker, with the rank that it requests, or else the lowest free rank."""
        node.state = "waiting"
        self._members.add(node)
        self._members.assign_ranks("worker")

    def waiting(self) -> Sequence[Node]:
        """The workers that are not admitted yet."""
        return self._members.with_state("worker", "waiting")

    def mark_ready(self, member: Node) -> None:
        """A member is at the end of a step, has nothing in flight, and waits for the admission."""
        self._ready.add(member.peer)

    def are_all_ready(self) -> bool:
        """True if every member that is present is ready."""
        return self._ready.issuperset(worker.peer for worker in self._members.present("worker"))

    def admit(self) -> None:
        """Makes the waiting workers members. All workers count watermarks from 0 again."""
        self._ready.clear()
        for node in self.waiting():
            self._members.set_state(node, "present")
        for worker in self._members.present("worker"):
            self._members.report(worker, 0)
