"""What an asynchronous call returns: a result to come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct, field
from torch import Tensor

from zenps.errors import DeadlineError, ZenPSError
from zenps.observe.clock import now_ns
from zenps.wire.messages import Result

from ..encode.transfer import EncodedTensor, Transfer
from ..rounds.states import Round
from .communicator import Pending
from .spans import Spans

Answer = tuple[int, Result, Sequence[memoryview]]

# How long poll() may take: enough to receive what is there, too little to notice.
LOOK_SECONDS = 0.001


class Progress(Struct):
    """What is known of a tensor's latest round. It outlives the handle, and holds no tensor."""

    step: int
    began: float = field(default_factory=time.perf_counter)
    compacted_seconds: float = 0.0
    """From there until the tensor was ready to be pushed."""
    ended: bool = False
    names: int = 1
    """How many it takes of those that a job may use: one for each stream."""
    pushed_rows: int = 0
    """By all ranks together; as ``pulled_rows`` the same on all of them, and 0 if the round failed."""
    pulled_rows: int = 0
    pulled_bytes: int = 0


Recorder = Callable[[Transfer, Progress, float, float], None]
"""Called once per round with the seconds that its caller waited, and worked on the answers."""

Wait = Callable[[Callable[[], bool], float], None]
"""Returns when a condition holds, or at a monotonic time: :meth:`Channel.wait`."""


class Handle(Pending):
    """One tensor in flight. The channel feeds it; :meth:`wait` may be called from any thread.

    Args:
        name: of the tensor.
        progress: of this round.
        transfer: turns the answers into the result, on the thread that waits.
        wait: how to wait for answers.
        timeout_seconds: a last resort; the exchange's own deadlines come before it.
        record: for metrics.
        spans: for a timeline.
    """

    def __init__(
        self,
        name: str,
        progress: Progress,
        transfer: Transfer,
        wait: Wait,
        timeout_seconds: float,
        record: Recorder,
        spans: Spans | None = None,
    ) -> None:
        self.name = name
        self._progress = progress
        self._transfer: Transfer | None = transfer
        self._wait = wait
        self._timeout_seconds = timeout_seconds
        self._record = record
        self._spans = spans or Spans()
        self._pushed_ns = 0
        self._answers: deque[Answer | EncodedTensor | ZenPSError] = deque()
        self._finishing = threading.Lock()
        self._outcome: Tensor | Exception | None = None

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, done={self._progress.ended})"

    @property
    def step(self) -> int:
        """How many rounds of this tensor came before."""
        return self._progress.step

    @property
    def progress(self) -> Progress:
        """What becomes of this round."""
        return self._progress

    @property
    def has_ended(self) -> bool:
        """What :meth:`done` returns, without a look at what has arrived."""
        return self._progress.ended

    def done(self) -> bool:
        if not self._progress.ended:
            # Nobody may be driving: look once what has arrived.
            self._wait(lambda: self._progress.ended, time.monotonic() + LOOK_SECONDS)
        return self._progress.ended

    def wait(self) -> Tensor:
        with self._finishing:
            if self._outcome is None:
                assert self._transfer is not None
                self._outcome = self._finish(self._transfer)
                self._transfer = None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    # ── for the channel ─────────────────────────────────────────────────────────────────────────

    def pushed(self) -> None:
        """Every part is about to be pushed."""
        if self._spans.trace.is_on:
            self._pushed_ns = now_ns()

    def deliver(self, answer: Answer, last: bool) -> Round | None:
        """One part was answered. The result is a round to begin now, if any."""
        self._count(answer)
        self._answers.append(answer)
        self._progress.ended = last
        return None

    def restart(self, sent: EncodedTensor) -> None:
        """The ring has changed, and the round begins again as ``sent``. Not once it has ended."""
        self.pushed()
        self._progress.pushed_rows = self._progress.pulled_rows = self._progress.pulled_bytes = 0
        # The transfer belongs to the thread that waits, which may be absorbing an old answer just now: that
        # thread restarts it, before it takes the next. The queue is replaced, for if it were emptied even for
        # a moment, a thread that has been told of an answer would find none, and take that for the deadline.
        self._answers = deque([sent])

    def fail(self, error: ZenPSError) -> None:
        """The round will not be answered."""
        # Ranks may have got different parts of it, and must cut the next round alike.
        self._progress.pushed_rows = self._progress.pulled_rows = 0
        self._answers.append(error)
        self._progress.ended = True

    def _count(self, answer: Answer) -> None:
        server, result, frames = answer
        if self._spans.trace.is_on:
            about = _about(self.name, server, result, frames)
            self._spans.trace.since(self._pushed_ns, "pull", **about)
        self._progress.pushed_rows += result.pushed
        self._progress.pulled_rows += result.rows
        self._progress.pulled_bytes += sum([frame.nbytes for frame in frames])

    def _late(self) -> DeadlineError:
        return DeadlineError(f"tensor {self.name!r}: no answer within {self._timeout_seconds:g} s")

    def _finish(self, transfer: Transfer) -> Tensor | Exception:
        """Absorbs each answer while the next ones travel.

        An answer that could not be absorbed, for want of memory perhaps, is not there for a second wait.
        """
        waited = worked = 0.0
        until = time.monotonic() + self._timeout_seconds
        begin = time.perf_counter()
        while self._answers or not self._progress.ended:
            with self._spans("wait", self.name, self._progress.step):
                self._wait(self._has_answer, until)
            if not self._answers:
                self._progress.ended = True
                return self._late()
            answer = self._answers.popleft()
            got = time.perf_counter()
            waited += got - begin
            if isinstance(answer, ZenPSError):
                return answer
            try:
                if isinstance(answer, EncodedTensor):
                    transfer.restart(answer)
                    until = time.monotonic() + self._timeout_seconds
                else:
                    server, result, frames = answer
                    with self._spans("scatter", self.name, result.step) as span:
                        transfer.absorb(server, result.chunk, result, frames)
                        if span:
                            span.note(**_about(self.name, server, result, frames))
            except Exception as error:  # noqa: BLE001
                return error
            begin = time.perf_counter()
            worked += begin - got
        try:
            with self._spans("scatter", self.name, self._progress.step):
                result_tensor = transfer.finish()
        except Exception as error:  # noqa: BLE001
            return error
        self._record(transfer, self._progress, waited, worked + time.perf_counter() - begin)
        return result_tensor

    def _has_answer(self) -> bool:
        return bool(self._answers)


def _about(tensor: str, server: int, result: Result, frames: Sequence[memoryview]) -> dict[str, object]:
    """What a timeline says about an answer."""
    return {
        "tensor": tensor,
        "step": result.step,
        "chunk": result.chunk,
        "epoch": result.ring_epoch,
        "server": server,
        "rows": result.rows,
        "bytes": sum([frame.nbytes for frame in frames]),
    }
