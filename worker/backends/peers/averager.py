"""Model averaging in groups of workers (DS-Sync), on a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

import xxhash
from torch import Tensor

from zenps.errors import DeadlineError, ZenPSError, listing
from zenps.observe import log

from ...core.interrupts import MASK
from ...core.pending import LeftError, Pending
from ...core.request import Options
from ...core.statistics import Progress, Report
from ...core.transfer import SuppliedTransfer, dense_bytes
from ...core.waiting import Notifier, Waiting
from ...transport.channel import CLOSE_SECONDS
from ...transport.peer_group import Group, GroupError
from ..base import Session
from .average import average_within
from .connection import why_broken
from .schedule import Schedule, members_of


class _Averaging(SuppliedTransfer):
    """The tensors of one model, which are averaged in place.

    Attributes:
        sent_bytes, received_bytes: by this rank.
    """

    sent_bytes = received_bytes = 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors[0])
        self.tensors = tensors

    def report(self, progress: Progress) -> Report:
        whole = sum(dense_bytes(tensor.numel(), tensor.element_size()) for tensor in self.tensors)
        return Report(self.sent_bytes, self.received_bytes, whole, over="peers")


class _Round(NamedTuple):
    pending: Pending
    transfer: _Averaging
    members: Sequence[int]


class GroupAverager:
    """Averages models within groups of workers, which change from step to step.

    Only one thread may average. A wait for another worker ends with an error when the lease ends, and after
    ``cluster.deadline_seconds``; afterwards nothing can be averaged any more.

    Args:
        session: this worker's connections to the cluster.
        group: of all ranks; nobody else may use it.
        cycle: the groups of successive steps, as of :func:`~.schedule.make_cycle`.
    """

    def __init__(self, session: Session, group: Group, cycle: Sequence[Schedule]) -> None:
        self._session = session
        self._group = group
        self._cycle = cycle
        self._failure: ZenPSError | None = None
        self._current: Pending | None = None
        self._begun: Counter[str] = Counter()
        """By model, the averages that were begun here."""
        self._notifier = Notifier()
        timeout_seconds = session.config.cluster.deadline_or_infinity_seconds
        self._waiting = Waiting(self._notifier, timeout_seconds, session.statistics, session.spans)
        self._rounds: SimpleQueue[_Round | None] = SimpleQueue()
        self._wait: tuple[str, float] | None = None
        self._thread = threading.Thread(target=self._run, name="zenps-averager", daemon=True)
        self._thread.start()
        session.lease.wait_sources.append(lambda: self._wait)
        session.lease.call_at_end(self._fail)

    def average(self, name: str, step: int, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by their averages over this rank's group of the step. Call :meth:`settle` before.

        Args:
            name: of the model, equal on all ranks.
            step: of the model, from 0.
            tensors: as :func:`~.average.average_within` takes them; at least one.

        Raises:
            DeadlineError: a member of the group did not come in time.
            MismatchError: a member averages in another step, or another model.
            PeerLostError: a node was lost meanwhile.
        """
        assert self._current is None or self._current.has_ended, "its tensors are still used: settle() first"
        transfer, progress = _Averaging(tensors), Progress(step)
        with MASK:  # what settle() waits for is known to the averager's thread
            pending = self._current = Pending(name, Options(), transfer, progress, self._waiting)
            self._note_step(name, step)
            if self._failure is not None:
                pending.fail(self._failure)
            self._rounds.put(_Round(pending, transfer, self._members(step)))
        self._await(pending)

    def settle(self) -> None:
        """Waits for an average whose wait Ctrl-C has interrupted: its tensors are in use until it ends.

        Errors are those of that average.
        """
        if self._current is not None and not self._current.has_ended:
            self._await(self._current)

    def close(self) -> None:
        """Ends the thread; an average in progress fails."""
        self._fail(LeftError())
        self._rounds.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _members(self, step: int) -> Sequence[int]:
        return members_of(self._cycle[step % len(self._cycle)], self._group.rank)

    def _await(self, pending: Pending) -> None:
        step = pending.progress.step
        others = listing([rank for rank in self._members(step) if rank != self._group.rank])
        with MASK:  # an interrupt that comes with the deadline is raised once the averager has failed
            try:
                self._wait = f"models of rank(s) {others}, step {step}", pending.progress.began
                pending.wait()
            except DeadlineError as error:
                late = DeadlineError(
                    f"model {pending.name!r}, step {step}: not averaged with rank(s) {others}: {error}; "
                    "see their logs"
                )
                self._fail(late)
                raise late from error
            finally:
                self._wait = None

    def _note_step(self, name: str, step: int) -> None:
        # Not the step itself: a model that is loaded from a checkpoint begins with a later one.
        self._begun[name] += 1
        metrics = self._session.metrics
        if self._begun[name] > metrics.steps.total:
            log.here.step = step
            metrics.steps.total += 1

    def _fail(self, error: ZenPSError) -> None:
        if self._failure is None:
            self._failure = error
            self._group.abort()
        if self._current is not None:
            self._current.fail(self._failure)
        self._notifier.notify()

    # ── the averager's thread ───────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while (round_ := self._rounds.get()) is not None:
                if self._failure is None:
                    self._average(round_)
                del round_  # do not keep tensors until the next one
        except GroupError as error:
            self._fail(self._failure or why_broken(self._session, error))
        except BaseException as error:
            self._fail(ZenPSError(f"the averager's thread ended: {error!r}"))
            raise

    def _average(self, round_: _Round) -> None:
        pending, transfer, members = round_
        group, metrics, step = self._group, self._session.metrics, pending.progress.step
        sent, received = group.sent_bytes, group.received_bytes
        header = step, xxhash.xxh3_64_intdigest(pending.name.encode()) >> 1
        with self._session.spans("average", pending.name, step) as span:
            try:
                averaged = average_within(group, members, header, transfer.tensors)
            except ZenPSError as error:
                if isinstance(error, GroupError):
                    raise
                self._fail(error)
                return
            transfer.sent_bytes = group.sent_bytes - sent
            transfer.received_bytes = group.received_bytes - received
            if span:
                span.note(group=list(members), distance=averaged.relative)
                span.note(sent=transfer.sent_bytes, received=transfer.received_bytes)
        metrics.push_bytes.total += transfer.sent_bytes
        metrics.pull_bytes.total += transfer.received_bytes
        self._session.statistics.note_group(members, averaged.relative)
        pending.complete(transfer.tensors[0])
        self._notifier.notify()
