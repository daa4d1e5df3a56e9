"""Worker membership: which peer has which rank in the latest view, and what it may push."""

from __future__ import annotations

from zenps.errors import GONE_ADVICE, ProtocolError, listing
from zenps.wire.messages import Push
from zenps.wire.scheduler_messages import Member, View


class Workers:
    """The workers of the latest view: every round waits for all of them.

    Attributes:
        peers: their public identities, by rank.
        routes: the routing identity of each that has been heard, by public identity.
    """

    def __init__(self) -> None:
        self.peers: dict[int, bytes] = {}
        self.routes: dict[bytes, bytes] = {}
        self._members: dict[int, Member] = {}
        self._ranks: dict[bytes, int] = {}

    def follow(self, view: View) -> dict[int, str]:
        """Takes the members of ``view``. Returns the ranks that have left, with the text that says so."""
        self.peers = {worker.rank: worker.identity for worker in view.workers}
        self._members = {worker.rank: worker for worker in view.workers}
        self._ranks = {worker.identity: worker.rank for worker in view.workers}
        self.routes = {peer: route for peer, route in self.routes.items() if peer in self._ranks}
        return {
            worker.rank: f"{worker} left the job; {GONE_ADVICE}"
            for worker in view.workers
            if worker.rank in view.left
        }

    def recognise(self, peer: bytes, route: bytes) -> None:
        """Notes the routing identity of a worker, from which alone its messages may come.

        Raises:
            ProtocolError: it has been heard from another already.
        """
        if self.routes.setdefault(peer, route) != route:
            raise ProtocolError("unexpected", f"a second connection of {self.name_of(peer)}")

    def rank_of(self, peer: bytes) -> int | None:
        """The rank of ``peer``; None of an unknown peer."""
        return self._ranks.get(peer)

    def name_of(self, peer: bytes) -> str:
        """The name of ``peer`` for messages to people: role, rank and host, or the identity if unknown."""
        rank = self._ranks.get(peer)
        return f"peer {peer.hex()}" if rank is None else str(self._members[rank])

    def is_of(self, push: Push, route: bytes) -> bool:
        """True if the worker of the rank that ``push`` names has been heard from ``route``."""
        peer = self.peers.get(push.rank)
        return peer is not None and self.routes.get(peer) == route

    def check(self, push: Push, peer: bytes) -> None:
        """Refuses a push that ``peer`` may not send.

        Raises:
            ProtocolError: ``peer`` has another rank; or the push stands for ranks that are not all different
                and on its own host.
        """
        if self.peers.get(push.rank) != peer:
            raise ProtocolError("unexpected", f"push of rank {push.rank} by another peer")
        if not push.stands_for:
            return
        members, host = self._members, self._members[push.rank].host
        here = {rank for rank in push.ranks if rank in members and members[rank].host == host}
        if len(here) < len(push.ranks):
            others = listing(push.stands_for)
            raise ProtocolError(
                "unexpected", f"push of rank {push.rank} for rank(s) {others}: not others of its host"
            )
