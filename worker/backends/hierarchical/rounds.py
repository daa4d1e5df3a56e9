"""Rounds of the ranks of one host: all give their parts to the leader, who has the sum.

It gets it from servers, or where all ranks of the job are on one host has added it itself.

For every tensor all ranks of the job first meet at a server (:mod:`..met_rounds`), as those that exchange
among themselves do: there, deadlines, losses and disagreements end a round on all ranks alike. Once they have
met, every part lies in shared memory, and the leader waits for no rank of its host any more.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from zenps.buffers import BufferPool
from zenps.errors import ZenPSError
from zenps.kernels.base import Kernels
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.arena import Arena

from ...core.handle import Handle, Wait
from ...core.spans import Spans
from ..negotiated_rounds import NegotiatedRounds
from .transfer import Form, HostRound, part_of


class HostRounds(NegotiatedRounds[HostRound]):
    """The rounds of one rank of a host. Every method may be called from any thread.

    Args:
        rank, size, meet, wait, wake, metrics: as for :class:`NegotiatedRounds`.
        arena: what it shares.
        record: counts a round that is done, with the seconds that its caller waited.
        timeout_seconds: how long a caller waits for a sum at most.
        kernels, pool: for sums and copies.
        spans: for a timeline.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        arena: Arena,
        negotiate: Callable[[Tensor, str], Handle],
        wait: Wait,
        wake: Callable[[], None],
        record: Callable[[HostRound, float], None],
        timeout_seconds: float,
        kernels: Kernels,
        pool: BufferPool,
        metrics: WorkerMetrics,
        spans: Spans,
    ) -> None:
        super().__init__(rank, size, negotiate, wait, wake, metrics)
        self._arena = arena
        self._waiting = timeout_seconds, record, spans
        self._kernels, self._pool = kernels, pool
        self._spans = spans
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"zenps-{name}", daemon=True)
            for run, name in ((self._run, "host"), (self._listen, "host-link"))
        ]

    def begin(self, tensor: Tensor, name: str, average: bool, is_gradient: bool, priority: int) -> HostRound:
        """Begins to sum a tensor, on the CPU, over all ranks of the job.

        Raises:
            TensorError: an index lies outside the tensor.
            UsageError: the name is in flight, or one too many.
        """
        began = time.perf_counter()
        with self._spans("compact", name):
            part = part_of(tensor, self._kernels, self._own_pool)
        form = Form(tensor.shape, tensor.dtype, tensor.sparse_dim() if tensor.is_sparse else -1)
        how = average, is_gradient, priority

        def make(number: int) -> HostRound:
            return HostRound(name, number, form, how, part, began, *self._waiting)

        return self._begin(name, tensor, len(part.rows), average, make)

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
            self._wait(self._has_work, math.inf)
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
