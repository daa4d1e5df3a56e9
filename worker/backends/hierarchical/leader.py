"""Leader of hierarchical reduction, the host's lowest rank: sums contributions and distributes the result."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs
from torch import Tensor

from zenps.errors import TensorError, UsageError, ZenPSError
from zenps.wire.shared_memory.arena import Arena, Window
from zenps.wire.shared_memory.loans import Loans

from ...core.pending import LeftError, Pending
from ...core.request import Request, device_error
from ...encode.sparse import as_table
from ...transport.host_link import Failed, Give, Link, LinkError, Take, Taken
from ..base import Session
from ..negotiation import Entries
from ..servers import ServerBackend
from .adder import Adder
from .rounds import HostRounds
from .transfer import HostRound, Payload, sum_of

# Leaders push under the tensor's name with this suffix; all ranks negotiate under the name itself.
SUFFIX = "@hosts"

FAILURES = (ZenPSError, MemoryError, RuntimeError)
"""Errors that fail one round only. A lack of memory, or of threads, raises one of these."""

# A follower sends its contribution before it negotiates.
GIVE_SECONDS = 30.0


class _Sum(NamedTuple):
    """A sum in the leader's arena."""

    rows: int
    offset: int
    size_bytes: int
    memory: Tensor


class Leader(HostRounds):
    """The rounds of a leader.

    Args:
        session, servers, arena: as for :class:`HostRounds`.
        links: to the followers, in rank order.
    """

    _copies = True

    def __init__(self, session: Session, servers: ServerBackend, arena: Arena, links: Sequence[Link]) -> None:
        super().__init__(session, servers, arena)
        self._links = links
        self._stands_for = tuple(link.rank for link in links)
        self._is_single_host = 1 + len(links) == self._size
        """True if all ranks of the job are on this host."""
        hosts = list(dict.fromkeys(worker.host for worker in session.lease.view.workers))
        self._pusher = hosts.index(session.host), len(hosts)
        self._adder = Adder(self._kernels, 1 + len(links))
        self._windows = {link.rank: link.window for link in links}
        self._own_window = Window(self._arena.fd)
        self._given: dict[tuple[int, int], Give] = {}
        """Contributions to rounds that have not ended, by the rank and its number of the round."""
        self._refused: dict[tuple[int, str], tuple[int, Failed]] = {}
        """By rank and tensor, the last step that has failed here before the rank gave its contribution."""
        self._loans = {rank: Loans() for rank in (self._rank, *self._windows)}
        """The sums that each rank still uses, by the rank's number of the round."""

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link, selectors.EVENT_READ, link)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._receive(key.data):
                        # Its contributions can still be read. Without it no negotiation succeeds any more.
                        selector.unregister(key.fileobj)

    def _receive(self, link: Link) -> bool:
        """Processes a message; returns False once the follower is gone."""
        message = link.receive()
        match message:
            case Give():
                with self._news:
                    refused = self._refused.get((link.rank, message.name))
                    if refused is None or message.step > refused[0]:
                        self._given[link.rank, message.number] = message
                        self._news.notify_all()
                        return True
                self._tell(link, structs.replace(refused[1], number=message.number))
            case Taken(number=number):
                self._loans[link.rank].drop(number)
            case None:
                return False
            case _:
                raise LinkError(f"rank {link.rank} sent {type(message).__name__}, expected give or taken")
        return True

    def close(self) -> None:
        """As :meth:`NegotiatedRounds.close`."""
        super().close()
        self._adder.close()

    def _shut_down(self) -> None:
        super()._shut_down()
        for link in self._links:
            link.shut_down()

    def _on_failed(self, round_: HostRound, error: ZenPSError) -> None:
        if not self._is_single_host:
            with contextlib.suppress(UsageError):  # too many names, on all hosts
                self._servers.give_up(self._request(round_, round_.form.without_rows()), round_.step)
        self._refuse(round_, error)

    def _on_negotiated(self, round_: HostRound, entries: Entries) -> None:
        round_.numbers = {link.rank: entries.numbers[link.rank] for link in self._links}
        try:
            if self._is_single_host:
                contributions = self._contributions(round_)
                with self._session.spans("aggregate", round_.name):
                    divisor = self._size if round_.pending.options.average else 1
                    chunks = self._adder.add(contributions, round_.form, divisor)
                self._end(round_, self._map_sum(round_, self._distribute(round_, chunks)))
            else:
                round_.pushed = self._push(round_)
                self._await(round_, round_.pushed)
        except FAILURES as error:
            self._refuse(round_, error)

    def _push(self, round_: HostRound) -> Pending:
        """Begins the round over servers for all ranks of this host. If it fails, then on all hosts."""
        try:
            total = sum_of(self._kept(round_, self._contributions(round_)), round_.form, self._pool)
        except FAILURES:
            self._servers.give_up(self._request(round_, round_.form.without_rows()), round_.step)
            raise
        round_.drop_contribution()  # only its sum is still needed
        return self._servers.begin(self._request(round_, total), "rows", round_.step)

    def _request(self, round_: HostRound, tensor: Tensor) -> Request:
        options = structs.replace(
            round_.pending.options,
            stands_for=self._stands_for,
            pusher=self._pusher,
            is_dropped=all(round_.are_dropped),
        )
        if tensor.dtype != round_.form.dtype:
            # The sum of float16 or bfloat16 gradients is float32, but must not be quantized.
            options = structs.replace(options, purpose="value")
        return Request(tensor, round_.name + SUFFIX, options)

    def _contributions(self, round_: HostRound) -> list[Payload]:
        """Returns those of all ranks of this host, in rank order."""
        round_.are_dropped = [round_.pending.options.is_dropped]
        return [round_.contribution, *(self._contribution_of(link, round_) for link in self._links)]

    def _kept(self, round_: HostRound, contributions: list[Payload]) -> list[Payload]:
        """Returns those that are in the sum: of a sparsified gradient, without those that are thrown away.

        If all are, nothing of the sum is pushed.
        """
        if not round_.pending.options.is_sparsifiable or all(round_.are_dropped):
            return contributions
        pairs = zip(contributions, round_.are_dropped, strict=True)
        return [contribution for contribution, is_dropped in pairs if not is_dropped]

    def _contribution_of(self, link: Link, round_: HostRound) -> Payload:
        key = link.rank, round_.numbers[link.rank]
        with self._news:
            self._news.wait_for(lambda: self.is_over or key in self._given, GIVE_SECONDS)
            given = self._given.pop(key, None)
        if given is None:
            raise LinkError(
                f"tensor {round_.name!r}: no contribution from rank {link.rank} within {GIVE_SECONDS:g} s"
            )
        round_.are_dropped.append(given.is_dropped)
        memory = self._windows[link.rank].read(given.offset, given.size_bytes)
        return round_.form.read(memory, given.rows)

    def _on_answer(self, round_: HostRound) -> None:
        assert round_.pushed is not None
        try:
            result = round_.pushed.wait()
            round_.transfer.over_servers = round_.pushed.report
            rows, values = (
                as_table(result) if result.is_sparse else (round_.contribution.rows, result.view(-1))
            )
            total = Payload(rows, values.to(round_.form.dtype))
            if self._links:
                self._distribute(round_, [total])
        except FAILURES as error:
            self._refuse(round_, error)
        else:
            self._end(round_, round_.form.tensor(total, is_coalesced=True))

    def _distribute(self, round_: HostRound, chunks: Sequence[Payload]) -> _Sum:
        """Puts the sum into shared memory and tells the followers its offset."""
        rows = sum(len(chunk.rows) for chunk in chunks)
        size = round_.form.size_bytes(rows)
        for loans in self._loans.values():
            loans.collect()
        # An empty sum takes one byte, so it needs no special case.
        offset, memory = self._arena.allocate(max(size, 1))
        self._adder.copy(chunks, round_.form.view(memory[:size], rows))
        for link in self._links:
            number = round_.numbers[link.rank]
            self._loans[link.rank].lend(number, memory)
            self._tell(link, Take(number, rows, offset, size))
        return _Sum(rows, offset, size, memory)

    def _map_sum(self, round_: HostRound, total: _Sum) -> Tensor:
        """Returns this rank's private mapping of a sum; followers map theirs in the same way."""
        loans = self._loans[self._rank]
        loans.lend(round_.number, total.memory)
        try:
            memory = self._own_window.map_private(total.offset, total.size_bytes, loans.drop, round_.number)
        except TensorError:
            loans.drop(round_.number)
            raise
        return round_.form.tensor(round_.form.read(memory, total.rows), is_coalesced=True)

    def _refuse(self, round_: HostRound, failure: Exception) -> None:
        """Fails a round on all ranks of this host."""
        error = device_error(f"tensor {round_.name!r}", failure)
        if not isinstance(error, LeftError):  # else the scheduler reports it
            for link in self._links:
                self._refuse_to(link, round_, Failed.by(0, error))
        self._end(round_, error)

    def _refuse_to(self, link: Link, round_: HostRound, failed: Failed) -> None:
        rank, what = link.rank, (round_.name, round_.step)
        with self._news:
            if (number := round_.numbers.get(rank)) is None:  # its negotiation has failed here
                given = [each for (giver, _), each in self._given.items() if giver == rank]
                # The greatest: the rank has taken earlier ones back, whose negotiation could not begin.
                number = max((each.number for each in given if (each.name, each.step) == what), default=None)
            if number is None:
                self._refused[rank, round_.name] = round_.step, failed
                return
            self._given.pop((rank, number), None)
        self._tell(link, structs.replace(failed, number=number))

    def _tell(self, link: Link, message: Take | Failed) -> None:
        with contextlib.suppress(LinkError):  # that follower is gone and waits for nothing
            link.send(message)
