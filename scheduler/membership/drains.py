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
        present = {node.rank: node for node in self._members.present("server")}
        is_leaving = any(node.rank == rank for node in self._members.with_state("server", "leaving"))
        error = ""
        if state not in ("running", "confirming"):
            error = f"the job is {state}; expected running"
        elif not is_leaving and rank not in present:
            error = f"no server {rank} is present; expected one of {sorted(present)}"
        elif not is_leaving and len(present) == 1:
            error = f"server {rank} is the only one; start another first"
        if error or (is_leaving and state == "running"):  # the answer was lost, so the client asks again
            return [Send(peer, DrainReply(error))], False
        if peer not in self._waiting:
            self._waiting.append(peer)
        if not is_leaving:
            self._members.set_state(present[rank], "leaving")
        return [], not is_leaving

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
