"""Drains: servers that an operator has told to leave, and the admin clients that wait for an answer."""

from __future__ import annotations

from zenps.wire.scheduler_messages import DrainReply

from .actions import Send
from .members import Members
from .states import JobState


class Drains:
    """Requests that are not answered yet. A server that is being drained is ``leaving``."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._waiting: list[bytes] = []

    def request(self, peer: bytes, rank: int, state: JobState) -> tuple[list[Send], bool]:
        """An admin client asks to drain a server.

        Returns:
            The immediate answer if there is one, and whether the request has made the server ``leaving``.
        """
        if state not in ("running", "confirming"):
            return [Send(peer, DrainReply(f"the job is {state}; expected running"))], False
        if any(node.rank == rank for node in self._members.with_state("server", "leaving")):
            if state == "running":  # the client repeats its request because the answer was lost
                return [Send(peer, DrainReply(""))], False
            self._wait(peer)
            return [], False
        nodes = {node.rank: node for node in self._members.present("server")}
        error = ""
        if rank not in nodes:
            error = f"no server {rank} is present; expected one of {sorted(nodes)}"
        elif len(nodes) == 1:
            error = f"server {rank} is the only one; start another first"
        if error:
            return [Send(peer, DrainReply(error))], False
        self._members.set_state(nodes[rank], "leaving")
        self._wait(peer)
        return [], True

    def cancel(self) -> list[Send]:
        """All other servers are gone: the servers that are being drained must stay."""
        leaving = self._members.with_state("server", "leaving")
        for node in leaving:
            self._members.set_state(node, "present")
        return self.answer("the other servers are gone; start another first") if leaving else []

    def answer(self, error: str = "") -> list[Send]:
        """Answers all requests: the servers own no slots any more, or ``error`` says why they keep them."""
        waiting, self._waiting = self._waiting, []
        return [Send(peer, DrainReply(error)) for peer in waiting]

    def _wait(self, peer: bytes) -> None:
        if peer not in self._waiting:
            self._waiting.append(peer)
