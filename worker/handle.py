"""What an asynchronous call returns: a result to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from torch import Tensor

from zenps.errors import DeadlineError, ZenPSError
from zenps.wire.messages import Result

from .communicator import Pending
from .compaction import Transfer

__all__ = ["Handle", "Progress", "Recorder"]

Answer = tuple[int, Result, Sequence[memoryview]]

Recorder = Callable[[float, float, float], None]
"""Called once per round with the seconds that it took, that its caller waited, and worked on it."""


class Progress:
    """What is known of a tensor's latest round. It outlives the handle, and holds no tensor."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.ended = threading.Event()
        self.pulled_rows = 0
        self.pulled_bytes = 0


class Handle(Pending):
    """One tensor in flight. The I/O thread feeds it; :meth:`wait` may be called from any thread.

    Args:
        name: of the tensor.
        progress: of this round.
        transfer: turns the answers into the result, on the thread that waits.
        timeout_seconds: a last resort; the I/O thread's own deadlines come before it.
        record: for metrics.
    """

    def __init__(
        self, name: str, progress: Progress, transfer: Transfer, timeout_seconds: float, record: Recorder
    ) -> None:
        self.name = name
        self._progress = progress
        self._transfer: Transfer | None = transfer
        self._began = time.perf_counter()
        self._timeout_seconds = timeout_seconds
        self._record = record
        self._answers: SimpleQueue[Answer | ZenPSError] = SimpleQueue()
        self._finishing = threading.Lock()
        self._outcome: Tensor | ZenPSError | None = None

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, done={self.done()})"

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, without waiting for the network."""
        return self._progress.ended.is_set()

    def wait(self) -> Tensor:
        """The result. A second call returns the same tensor, or raises the same error.

        Raises:
            DeadlineError: a rank or server did not answer in time; it is named.
            MismatchError: ranks pushed different shapes, dtypes or kinds under this name.
            PeerLostError: a node is gone.
        """
        with self._finishing:
            if self._outcome is None:
                assert self._transfer is not None
                self._outcome = self._finish(self._transfer)
                self._transfer = None
        if isinstance(self._outcome, ZenPSError):
            raise self._outcome
        return self._outcome

    # ── for the I/O thread ──────────────────────────────────────────────────────────────────────

    def deliver(self, answer: Answer, last: bool) -> None:
        """One part was answered."""
        _, result, frames = answer
        self._progress.pulled_rows += result.rows
        self._progress.pulled_bytes += sum(frame.nbytes for frame in frames)
        self._answers.put(answer)
        if last:
            self._progress.ended.set()

    def fail(self, error: ZenPSError) -> None:
        """The round will not be answered."""
        self._answers.put(error)
        self._progress.ended.set()

    def _finish(self, transfer: Transfer) -> Tensor | ZenPSError:
        waited = worked = 0.0
        until = time.monotonic() + self._timeout_seconds
        for _ in transfer.parts:
            begin = time.perf_counter()
            try:
                answer = self._answers.get(timeout=max(until - time.monotonic(), 0.001))
            except Empty:
                return DeadlineError(f"tensor {self.name!r}: no answer within {self._timeout_seconds:g} s")
            got = time.perf_counter()
            waited += got - begin
            if isinstance(answer, ZenPSError):
                return answer
            try:
                transfer.absorb(answer[0], answer[1].chunk, answer[1], answer[2])
            except ZenPSError as error:
                return error
            worked += time.perf_counter() - got
        begin = time.perf_counter()
        result = transfer.finish()
        ended = time.perf_counter()
        self._record(ended - self._began, waited, worked + ended - begin)
        return result
