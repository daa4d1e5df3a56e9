"""Follower of hierarchical reduction: gives its contributions to the leader and gets the sums from it."""

from __future__ import annotations

import contextlib
import math
from collections import deque

from torch import Tensor

from zenps.errors import PeerLostError, TensorError, ZenPSError
from zenps.finalizers import run_finalizers
from zenps.wire.shared_memory.arena import Arena

from ...transport.host_link import Failed, Give, Link, LinkError, Take, Taken
from ..base import Session
from ..negotiation import Entries
from ..servers import ServerBackend
from .rounds import HostRounds
from .transfer import HostRound


class Follower(HostRounds):
    """The rounds of a follower.

    Args:
        session, servers, arena: as for :class:`HostRounds`.
        link: to the leader.
    """

    def __init__(self, session: Session, servers: ServerBackend, arena: Arena, link: Link) -> None:
        super().__init__(session, servers, arena)
        self._source = f" of rank(s) {link.rank}"
        self._link = link
        self._window = link.window
        self._dropped: deque[int] = deque()
        """Numbers of rounds whose sums were dropped here; the leader does not know it yet."""
        self._shared: dict[int, Tensor] = {}
        """Contributions that the leader may still read, by number of the round. Its negotiation may succeed
        although it has failed here, so they may outlive their rounds."""
        self._numbers: dict[str, list[int]] = {}
        """By tensor, its latest rounds: the last one that was negotiated, and those that were begun since."""

    def _publish(self, round_: HostRound) -> None:
        super()._publish(round_)
        own, form = round_.contribution, round_.form
        rows, size = len(own.rows), form.size_bytes(len(own.rows))
        offset, memory = self._arena.allocate(max(size, 1))
        form.view(memory[:size], rows).copy_(own)
        with self._news:
            self._shared[round_.number] = memory
            self._numbers.setdefault(round_.name, []).append(round_.number)
        round_.drop_contribution()  # shared memory has a copy now
        with contextlib.suppress(LinkError):  # the negotiation will report a leader that is lost
            is_dropped = round_.pending.options.is_dropped
            self._link.send(Give(round_.name, round_.number, round_.step, rows, offset, size, is_dropped))
            self._send_dropped()

    def _take_back(self, round_: HostRound) -> None:
        super()._take_back(round_)
        with self._news:
            self._shared.pop(round_.number, None)
        self._session.channel.wake()

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            match message:
                case Take():
                    self._on_take(message)
                case Failed(number=number):
                    if (round_ := self._answered(number)) is not None:
                        self._finish(round_, message.error())
                case _:
                    raise LinkError(
                        f"rank {self._link.rank} sent {type(message).__name__}, expected take or failed"
                    )
        if not self.is_over:
            leader = f"worker {self._link.rank}, the leader of this host,"
            broken = PeerLostError(f"{leader} cannot be reached any more; see its log")
            self.fail(self._session.lease.await_loss(lambda: self.is_over) or broken)

    def _on_take(self, take: Take) -> None:
        round_ = self._answered(take.number)
        if round_ is None:
            self._dropped.append(take.number)
            return
        result: Tensor | ZenPSError
        try:
            memory = self._window.map_private(take.offset, take.size_bytes, self._dropped.append, take.number)
        except TensorError as error:
            self._dropped.append(take.number)
            result = error
        else:
            result = round_.form.tensor(round_.form.read(memory, take.rows), is_coalesced=True)
        self._finish(round_, result)

    def _send_dropped(self) -> None:
        # Not sent at the moment when a sum is dropped: that may be anywhere, even within a send.
        run_finalizers()
        with contextlib.suppress(IndexError):  # another thread may have popped the last one
            while self._dropped:
                self._link.send(Taken(self._dropped.popleft()))

    def _finish(self, round_: HostRound, result: Tensor | ZenPSError) -> None:
        # The leader may learn of the negotiation's end first. The tensor stays in flight until it has ended
        # here, too.
        self._servers.wait(lambda: round_.is_negotiated or not self._is_in_flight(round_), math.inf)
        self._end(round_, result)

    def _answered(self, number: int) -> HostRound | None:
        """Returns the round that the leader has answered, None if it has failed here; frees its memory."""
        with self._news:
            self._shared.pop(number, None)
            return next((each for each in self._in_flight.values() if each.number == number), None)

    def _on_negotiated(self, round_: HostRound, entries: Entries) -> None:
        """Frees contributions to the tensor's earlier rounds; the leader reduces and sends the result.

        This round may have ended already, and the next one may have begun.
        """
        with self._news:  # the leader has begun this round, so it has ended the earlier ones
            numbers = self._numbers[round_.name]
            for number in numbers:
                if number < round_.number:
                    self._shared.pop(number, None)
            self._numbers[round_.name] = [number for number in numbers if number >= round_.number]

    def _on_answer(self, round_: HostRound) -> None:
        raise AssertionError("only a leader begins rounds over servers")

    def _shut_down(self) -> None:
        super()._shut_down()
        self._link.shut_down()
