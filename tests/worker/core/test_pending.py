from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from zenps.errors import ConfigError, DeadlineError, ProtocolError, ZenPSError
from zenps.wire.messages import Result
from zenps.worker.core.handle import Handle, Progress
from zenps.worker.core.transfer import EncodedTensor, Sharding, Transfer

PARTS = 3
SENT = EncodedTensor("dense", torch.Size([PARTS]), torch.float32, 1, 0, Sharding(None, PARTS, 0), [])
FRAMES = (memoryview(b""), memoryview(b"1234"))


class Count(Transfer):
    """A transfer whose result is the chunks that it absorbed, in order."""

    def __init__(self) -> None:
        self.sent = SENT
        self.absorbed: list[int] = []
        self.log: list[int | str] = []

    def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
        self.absorbed.append(chunk)
        self.log.append(chunk)

    def restart(self, sent: EncodedTensor) -> None:
        self.sent = sent
        self.absorbed.clear()
        self.log.append("restart")

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
        chunk, self._chunk = self._chunk, self._chunk + 1
        self.handle.deliver(answer(chunk), last=self._chunk == PARTS)


def answer(chunk: int, epoch: int = 1) -> tuple[int, Result, Sequence[memoryview]]:
    return 0, Result(epoch, "a", 0, chunk, 1, "none", 3), FRAMES


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


def test_answer_that_could_not_be_absorbed_fails_every_wait() -> None:
    class Full(Count):
        def absorb(self, server: int, chunk: int, result: Result, frames: Sequence[memoryview]) -> None:
            if not self.absorbed:
                self.absorbed.append(-1)
                raise MemoryError
            super().absorb(server, chunk, result, frames)

    handle = Scripted(Full(), delivers(0), delivers(1), delivers(2, last=True)).handle
    for _ in range(2):
        with pytest.raises(MemoryError):
            handle.wait()


# ── restart ─────────────────────────────────────────────────────────────────────────────────────


class Scripted:
    """A handle for which every wait does the next thing that its test says."""

    def __init__(self, transfer: Count, *script: Callable[[Handle], None]) -> None:
        self.progress = Progress(0)
        self.handle = Handle("a", self.progress, transfer, self.wait, 20, lambda *_: None)
        self.waited_until: list[float] = []
        self._script = iter(script)

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        self.waited_until.append(until)
        while not ready():
            next(self._script)(self.handle)


def delivers(chunk: int, last: bool = False) -> Callable[[Handle], None]:
    return lambda handle: handle.deliver(answer(chunk), last)


def restarts(handle: Handle) -> None:
    handle.restart(SENT)


def test_a_restart_between_two_answers_forgets_the_first() -> None:
    transfer = Count()
    scripted = Scripted(transfer, delivers(0), restarts, delivers(1), delivers(2, last=True))
    assert scripted.handle.wait().tolist() == [1, 2]
    assert transfer.log == [0, "restart", 1, 2]
    assert (scripted.progress.pulled_rows, scripted.progress.pulled_bytes) == (2, 8)
    assert scripted.progress.pushed_rows == 6


def test_answers_that_nobody_absorbed_before_a_restart_never_are() -> None:
    transfer = Count()

    def everything(handle: Handle) -> None:
        for step in (delivers(0), delivers(1), restarts, restarts, delivers(2, last=True)):
            step(handle)

    scripted = Scripted(transfer, everything)
    assert scripted.handle.wait().tolist() == [2]
    assert transfer.log == ["restart", 2]
    assert (scripted.progress.pulled_rows, scripted.progress.pulled_bytes) == (1, 4)
    assert scripted.progress.pushed_rows == 3


def test_of_a_round_that_failed_no_rows_are_known() -> None:
    scripted = Scripted(Count(), delivers(0), lambda handle: handle.fail(DeadlineError("gone")))
    with pytest.raises(DeadlineError):
        scripted.handle.wait()
    assert (scripted.progress.pushed_rows, scripted.progress.pulled_rows) == (0, 0)


def test_a_restart_gives_the_answers_as_much_time_again() -> None:
    scripted = Scripted(Count(), delivers(0), restarts, delivers(1, last=True))
    scripted.handle.wait()
    first, second, third = scripted.waited_until
    assert first == second < third


class Slow(Count):
    """Absorbs until its test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def absorb(self, *args: object) -> None:
        self.began.set()
        assert self.go_on.wait(20)
        super().absorb(*args)  # type: ignore[arg-type]


def test_a_restart_while_another_thread_absorbs_neither_waits_nor_disturbs_it() -> None:
    def wait(ready: Callable[[], bool], until: float) -> None:
        while not ready() and time.monotonic() < until:
            time.sleep(0.001)

    transfer, results = Slow(), list[list[int]]()
    handle = Handle("a", Progress(0), transfer, wait, 20, lambda *_: None)
    thread = threading.Thread(target=lambda: results.append(handle.wait().tolist()))
    thread.start()
    handle.deliver(answer(0), last=False)
    assert transfer.began.wait(20)
    handle.restart(SENT)
    assert transfer.log == []
    handle.deliver(answer(1), last=True)
    transfer.go_on.set()
    thread.join(20)
    assert results == [[1]]
    assert transfer.log == [0, "restart", 1]


class Broken(Count):
    """Its device cannot compute the new layout, nor decode any answer."""

    def restart(self, sent: EncodedTensor) -> None:
        raise ConfigError("sync.table_bytes", 0, "more")

    def absorb(self, *_: object) -> None:
        raise ProtocolError("payload", "damaged")


@pytest.mark.parametrize(("step", "expected"), [(restarts, ConfigError), (delivers(0), ProtocolError)])
def test_an_error_ends_the_wait_and_a_later_restart_changes_nothing(
    step: Callable[[Handle], None], expected: type[ZenPSError]
) -> None:
    handle = Scripted(Broken(), step).handle
    for _ in range(2):
        with pytest.raises(expected):
            handle.wait()
        handle.restart(SENT)
