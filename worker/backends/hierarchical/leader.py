"""Leader of a host, its lowest rank: adds what the ranks there give, and hands out the sum."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import UsageError, ZenPSError
from zenps.wire.arena import Window
from zenps.wire.loans import Loans

from ...core.pending import Pending
from ...core.request import Request
from ...encode.sparse import as_table
from ...transport.host_link import Failed, Give, Link, LinkError, Take, Taken
from ..negotiation import Entry
from .adder import Adder
from .rounds import HostRounds, HostSession
from .transfer import HostRound, Part, added

# Of what leaders push: under the tensor's own name all ranks negotiate.
SUFFIX = "@hosts"

# What a rank gives is on its way before the ranks meet.
GIVE_SECONDS = 30.0

# Characters of the reason of a failure.
MOST_REASON = 4096


class _Sum(NamedTuple):
    """Where a sum lies in the leader's arena, and that memory."""

    rows: int
    offset: int
    size_bytes: int
    memory: Tensor


class Leader(HostRounds):
    """The leader's side.

    Args:
        host: its part in the host.
        links: to the other ranks there, in rank order.
    """

    def __init__(self, host: HostSession, links: Sequence[Link]) -> None:
        super().__init__(host)
        self._links = links
        self._stands_for = tuple(link.rank for link in links)
        self._is_alone = 1 + len(links) == self._size
        """No other host takes part: the sum of this one is that of all ranks."""
        self._adder = Adder(self._kernels, 1 + len(links))
        self._windows = {link.rank: link.window for link in links}
        self._own_window = Window(self._arena.fd)
        self._given: dict[tuple[int, str], Give] = {}
        """The latest by rank and tensor."""
        self._loans = {rank: Loans() for rank in (self._rank, *self._windows)}
        """The sums that each rank has, by number of its round."""

    @property
    def _own_pool(self) -> BufferPool | None:
        return self._pool

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link, selectors.EVENT_READ, link)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._receive(key.data):
                        # What it gave is there still. Without it no round begins: servers see to that.
                        selector.unregister(key.fileobj)

    def _receive(self, link: Link) -> bool:
        """Whether there was something to receive."""
        message = link.receive()
        match message:
            case Give():
                with self._news:
                    self._given[link.rank, message.name] = message
                    self._news.notify_all()
            case Taken(number=number):
                self._loans[link.rank].drop(number)
            case None:
                return False
            case _:
                raise LinkError(f"rank {link.rank} sent what only a leader does")
        return True

    def close(self) -> None:
        """As :meth:`NegotiatedRounds.close`."""
        super().close()
        self._adder.close()

    def _shut_down(self) -> None:
        for link in self._links:
            link.shut_down()

    def _on_negotiated(self, round_: HostRound, said: Sequence[Entry]) -> None:
        round_.numbers = {link.rank: said[link.rank].number for link in self._links}
        try:
            parts = [round_.part, *(self._part_of(link, round_, said[link.rank]) for link in self._links)]
            if self._is_alone:
                with self._session.spans("aggregate", round_.name):
                    divisor = self._size if round_.pending.options.average else 1
                    pieces = self._adder.add(parts, round_.form, divisor)
                self._end(round_, self._seen(round_, self._hand_out(round_, pieces)))
            else:
                round_.pushed = self._push(round_, added(parts, round_.form, self._pool))
        except ZenPSError as error:
            self._refuse(round_, error)

    def _push(self, round_: HostRound, tensor: Tensor) -> Pending:
        """Begins the round over servers, for all ranks of this host."""
        options = structs.replace(round_.pending.options, stands_for=self._stands_for)
        if tensor.dtype != round_.form.dtype:
            # What was narrow travels as the wide sum that it is now, and is not quantized again.
            options = structs.replace(options, purpose="value")
        return self._servers.push(Request(tensor, round_.name + SUFFIX, options), "rows")

    def _part_of(self, link: Link, round_: HostRound, entry: Entry) -> Part:
        key = link.rank, round_.name

        def is_there() -> bool:
            given = self._given.get(key)
            return self.is_over or (given is not None and given.number == entry.number)

        with self._news:
            is_given = self._news.wait_for(is_there, GIVE_SECONDS)
            given = self._given.pop(key, None)
        if not is_given or given is None:
            raise LinkError(f"tensor {round_.name!r}: nothing from rank {link.rank} in {GIVE_SECONDS:g} s")
        memory = self._windows[link.rank].read(given.offset, given.size_bytes)
        return round_.form.read(memory, given.rows)

    def _on_answer(self, round_: HostRound) -> None:
        assert round_.pushed is not None
        try:
            result = round_.pushed.wait()
            round_.transfer.over_servers = round_.pushed.report
            part = Part(*as_table(result)) if result.is_sparse else Part(round_.part.rows, result.view(-1))
            part = Part(part.rows, part.values.to(round_.form.dtype))
            if self._links:
                self._hand_out(round_, [part])
        except ZenPSError as error:
            self._refuse(round_, error)
        else:
            self._end(round_, round_.form.tensor(part, is_coalesced=True))

    def _hand_out(self, round_: HostRound, pieces: Sequence[Part]) -> _Sum:
        """Puts the sum where the other ranks see it."""
        rows = sum(len(piece.rows) for piece in pieces)
        size = round_.form.size_bytes(rows)
        for loans in self._loans.values():
            loans.collect()
        # What is empty has a place, too: then there is one case less.
        offset, memory = self._arena.lease(max(size, 1))
        self._adder.copy(pieces, round_.form.place(memory[:size], rows))
        for link in self._links:
            number = round_.numbers[link.rank]
            self._loans[link.rank].lend(number, memory)
            self._tell(link, Take(number, rows, offset, size))
        return _Sum(rows, offset, size, memory)

    def _seen(self, round_: HostRound, place: _Sum) -> Tensor:
        """What this rank has of a sum, as the others have it."""
        loans = self._loans[self._rank]
        loans.lend(round_.number, place.memory)
        memory = self._own_window.map_private(place.offset, place.size_bytes, loans.drop, round_.number)
        return round_.form.tensor(round_.form.read(memory, place.rows), is_coalesced=True)

    def _refuse(self, round_: HostRound, error: ZenPSError) -> None:
        """Ends a round on all ranks of this host. That this one has left, others find out themselves."""
        if not isinstance(error, UsageError):
            for link in self._links:
                number = round_.numbers[link.rank]
                self._tell(link, Failed(number, type(error).__name__, str(error)[:MOST_REASON]))
        self._end(round_, error)

    def _tell(self, link: Link, message: Take | Failed) -> None:
        with contextlib.suppress(LinkError):  # it is gone, and waits for nothing
            link.send(message)
