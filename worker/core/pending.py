"""Pending result (future) of an asynchronous push_pull."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from zenps.errors import DeadlineError, UsageError, ZenPSError

from .interrupts import MaskedLock
from .request import Options, device_error
from .statistics import Counted, Progress, Report
from .transfer import Answer, EncodedTensor, SuppliedTransfer, Transfer, Transform, outside_inference_mode
from .waiting import Waiting

NO_REPORT: Final = Report()

FORKED: Final = (
    "this process is a fork of a worker, such as a DataLoader's, and has none of its connections; call zenps "
    "in the training process only, or start this process by spawn, not fork, to join a cluster of its own"
)

_forks = 0
"""How many forks lead from the first process to this one."""


def _after_fork() -> None:
    global _forks
    _forks += 1


# Counted, because asking the kernel for the process id at each call would take longer.
os.register_at_fork(after_in_child=_after_fork)


class Pending:
    """The future result of an asynchronous push_pull. :meth:`wait` may be called from any thread.

    Args:
        name: of the tensor.
        options: how the tensor is synchronised.
        transfer: turns answers into the result.
        progress: of this round.
        waiting: how to wait for answers.
        transforms: those that were applied to the transfer's tensor.
        counted: the part of the round that goes into statistics.

    Attributes:
        name, options, progress, counted: as given.
        report: the bytes and rows that were moved; set once the result is there.
        is_staged: True if a device has to finish its work before :meth:`begin`.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        transfer: Transfer,
        progress: Progress,
        waiting: Waiting,
        transforms: Sequence[Transform] = (),
        counted: Counted = "round",
    ) -> None:
        self.name = name
        self.options = options
        self.progress = progress
        self.report = NO_REPORT
        self.is_staged = transfer.is_staged
        self._transfer: Transfer | None = transfer
        self._waiting = waiting
        self._transforms = transforms
        self.counted = counted
        self._uncounted = [counted]
        """Empty once statistics have the round's outcome."""
        self._at_end: list[Callable[[], None]] = []
        self._conversions: tuple[Callable[[Tensor], Tensor], ...] = ()
        self._rounds = 0
        """The number of rounds in flight."""
        self._answers: deque[Answer | EncodedTensor | ZenPSError] = deque()
        self._restarts = 0
        """How often the timeout was restarted: by an answer that the poller absorbed, or by a server's new
        deadline."""
        self._unabsorbed = 0
        """Answers that the waiting thread has yet to absorb, whether they have come or not."""
        self._waited_seconds = self._worked_seconds = 0.0
        self._pulled: Tensor | None = None
        """The transfer's result, kept until its transforms are undone: Ctrl-C may interrupt before that."""
        self._finishing = MaskedLock()
        self._result: Tensor | Exception | None = None
        self._forks = _forks

    def __repr__(self) -> str:
        return f"Pending({self.name!r}, done={self.progress.ended})"

    @property
    def has_ended(self) -> bool:
        """True if the round has ended, as far as arrived messages were processed; see :meth:`done`."""
        return self.progress.ended

    def done(self) -> bool:
        """Processes what has arrived; returns whether :meth:`wait` need not wait for the network any more.

        Raises:
            UsageError: this process is a fork of the one that pushed, and the round had not ended by then.
        """
        if not self.progress.ended:
            if self._forks != _forks:
                self._refuse_fork()
            self._waiting.waiter.poll(lambda: self.progress.ended)
        return self.progress.ended

    def wait(self) -> Tensor:
        """Waits for the result and returns it, or raises the error of the round. May be called repeatedly.

        After Ctrl-C, the wait can be repeated. If the handler of another signal raises while an answer is
        processed, the result is incomplete, and the next wait raises UsageError. A fork of the process that
        pushed also raises UsageError, unless the process had the result before it forked.
        """
        if self._result is None and self._forks != _forks:
            self._refuse_fork()
        with self._finishing:
            if self._result is None:
                assert self._transfer is not None
                with outside_inference_mode():
                    self._result = self._finish(self._transfer)
                if isinstance(self._result, Tensor):  # else answers may still come
                    self._transfer = self._pulled = None
                else:
                    self._count_failure()
        if isinstance(self._result, Exception):
            try:
                raise self._result
            finally:
                # The error refers to this frame. With `self` in it, only the collector of cycles would free
                # the transfer.
                del self
        return self._result

    def _refuse_fork(self) -> None:
        """A fork has none of the threads and connections that bring answers, and may find locks held."""
        if self.counted != "nothing":
            raise UsageError(f"tensor {self.name!r}: {FORKED}")

    # ── for whoever begins the round ────────────────────────────────────────────────────────────

    def convert_result(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Makes :meth:`wait` return ``convert(result)``. Called before anyone can wait."""
        self._conversions = (*self._conversions, convert)

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Has ``call()`` called once the round has ended: by the thread that ends it, or at once."""
        self._at_end.append(call)
        if self.progress.ended:
            self._tell_end()

    def _tell_end(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may have popped the last one
            while self._at_end:
                self._at_end.pop()()

    # ── for the thread that polls or reduces ────────────────────────────────────────────────────

    @property
    def transfer(self) -> Transfer:
        """The transfer; only until the result is there."""
        assert self._transfer is not None
        return self._transfer

    def begin(self) -> Sequence[EncodedTensor]:
        """Returns the first pushes, once the transfer is prepared."""
        assert self._transfer is not None
        rounds = self._transfer.begin()
        self._rounds = len(rounds)
        for encoded in rounds:
            self._unabsorbed += encoded.answers
        return rounds

    def deliver(self, answer: Answer, last: bool) -> Sequence[EncodedTensor]:
        """Takes the answer to one push; returns the pushes that follow from it.

        Args:
            last: True if the answer completes its round.

        Raises:
            ProtocolError: the answer does not match the push.
        """
        progress, transfer = self.progress, self._transfer
        assert transfer is not None
        following: Sequence[EncodedTensor] = ()
        progress.pushed_rows += answer.result.pushed
        progress.pulled_rows += answer.rows
        progress.pulled_bytes += answer.pulled_bytes
        if transfer.absorbs_on == "poller":
            begin = time.perf_counter()
            with outside_inference_mode():  # whoever polls receives answers for all threads
                following = transfer.on_answer(answer)
            self._restarts += 1
            self._worked_seconds += time.perf_counter() - begin
        else:
            self._answers.append(answer)
        self._rounds += len(following) - last
        if not self._rounds:
            progress.ended = True
            self._tell_end()
        return following

    def restart(self, encoded: EncodedTensor) -> None:
        """Restarts a round in flight as ``encoded``, because the ring has changed."""
        if self.transfer.absorbs_on == "poller":
            self.transfer.restart(encoded)
            self.restart_timeout()
            return
        self.progress.pushed_rows = self.progress.pulled_rows = self.progress.pulled_bytes = 0
        # Only the waiting thread may use the transfer, and it may be absorbing an old answer now: it restarts
        # the transfer before it takes the next answer. The queue is replaced, not emptied: a thread that was
        # woken for an answer and finds none would raise a DeadlineError.
        self._answers = deque([encoded])

    def restart_timeout(self) -> None:
        """Restarts the timeout of :meth:`wait`, because a server has restarted its deadline."""
        self._restarts += 1

    def complete(self, result: Tensor) -> None:
        """Supplies the result. Only for a :class:`SuppliedTransfer`."""
        transfer = self._transfer
        if not self.progress.ended and transfer is not None:
            assert isinstance(transfer, SuppliedTransfer)
            transfer.result = result
            self.progress.ended = True
            self._tell_end()

    def fail(self, error: ZenPSError) -> None:
        """Ends the round with ``error``, unless it has ended already."""
        if not self.progress.ended:
            self._count_failure()
            self._answers.append(error)
            self.progress.fail()
            self._tell_end()

    def _count_failure(self) -> None:
        if self._take_uncounted() == "round":
            self._waiting.statistics.count_failure()

    def _take_uncounted(self) -> Counted:
        """Returns what statistics have yet to count of the round: nothing once this was called."""
        # Without a lock: a signal handler of the script may end rounds while its thread counts one.
        try:
            return self._uncounted.pop()
        except IndexError:
            return "nothing"

    # ── on the thread that waits ────────────────────────────────────────────────────────────────

    def _finish(self, transfer: Transfer) -> Tensor | Exception:
        """Returns the result, or the error, so that a second wait() also raises it."""
        if (failure := self._absorb_all(transfer)) is not None:
            return failure
        progress, waiting = self.progress, self._waiting
        begin = time.perf_counter()
        try:
            with waiting.spans("scatter", self.name, progress.step):
                if self._pulled is None:
                    self._pulled = transfer.finish()
                result = self._pulled
                for transform in reversed(self._transforms):
                    result = transform.undo(result)
                for convert in self._conversions:
                    result = convert(result)
        except Exception as error:  # noqa: BLE001
            return self._error_of(error)
        self._worked_seconds += time.perf_counter() - begin
        self.report = transfer.report(progress)
        seconds = self._waited_seconds, self._worked_seconds
        waiting.statistics.record(self.report, progress, *seconds, self._take_uncounted())
        return result

    def _absorb_all(self, transfer: Transfer) -> Exception | None:
        """Absorbs each answer while the next ones are on their way.

        Returns an error instead of raising it: an answer that could not be absorbed, perhaps for lack of
        memory, is lost.
        """
        progress = self.progress
        waiter, timeout_seconds, _, spans = self._waiting
        until = time.monotonic() + timeout_seconds
        begin, restarts = time.perf_counter(), self._restarts
        # Asked in this order: the last answer is there before the end is.
        while not progress.ended or self._answers:
            with spans("wait", self.name, progress.step):
                waiter.wait(self._has_news, until)
            if self._restarts != restarts:
                restarts, until = self._restarts, time.monotonic() + timeout_seconds
            elif not self._answers and not progress.ended:
                progress.fail()
                self._tell_end()
                reason = f"no answer within {timeout_seconds:g} s; see the logs of the other nodes"
                return DeadlineError(f"tensor {self.name!r}: {reason}")
            if not self._answers:
                continue
            answer = self._answers.popleft()
            got = time.perf_counter()
            self._waited_seconds += got - begin
            try:
                match answer:
                    case Answer():
                        self._absorb(transfer, answer)
                    case EncodedTensor():
                        transfer.restart(answer)
                        self._unabsorbed = answer.answers
                        until = time.monotonic() + timeout_seconds
                    case ZenPSError():
                        return answer
            except Exception as error:  # noqa: BLE001
                return self._error_of(error)
            begin = time.perf_counter()
            self._worked_seconds += begin - got
        if self._unabsorbed > 0 and transfer.absorbs_on == "caller":
            reason = f"an interrupt has lost {self._unabsorbed} answer(s) to this rank; push it again"
            return UsageError(f"tensor {self.name!r}: {reason}, on all ranks")
        self._waited_seconds += time.perf_counter() - begin
        return None

    def _absorb(self, transfer: Transfer, answer: Answer) -> None:
        with self._waiting.spans("scatter", self.name, answer.result.step) as span:
            transfer.on_answer(answer)
            self._unabsorbed -= 1
            if span:
                span.note(tensor=self.name, **answer.details())

    def _error_of(self, error: Exception) -> Exception:
        return device_error(f"tensor {self.name!r}", error) if isinstance(error, RuntimeError) else error

    def _has_news(self) -> bool:
        return bool(self._answers) or self.progress.ended


class LeftError(UsageError):
    """This worker has left the cluster, or is about to: no other rank waits for it any more."""

    def __init__(
        self, reason: str = "this worker has left the cluster; call zenps.init() to join again"
    ) -> None:
        super().__init__(reason)


def in_flight(name: str) -> UsageError:
    """Returns the error of a push under a name whose last round has not ended."""
    return UsageError(f"tensor {name!r} is in flight; wait for its result before pushing it again")
