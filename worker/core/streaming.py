"""What an asynchronous call returns for a tensor in streams, where a round follows upon another's answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from zenps.errors import ZenPSError
from zenps.observe.clock import now_ns

from ..encode.blocks import BlockTransfer
from ..encode.gpu import StagedBlocks
from ..encode.transfer import EncodedChunk, EncodedTensor, Transfer
from ..rounds.states import Round
from .handle import Answer, Handle, Progress, Recorder, Wait
from .spans import Spans

NewRound = Callable[[int, EncodedChunk], Round]
"""Makes the round of a stream's phase, by its number and what is pushed."""


class StreamedHandle(Handle):
    """One tensor in flight, in streams.

    Answers are absorbed by whoever drives the channel: the other ranks' next phase waits for what this one
    pushes upon an answer, and here all threads may be waiting for another tensor.

    Args:
        new_round: of a phase.
    """

    def __init__(
        self,
        name: str,
        progress: Progress,
        transfer: BlockTransfer | StagedBlocks,
        new_round: NewRound,
        wait: Wait,
        timeout_seconds: float,
        record: Recorder,
        spans: Spans | None = None,
    ) -> None:
        super().__init__(name, progress, transfer, wait, timeout_seconds, record, spans)
        self._streamed = transfer
        self._new_round = new_round
        self._streams_left = transfer.plan.streams
        self._begun_ns = [0] * transfer.plan.streams
        """When the present phase of each was pushed, for a timeline."""
        self._absorbed = 0
        self._worked_seconds = 0.0

    def deliver(self, answer: Answer, last: bool) -> Round | None:
        """A phase of a stream was answered: the next one follows, if there is one.

        Raises:
            ProtocolError: the answer is none to what was pushed.
        """
        begin = time.perf_counter()
        server, result, frames = answer
        self._pushed_ns = self._begun_ns[result.chunk]
        self._count(answer)
        self._streamed.absorb(server, result.chunk, result, frames)
        following = self._push(result.chunk)
        if following is None:
            self._streams_left -= 1
            self._progress.ended = not self._streams_left
        self._absorbed += 1
        self._worked_seconds += time.perf_counter() - begin
        return following

    def restart(self, sent: EncodedTensor) -> None:
        """The ring has changed; a phase goes to another server, perhaps, and has no answer yet."""

    def begin(self) -> list[Round]:
        """The first phase of each stream, once the transfer is prepared."""
        rounds = [self._push(stream) for stream in range(self._streamed.plan.streams)]
        return [round_ for round_ in rounds if round_ is not None]

    def _push(self, stream: int) -> Round | None:
        if self._spans.trace.is_on:
            self._begun_ns[stream] = now_ns()
        pushed = self._streamed.push(stream)
        return None if pushed is None else self._new_round(*pushed)

    def _finish(self, transfer: Transfer) -> Tensor | Exception:
        begin = time.perf_counter()
        while not self._progress.ended:
            absorbed = self._absorbed
            with self._spans("wait", self.name, self._progress.step):
                self._wait(lambda: self._progress.ended, time.monotonic() + self._timeout_seconds)
            if self._absorbed == absorbed and not self._progress.ended:
                self._progress.ended = True
                return self._late()
        waited = time.perf_counter() - begin
        if self._answers:
            error = self._answers[0]
            assert isinstance(error, ZenPSError)
            return error
        result = transfer.finish()
        self._record(transfer, self._progress, waited, self._worked_seconds)
        return result
