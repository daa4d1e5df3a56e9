"""Parameter-server backend: pushes tensors to servers, which sum them, and pulls the sums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from msgspec import structs
from torch import Tensor

from zenps.schemes.base import Scheme

from ..core.pending import Pending
from ..core.request import Options, Request
from ..core.statistics import Counted, Progress
from ..core.steps import Steps
from ..core.transfer import OneRound, Transfer, Transform, take_back, transformed
from ..core.waiting import Ready, Waiting
from ..encode.planner import Planner
from ..encode.sharder import Sharder
from ..sparsify.agreed import Agreed, AgreedTransfer
from ..sparsify.sparsification import Sparsified
from ..transport.commands import GiveUpAhead
from ..transport.submit_queue import SubmitQueue
from .base import Backend, Session

CONTROL = Options(purpose="control")


class ServerBackend(Backend):
    """Encodes and pushes on the calling thread; libzmq's thread moves the bytes.

    A tensor on a GPU is pushed by a later call into this worker, when the GPU has prepared it.

    Args:
        session: this worker's connections to the cluster.
        scheme: of tensors that go over servers.
        sharder: distributes tensors over servers.
        steps: step counters of all tensors.
    """

    def __init__(self, session: Session, scheme: Scheme, sharder: Sharder, steps: Steps) -> None:
        self.partition = scheme.wire.partition or session.config.sync.partition
        self._session = session
        self._steps = steps
        self._planner = Planner(session.config, scheme, sharder)
        self._sparsification = session.sparsification
        self._queue = SubmitQueue(session.channel, steps, session.spans)
        self._waiting = Waiting(self._queue, session.timeout_seconds, session.statistics, session.spans)

    def begin(self, request: Request, counted: Counted = "round", step: int | None = None) -> Pending:
        """Begins to reduce a tensor, as :meth:`Backend.begin` says.

        Args:
            counted: the part of the round that goes into statistics. "rows": another round contains this one,
                on which all ranks have agreed. If it cannot begin, it fails on all.
            step: as for :meth:`Steps.begin`.
        """
        name = request.name
        if self._steps.is_in_flight(name):  # perhaps its answer has come, and no thread has received it
            self.poll(lambda: not self._steps.is_in_flight(name))
        progress = self._steps.begin(name, self._count_names(request), step)
        transforms: list[Transform] = []
        try:
            request = self._transformed(request, progress.step, transforms)
            with self._session.spans("compact", name, progress.step) as span:
                transfer = self._begin_transfer(request, transforms, progress.expected_rows)
                if span:
                    span.note(rows=transfer.rows_given)
            progress.compacted_seconds = time.perf_counter() - progress.began
            pending = Pending(name, request.options, transfer, progress, self._waiting, transforms, counted)
            self._queue.submit(pending)
        except BaseException:  # nothing was sent; a name that stays in flight could not be pushed again
            if counted == "rows":
                self._give_up(request, progress)
            else:
                self._steps.take_back(name, progress)
            take_back(transforms)
            raise
        return pending

    def residual_name(self, request: Request) -> str | None:
        sparsification = self._sparsification
        is_sparsified = sparsification is not None and sparsification.covers(request)
        return request.name if is_sparsified or self._planner.quantizes(request) else None

    def give_up(self, request: Request, step: int) -> None:
        """Gives up a round of a tensor, which other ranks may begin, before it begins here.

        Args:
            request, step: as for :meth:`begin`; the tensor's values are not read.

        Raises:
            UsageError: too many names were used.
        """
        self._give_up(request, self._steps.begin(request.name, self._count_names(request), step))

    def _give_up(self, request: Request, progress: Progress) -> None:
        """Ends a round whose step all ranks count; others may have pushed."""
        progress.fail()
        for name, step in self._planner.first_rounds(request, progress.step):
            self._session.channel.post(GiveUpAhead(name, step))

    def _count_names(self, request: Request) -> int:
        names = 1 if self._sparsification is None else self._sparsification.count_names(request)
        return max(names, self._planner.count_names(request))

    def _begin_transfer(
        self, request: Request, transforms: Sequence[Transform], expected_rows: int
    ) -> Transfer:
        for transform in transforms:
            if isinstance(transform, Sparsified):
                return transform.begin(request, partial(self._encode, expected_rows=expected_rows))
            if isinstance(transform, Agreed):
                first = self._encode_in_one_round(request, transform.expected)
                options = request.options
                return AgreedTransfer(request.name, options, transform, first, self._encode_in_one_round)
        return self._encode(request, expected_rows)

    def _encode(self, request: Request, expected_rows: int) -> Transfer:
        return self._planner.begin(request, expected_rows, self._session.channel.arena())

    def _encode_in_one_round(self, request: Request, expected_rows: int = 0) -> OneRound:
        transfer = self._encode(request, expected_rows)
        assert isinstance(transfer, OneRound), "on the CPU, and not in blocks"
        return transfer

    def _transformed(self, request: Request, step: int, transforms: list[Transform]) -> Request:
        """Adds all transforms of a tensor to ``transforms``, and applies them in order."""
        if self._sparsification is not None:
            request = transformed(request, self._sparsification.transforms(request, step), transforms)
        return transformed(request, self._planner.transforms(request.tensor), transforms)

    def close(self) -> None:
        """Does nothing: the lease closes the session's channel."""

    def negotiate(self, table: Tensor, name: str, given: str = "") -> Pending:
        """Sums a small dense tensor of control data over all ranks. Statistics do not count it.

        Args:
            given: describes what it is about; must be the same on all ranks.
        """
        return self.begin(Request(table, name, structs.replace(CONTROL, given=given)), "nothing")

    def poll(self, ready: Ready) -> None:
        """Processes what has arrived, so that ``ready()`` is up to date; does not wait for more."""
        self._queue.poll(ready)

    def wait(self, ready: Ready, until: float) -> None:
        """Polls until ``ready()`` or the monotonic time ``until``."""
        self._session.channel.wait(ready, until)

    def flush(self, until: float) -> None:
        """Waits until all tensors on a GPU are pushed, at most until the monotonic time ``until``."""
        self._queue.advance(until)
