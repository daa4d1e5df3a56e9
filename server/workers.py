"""Who the workers are, by the latest view."""

from __future__ import annotations

from zenps.errors import ProtocolError, listing
from zenps.wire.messages import Push, View


class Workers:
    """The workers that every round waits for.

    Attributes:
        peers: their routing identities, by rank.
    """

    def __init__(self) -> None:
        self.peers: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}
        self._hosts: dict[int, str] = {}

    def follow(self, view: View) -> dict[int, str]:
        """Goes by ``view``. Returns those of its workers that have left, and how to say so."""
        self.peers = {worker.rank: worker.identity for worker in view.workers}
        self._ranks = {worker.identity: worker.rank for worker in view.workers}
        self._names = {worker.identity: str(worker) for worker in view.workers}
        self._hosts = {worker.rank: worker.host for worker in view.workers}
        return {worker.rank: f"{worker} left the job" for worker in view.workers if worker.rank in view.left}

    def rank_of(self, peer: bytes) -> int | None:
        """Which rank ``peer`` is; None of a stranger."""
        return self._ranks.get(peer)

    def name_of(self, peer: bytes) -> str:
        """How to speak of ``peer``."""
        return self._names.get(peer, f"peer {peer.hex()}")

    def is_of(self, push: Push, peer: bytes) -> bool:
        """Whether ``peer`` has the rank that ``push`` names."""
        return self.peers.get(push.rank) == peer

    def check(self, push: Push, peer: bytes) -> None:
        """Whether ``peer`` may push that.

        Raises:
            ProtocolError: it has another rank; or that stands for others than those of its host, each once.
        """
        if not self.is_of(push, peer):
            raise ProtocolError("unexpected", f"push of rank {push.rank} by another peer")
        if not push.stands_for:
            return
        host, ranks = self._hosts[push.rank], set(push.ranks)
        if len(ranks) < len(push.ranks) or any(self._hosts.get(rank) != host for rank in ranks):
            others = listing(push.stands_for)
            raise ProtocolError(
                "unexpected", f"push of rank {push.rank} for rank(s) {others}: not others of its host"
            )
