"""Which servers an operator has told to leave, and who wants to hear when they may."""

from __future__ import annotations

from zenps.wire.messages import DrainReply

from .actions import Send
from .members import Members
from .states import State


class Drains:
    """Requests that wait for their answer. A server that is drained is ``leaving``."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._asking: dict[bytes, int] = {}

    def ask(self, peer: bytes, rank: int, state: State) -> tuple[list[Send], bool]:
        """What is answered at once, and whether members have changed by this."""
        if state not in ("running", "confirming"):
            return [Send(peer, DrainReply(f"the job is {state}; expected running"))], False
        if any(node.rank == rank for node in self._members.with_state("server", "leaving")):
            if state == "running":  # asked again, by one that has not heard the answer
                return [Send(peer, DrainReply(""))], False
            self._asking[peer] = rank
            return [], False
        nodes = {node.rank: node for node in self._members.present("server")}
        error = ""
        if rank not in nodes:
            error = f"no server {rank} is present; expected one of {sorted(nodes)}"
        elif len(nodes) == 1:
            error = f"server {rank} is the only one; start another first"
        if error:
            return [Send(peer, DrainReply(error))], False
        self._members.turn(nodes[rank], "leaving")
        self._asking[peer] = rank
        return [], True

    def take_back(self) -> list[Send]:
        """All other servers are gone: those that were told to leave are needed."""
        leaving = self._members.with_state("server", "leaving")
        for node in leaving:
            self._members.turn(node, "present")
        return self.answer("the other servers are gone; start another first") if leaving else []

    def answer(self, error: str = "") -> list[Send]:
        """To all that wait: the servers have no slots any more, or why they keep them."""
        asking, self._asking = self._asking, {}
        return [Send(peer, DrainReply(error)) for peer in asking]
