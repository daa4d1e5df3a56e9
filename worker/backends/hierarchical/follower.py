"""Follower on a host: a rank that gives its parts to the leader, and takes the sums."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import DeadlineError, MismatchError, PeerLostError, TensorError, ZenPSError

from ...transport.host_link import Failed, Give, Link, LinkError, Take, Taken
from ..negotiation import Entry
from .rounds import HostRounds, HostSession
from .transfer import HostRound

_FAILURES = {kind.__name__: kind for kind in (DeadlineError, MismatchError, PeerLostError, TensorError)}


class Follower(HostRounds):
    """A follower's side.

    Args:
        host: its part in the host.
        link: to the leader.
    """

    def __init__(self, host: HostSession, link: Link) -> None:
        super().__init__(host)
        self._link = link
        self._window = link.window
        self._dropped: deque[int] = deque()
        """Numbers of rounds whose sums nobody here has any more, and of which the leader has to hear."""

    @property
    def _own_pool(self) -> BufferPool | None:
        return None

    def _give(self, round_: HostRound) -> None:
        part, form = round_.part, round_.form
        rows, size = len(part.rows), form.size_bytes(len(part.rows))
        offset, round_.lease = self._arena.lease(max(size, 1))
        form.place(round_.lease[:size], rows).copy_(part)
        round_.part = part._replace(values=part.values[:0])  # there is a copy of it now
        with contextlib.suppress(LinkError):  # that the leader is gone, the negotiation will say
            self._link.send(Give(round_.name, round_.number, rows, offset, size))
            self._tell_of_dropped()

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            match message:
                case Take():
                    self._take(message)
                case Failed(number=number, kind=kind, reason=reason):
                    self._finish(number, _FAILURES.get(kind, ZenPSError)(reason))
                case _:
                    raise LinkError(f"rank {self._link.rank} sent what a leader does not")
        if not self.is_over:
            leader = f"worker {self._link.rank}, the leader of this host,"
            broken = PeerLostError(f"{leader} cannot be reached any more; see its log")
            self.fail(self._session.lease.await_loss(self._is_over) or broken)

    def _take(self, take: Take) -> None:
        round_ = self._round(take.number)
        if round_ is None:
            self._dropped.append(take.number)
            return
        outcome: Tensor | ZenPSError
        try:
            memory = self._window.map_private(take.offset, take.size_bytes, self._dropped.append, take.number)
        except TensorError as error:
            outcome = error
        else:
            outcome = round_.form.tensor(round_.form.read(memory, take.rows), is_coalesced=True)
        self._finish(take.number, outcome)

    def _tell_of_dropped(self) -> None:
        # Not where a sum is dropped: that may be anywhere, in the midst of sending, too.
        with contextlib.suppress(IndexError):  # another thread may have taken the last one
            while self._dropped:
                self._link.send(Taken(self._dropped.popleft()))

    def _finish(self, number: int, outcome: Tensor | ZenPSError) -> None:
        round_ = self._round(number)
        if round_ is not None:
            # The leader may have heard of the negotiation's end before. Until it is heard of here, too, the
            # tensor is in flight.
            self._servers.wait(lambda: round_.is_negotiated or self.is_over, math.inf)
            round_.lease = None
            self._end(round_, outcome)

    def _is_over(self) -> bool:
        return self.is_over

    def _round(self, number: int) -> HostRound | None:
        with self._news:
            return next((each for each in self._in_flight.values() if each.number == number), None)

    def _on_negotiated(self, round_: HostRound, said: Sequence[Entry]) -> None:
        """The leader, who hears it too, does the rest."""

    def _on_answer(self, round_: HostRound) -> None:
        raise AssertionError("a round over servers that only a leader begins")

    def _shut_down(self) -> None:
        self._link.shut_down()
