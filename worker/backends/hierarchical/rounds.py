"""Hierarchical reduction: the ranks of a host give their contributions to a leader and get the sum from it.

The leader pushes the host's sum to servers and pulls the total. If all ranks of the job are on one host, it
computes the total itself.

For every tensor all ranks of the job first negotiate over a server (:mod:`..negotiated_rounds`). So
deadlines, losses and disagreements end a round on all ranks alike. Once ranks agree, all contributions lie in
shared memory, and the leader waits for no rank of its host any more.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from zenps.buffers import BufferPool
from zenps.config.sources import kernel_threads
from zenps.kernels.factory import make_kernels
from zenps.wire.shared_memory.arena import Arena

from ...core.memory import POOL_BYTES
from ...core.pending import Pending
from ...core.request import Request
from ...core.statistics import Progress
from ...core.transfer import Transform
from ..base import Session
from ..negotiated_rounds import NegotiatedRounds
from ..servers import ServerBackend
from .transfer import Form, HostRound, HostTransfer, contribution_of


class HostRounds(NegotiatedRounds[HostRound]):
    """The rounds of one rank of a host. Every method may be called from any thread.

    Args:
        session: this worker's connections to the cluster.
        servers: over which ranks negotiate and leaders push.
        arena: the memory that this rank shares with its host; closed when rounds fail.
    """

    _copies: ClassVar[bool] = False
    """True if a contribution is copied when its round begins, because it does not go into shared memory."""

    def __init__(self, session: Session, servers: ServerBackend, arena: Arena) -> None:
        super().__init__(session, servers)
        self._arena = arena
        self._steps: defaultdict[str, int] = defaultdict(int)
        """By tensor, how many of its negotiations have begun."""
        self._pool = BufferPool(POOL_BYTES)
        config = session.config
        self._kernels = make_kernels(self._pool, config.kernels.backend, kernel_threads(config))
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=f"zenps-{name}", daemon=True)
            for run, name in ((self._run, "host"), (self._listen, "host-link"))
        ]

    def begin(self, request: Request, transforms: Sequence[Transform]) -> Pending:
        """Begins to reduce a tensor on the CPU over all ranks of the job.

        Args:
            transforms: those that were applied to the tensor.

        Raises:
            TensorError: an index lies outside the tensor.
            UsageError: the name is in flight, or too many names were used.
        """
        tensor, name, options = request
        progress = Progress(0)
        with self._session.spans("compact", name):
            contribution = contribution_of(tensor, self._kernels, self._pool if self._copies else None)
        progress.compacted_seconds = time.perf_counter() - progress.began
        form = Form(tensor.shape, tensor.dtype, tensor.sparse_dim() if tensor.is_sparse else -1)
        transfer = HostTransfer(form)
        pending = Pending(name, options, transfer, progress, self._waiting, transforms)
        round_ = HostRound(pending=pending, transfer=transfer, form=form, contribution=contribution)
        return self._begin(request, len(contribution.rows), round_)

    @abstractmethod
    def _listen(self) -> None:
        """Receives messages from other ranks of the host until the links end; runs on its own thread."""

    @abstractmethod
    def _on_answer(self, round_: HostRound) -> None:
        """Called at the leader when the round over servers has ended."""

    def _publish(self, round_: HostRound) -> None:
        round_.step = self._steps[round_.name]
        self._steps[round_.name] += 1

    def _take_back(self, round_: HostRound) -> None:
        self._steps[round_.name] -= 1

    def _shut_down(self) -> None:
        self._arena.close()  # rounds drop what they have shared, which other ranks may read later

    # ── the thread that waits for servers ───────────────────────────────────────────────────────

    def _run(self) -> None:
        while self._failure is None:
            with self._news:
                # With no round to wait for, this thread must not wait on the channel: it would hold the lock
                # there, and a thread that waits for its own round would need a wake-up for each answer.
                self._news.wait_for(lambda: self._failure or self._awaited)
            self._servers.wait(self._has_work, math.inf)
            self._process_ready()

    def _process_ready(self) -> None:
        # In a function of its own: the frame of the waiting thread would keep the last round alive, and with
        # it the sum.
        for round_ in self._take_ended():
            if round_.is_processed:
                self._on_answer(round_)
            else:
                self._process_negotiation(round_)

    def _has_work(self) -> bool:
        return self._failure is not None or bool(self._ended)
