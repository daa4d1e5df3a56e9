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

    def _publish(self, round_: HostRound) -> None:
        own, form = round_.contribution, round_.form
        rows, size = len(own.rows), form.size_bytes(len(own.rows))
        offset, round_.allocation = self._arena.allocate(max(size, 1))
        form.view(round_.allocation[:size], rows).copy_(own)
        round_.drop_contribution()  # shared memory has a copy now
        with contextlib.suppress(LinkError):  # the negotiation will report a leader that is lost
            is_dropped = round_.pending.options.is_dropped
            self._link.send(Give(round_.name, round_.number, rows, offset, size, is_dropped))
            self._send_dropped()

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            match message:
                case Take():
                    self._on_take(message)
                case Failed(number=number):
                    self._finish(number, message.error())
                case _:
                    raise LinkError(
                        f"rank {self._link.rank} sent {type(message).__name__}, expected take or failed"
                    )
        if not self.is_over:
            leader = f"worker {self._link.rank}, the leader of this host,"
            broken = PeerLostError(f"{leader} cannot be reached any more; see its log")
            self.fail(self._session.lease.await_loss(lambda: self.is_over) or broken)

    def _on_take(self, take: Take) -> None:
        round_ = self._round(take.number)
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
        self._finish(take.number, result)

    def _send_dropped(self) -> None:
        # Not sent at the moment when a sum is dropped: that may be anywhere, even within a send.
        run_finalizers()
        with contextlib.suppress(IndexError):  # another thread may have popped the last one
            while self._dropped:
                self._link.send(Taken(self._dropped.popleft()))

    def _finish(self, number: int, result: Tensor | ZenPSError) -> None:
        round_ = self._round(number)
        if round_ is not None:
            # The leader may learn of the negotiation's end first. The tensor stays in flight until it has
            # ended here, too.
            self._servers.wait(lambda: round_.is_negotiated or self.is_over, math.inf)
            round_.allocation = None
            self._end(round_, result)

    def _round(self, number: int) -> HostRound | None:
        with self._news:
            return next((each for each in self._in_flight.values() if each.number == number), None)

    def _on_negotiated(self, round_: HostRound, entries: Entries) -> None:
        """Nothing to do: the leader reduces and sends the result."""

    def _on_answer(self, round_: HostRound) -> None:
        raise AssertionError("only a leader begins rounds over servers")

    def _shut_down(self) -> None:
        super()._shut_down()
        self._link.shut_down()
