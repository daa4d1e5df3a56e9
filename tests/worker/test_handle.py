from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from zenps.errors import DeadlineError
from zenps.wire.messages import Result
from zenps.worker.handle import Handle, Progress
from zenps.worker.transfer import Part, Transfer

PARTS = 3


class Count(Transfer):
    """A transfer whose result is the chunks that it absorbed, in order."""

    def __init__(self) -> None:
        self.parts = [Part(0, chunk, 1, 1, "none", (memoryview(b""),) * 2) for chunk in range(PARTS)]
        self.absorbed: list[int] = []

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        self.absorbed.append(chunk)

    def finish(self) -> Tensor:
        return torch.tensor(self.absorbed)


class Network:
    """Delivers one answer whenever somebody waits, but for the waits in which it fails."""

    def __init__(self, fails_at: dict[int, type[BaseException] | None]) -> None:
        self.progress = Progress(0)
        self.handle = Handle("a", self.progress, Count(), self.wait, 0.2, lambda *_: None)
        self._fails_at = fails_at
        self._waits = 0
        self._chunk = 0

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        self._waits += 1
        if self._waits in self._fails_at:
            error = self._fails_at[self._waits]
            if error is not None:
                raise error
            return
        answer = (0, Result("a", 0, self._chunk, 1, "none"), ())
        self._chunk += 1
        self.handle.deliver(answer, last=self._chunk == PARTS)


def test_every_answer_is_absorbed_once_and_the_result_kept() -> None:
    handle = Network({}).handle
    first = handle.wait()
    assert first.tolist() == [0, 1, 2]
    assert handle.wait() is first


def test_a_wait_that_was_interrupted_goes_on_where_it_was() -> None:
    handle = Network({2: KeyboardInterrupt}).handle
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.wait().tolist() == [0, 1, 2]


def test_a_wait_without_answer_ends_and_frees_the_name() -> None:
    network = Network({2: None})
    with pytest.raises(DeadlineError, match=r"tensor 'a': no answer within 0\.2 s"):
        network.handle.wait()
    assert network.progress.ended
