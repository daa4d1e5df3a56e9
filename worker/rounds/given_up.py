"""Given-up rounds: tells servers that this worker will not push a round any more. No socket, no clock.

A round may fail here while a server still waits for a push of this rank, or has refused one: another server
has found that the ranks disagree, for example. That server would keep the round's memory for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zenps.wire.messages import GiveUp, Result, Wanted

from .states import Round, SendGiveUp

# The message may be lost with a connection, and nothing answers it. So it is repeated, first after this time,
# then at intervals that double.
REPEAT_SECONDS = 5.0
MAX_REPEAT_SECONDS = 160.0


class _GivenUp(Struct, eq=False):
    message: GiveUp
    servers: frozenset[int]
    repeat_at: float | None = None
    """None before the first tick."""
    repeat_seconds: float = REPEAT_SECONDS


class GivenUpRounds:
    """The rounds of this ring that this worker has given up lately."""

    def __init__(self) -> None:
        self._rounds: list[_GivenUp] = []
        self._ahead: dict[str, int] = {}
        """By tensor, the last step that was given up before it began here, until a later one is answered."""

    def add_ahead(self, message: GiveUp, servers: Iterable[int]) -> list[SendGiveUp]:
        """Tells all ``servers`` that a round is given up before it has begun here."""
        self._ahead[message.tensor] = message.step
        return self.add(message, servers)

    def has_given_up(self, wanted: Wanted) -> bool:
        """Returns whether this rank gave the wanted round up before it began here."""
        return self._ahead.get(wanted.tensor) == wanted.step

    def on_result(self, result: Result) -> None:
        """Forgets a round that was given up ahead once a later round of its tensor has a result.

        Every rank has pushed to the later round, and so has ended the earlier one.
        """
        if self._ahead.get(result.tensor, result.step) < result.step:
            del self._ahead[result.tensor]

    def add(self, message: GiveUp, servers: Iterable[int]) -> list[SendGiveUp]:
        """Tells ``servers``, which have not answered all pushes of a round, that it is given up."""
        given_up = _GivenUp(message, frozenset(servers))
        if given_up.servers:
            self._rounds.append(given_up)
        return _tell(given_up)

    def on_tick(self, now: float) -> list[SendGiveUp]:
        """Repeats messages that are due."""
        actions: list[SendGiveUp] = []
        for given_up in self._rounds:
            if given_up.repeat_at is None:
                given_up.repeat_at = now + given_up.repeat_seconds
            elif now > given_up.repeat_at:
                actions += _tell(given_up)
                given_up.repeat_seconds *= 2
                given_up.repeat_at = now + given_up.repeat_seconds
        self._rounds = [one for one in self._rounds if one.repeat_seconds < MAX_REPEAT_SECONDS]
        return actions

    def on_ring(self, ring_epoch: int, kept: Iterable[Round], servers: Iterable[int]) -> list[SendGiveUp]:
        """Tells the servers of a new ring which rounds have failed here: another rank may push them yet."""
        self._rounds.clear()  # the servers have forgotten all rounds
        failed = dict(self._ahead)
        for round_ in kept:
            if round_.has_failed:
                failed[round_.tensor] = max(round_.step, failed.get(round_.tensor, -1))
        messages = [GiveUp(ring_epoch, tensor, step) for tensor, step in failed.items()]
        return [told for message in messages for told in self.add(message, servers)]

    def clear(self) -> None:
        """All ranks count steps from 0 again."""
        self._rounds.clear()
        self._ahead.clear()


def _tell(given_up: _GivenUp) -> list[SendGiveUp]:
    return [SendGiveUp(server, given_up.message) for server in sorted(given_up.servers)]
