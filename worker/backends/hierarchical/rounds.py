"""Hierarchical rounds: all ranks of a host give their parts to the leader, who has the sum.

The leader gets the sum from servers, or adds it itself where all ranks of the job are on one host.

For every tensor all ranks of the job first negotiate over a server (:mod:`..negotiated_rounds`), as those
that exchange among themselves do: there, deadlines, losses and disagreements end a round on all ranks alike.
Once they agree, every part lies in shared memory, and the leader waits for no rank of its host any more.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zenps.buffers import BufferPool
from zenps.errors import ZenPSError
from zenps.kernels.factory import make_kernels
from zenps.wire.arena import Arena

from ...core.memory import POOL_BYTES
from ...core.pending import Pending, Waiting
from ...core.request import Request
from ...core.statistics import Progress
from ...core.transfer import Transform
from ...transport.peer_group import MOST_SECONDS
from ..base import Session
from ..negotiated_rounds import NegotiatedRounds
from ..servers import ServerBackend
from .transfer import Form, HostRound, HostTransfer, part_of


class HostSession(NamedTuple):
    """A worker's part in its host.

    Attributes:
        session: its part in the cluster.
        servers: over which ranks negotiate, and leaders push.
        arena: the memory that it shares.
    """

    session: Session
    servers: ServerBackend
    arena: Arena


class HostRounds(NegotiatedRounds[HostRound]):
    """The rounds of one rank of a host. Every method may be called from any thread."""

    def __init__(self, host: HostSession) -> None:
        session = host.session
        super().__init__(session, host.servers)
        self._arena = host.arena
        timeout_seconds = session.timeout_seconds + MOST_SECONDS
        self._waiting = Waiting(self._signal, timeout_seconds, session.statistics, session.spans)
        self._pool = BufferPool(POOL_BYTES)
        self._kernels = make_kernels(self._pool)
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"zenps-{name}", daemon=True)
            for run, name in ((self._run, "host"), (self._listen, "host-link"))
        ]

    def begin(self, request: Request, transforms: Sequence[Transform]) -> Pending:
        """Begins to reduce a tensor, on the CPU, over all ranks of the job.

        Args:
            transforms: which the tensor has gone through.

        Raises:
            TensorError: an index lies outside the tensor.
            UsageError: the name is in flight, or one too many.
        """
        tensor, name, options = request
        progress = Progress(0)
        with self._session.spans("compact", name):
            part = part_of(tensor, self._kernels, self._own_pool)
        progress.compacted_seconds = time.perf_counter() - progress.began
        form = Form(tensor.shape, tensor.dtype, tensor.sparse_dim() if tensor.is_sparse else -1)
        transfer = HostTransfer(form)
        pending = Pending(name, options, transfer, progress, self._waiting, transforms)
        round_ = HostRound(pending=pending, transfer=transfer, form=form, part=part)
        return self._begin(request, len(part.rows), round_)

    @property
    @abstractmethod
    def _own_pool(self) -> BufferPool | None:
        """For a part that is not copied into shared memory at once."""

    @abstractmethod
    def _listen(self) -> None:
        """What the thread that hears other ranks of the host does."""

    @abstractmethod
    def _on_answer(self, round_: HostRound) -> None:
        """The round over servers is over, where this rank has begun one."""

    # ── the thread that waits for servers ───────────────────────────────────────────────────────

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except ZenPSError as error:
            self.fail(error)
        except BaseException as error:
            self.fail(ZenPSError(f"a thread of two-level rounds ended: {error!r}"))
            raise

    def _run(self) -> None:
        while self._failure is None:
            with self._news:
                self._news.wait_for(lambda: self._failure or self._awaits_servers())
            self._servers.wait(self._has_work, math.inf)
            for round_ in self._ready():
                if round_.is_heard:
                    self._on_answer(round_)
                else:
                    self._hear(round_)

    def _awaits_servers(self) -> bool:
        """Whether a server has still to answer for any round.

        A thread that waited for them without that would have the channel's lock, and each answer to a round
        of another thread would cost that one a wake-up.
        """
        return any(not round_.is_heard or round_.pushed for round_ in self._in_flight.values())

    def _has_work(self) -> bool:
        return self._failure is not None or bool(self._ready())

    def _ready(self) -> list[HostRound]:
        with self._news:
            rounds = list(self._in_flight.values())
        return [
            round_ for round_ in rounds if (round_.has_answer if round_.is_heard else round_.is_negotiated)
        ]
