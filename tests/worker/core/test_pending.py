from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from signal import SIGINT
from typing import Literal

import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

import zenps as zps
from zenps.errors import ConfigError, DeadlineError, ProtocolError, TensorError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.messages import Result
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Counted, Progress, Report, Statistics
from zenps.worker.core.transfer import (
    Answer,
    EncodedChunk,
    EncodedTensor,
    Sharding,
    SuppliedTransfer,
    Transfer,
    Transform,
)
from zenps.worker.core.waiting import Notifier, Waiter, Waiting

CHUNKS = 3
ENCODED = EncodedTensor("dense", torch.Size([CHUNKS]), torch.float32, 1, 0, Sharding(None, CHUNKS, 0), [])
FRAMES = (memoryview(b"1234"),)


class Count(Transfer):
    """A transfer of one round, whose result is the chunks that it absorbed, in order."""

    def __init__(self) -> None:
        self.absorbed: list[int] = []
        self.log: list[int | str] = []

    def begin(self) -> Sequence[EncodedTensor]:
        return (ENCODED,)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        self.absorbed.append(answer.result.chunk)
        self.log.append(answer.result.chunk)
        return ()

    def restart(self, encoded: EncodedTensor) -> None:
        self.absorbed.clear()
        self.log.append("restart")

    def finish(self) -> Tensor:
        return torch.tensor(self.absorbed)

    def report(self, progress: Progress) -> Report:
        return Report(pushed_bytes=len(self.absorbed), pulled_bytes=progress.pulled_bytes)


def make_pending(
    transfer: Transfer,
    waiter: Waiter,
    timeout_seconds: float = 20.0,
    *,
    transforms: Sequence[Transform] = (),
    counted: Counted = "round",
) -> Pending:
    statistics = Statistics(WorkerMetrics(CollectorRegistry()))
    waiting = Waiting(waiter, timeout_seconds, statistics, Spans())
    return Pending("a", Options(), transfer, Progress(0), waiting, transforms, counted)


class Driver(Waiter):
    """A waiter that brings things itself. Its tests say to which result."""

    pending: Pending

    def poll(self, ready: Callable[[], bool]) -> None:
        """Nothing comes without a wait."""


class Network(Driver):
    """Delivers one answer whenever somebody waits, but for the waits in which it fails."""

    def __init__(self, fails_at: dict[int, type[BaseException] | None]) -> None:
        self.pending = begun(make_pending(Count(), self, 0.2))
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
        self.pending.deliver(answer(chunk), last=self._chunk == CHUNKS)


def begun(pending: Pending) -> Pending:
    assert pending.begin() == (ENCODED,)
    return pending


def answer(chunk: int, epoch: int = 1) -> Answer:
    return Answer(0, Result(epoch, "a", 0, chunk, 1, "none", 3), FRAMES)


def test_every_answer_is_absorbed_once_and_the_result_kept() -> None:
    pending = Network({}).pending
    transfer = weakref.ref(pending.transfer)
    first = pending.wait()
    assert first.tolist() == [0, 1, 2]
    assert pending.wait() is first
    assert transfer() is None, "who keeps a handle keeps only its result"


def test_asking_whether_it_is_done_receives_what_has_come() -> None:
    class Arrived(Driver):
        def wait(self, ready: Callable[[], bool], until: float) -> None:
            raise AssertionError("nothing to wait for")

        def poll(self, ready: Callable[[], bool]) -> None:
            for chunk in range(CHUNKS):
                self.pending.deliver(answer(chunk), last=chunk == CHUNKS - 1)

    driver = Arrived()
    driver.pending = begun(make_pending(Count(), driver))
    assert driver.pending.done()


def test_threads_that_wait_at_once_finish_a_transfer_once(notifier: Notifier) -> None:
    calls = threading.Semaphore(0)

    class Slow(SuppliedTransfer):
        def finish(self) -> Tensor:
            calls.release()
            time.sleep(0.1)
            return super().finish()

    pending = make_pending(Slow(), notifier)
    pending.begin()
    pending.complete(torch.ones(3))
    with ThreadPoolExecutor(2) as threads:
        first, second = [threads.submit(pending.wait) for _ in range(2)]
        assert first.result() is second.result()
    assert calls.acquire(blocking=False)
    assert not calls.acquire(blocking=False)


def test_a_wait_that_was_interrupted_goes_on_where_it_was() -> None:
    pending = Network({2: KeyboardInterrupt}).pending
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert pending.wait().tolist() == [0, 1, 2]


class Adding(Count):
    """Writes later answers to the tensor that the first has made."""

    @cached_property
    def total(self) -> Tensor:
        return torch.zeros(1)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        self.total.add_(answer.result.chunk)
        return ()

    def finish(self) -> Tensor:
        return self.total


def test_a_wait_that_has_begun_in_inference_mode_may_end_outside() -> None:
    def interrupt(_: Pending) -> None:
        raise KeyboardInterrupt

    pending = Scripted(Adding(), delivers(1), interrupt, delivers(2, last=True)).pending
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        pending.wait()
    assert pending.wait().tolist() == [3]


def test_answers_that_another_thread_receives_in_inference_mode_may_be_followed_by_others() -> None:
    class Polled(Adding):
        absorbs_on = "poller"

    pending = begun(make_pending(Polled(), Notifier()))
    with torch.inference_mode():
        pending.deliver(answer(1), last=False)
    pending.deliver(answer(2), last=True)
    assert pending.wait().tolist() == [3]


def test_a_wait_without_answer_ends_and_frees_the_name() -> None:
    pending = Network({2: None}).pending
    with pytest.raises(DeadlineError, match=r"tensor 'a': no answer within 0\.2 s; see the logs"):
        pending.wait()
    assert pending.progress.ended


def test_answer_that_could_not_be_absorbed_fails_every_wait() -> None:
    class Full(Count):
        def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
            if not self.absorbed:
                self.absorbed.append(-1)
                raise MemoryError
            return super().on_answer(answer)

    pending = Scripted(Full(), delivers(0), delivers(1), delivers(2, last=True)).pending
    for _ in range(2):
        with pytest.raises(MemoryError):
            pending.wait()


@pytest.mark.parametrize("where", ["on_answer", "finish"])
def test_a_device_that_fails_is_an_error_of_zenps(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pending = Network({}).pending
    monkeypatch.setattr(pending.transfer, where, fail)
    for _ in range(2):
        with pytest.raises(TensorError, match="tensor 'a': CUDA out of memory") as raised:
            pending.wait()
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_answers_may_come_after_a_wait_that_has_failed() -> None:
    """The channel does not know of it, and must not fail for others."""
    pending = Scripted(Broken(), delivers(0)).pending
    with pytest.raises(ProtocolError):
        pending.wait()
    assert pending.deliver(answer(1), last=False) == ()
    pending.restart(ENCODED)
    assert pending.deliver(answer(2), last=True) == ()
    assert pending.progress.ended
    with pytest.raises(ProtocolError):
        pending.wait()


def test_the_last_answer_is_not_lost_that_comes_between_two_looks() -> None:
    """Another thread may deliver it after this one has found no answer, and before it asks for the end."""

    class Late(deque[Answer | EncodedTensor | ZenPSError]):
        looks = 0

        def __bool__(self) -> bool:
            is_filled = len(self) > 0
            self.looks += 1
            if self.looks == 1:
                pending.deliver(answer(0), last=True)
            return is_filled

    pending = Scripted(Count()).pending
    pending._answers = Late()
    assert pending.wait().tolist() == [0]


# ── outcomes ────────────────────────────────────────────────────────────────────────────────────


def outcomes(pending: Pending) -> dict[str, float]:
    (family,) = pending._waiting.statistics._metrics.rounds.collect()
    return {sample.labels["outcome"]: sample.value for sample in family.samples}


def without_answer() -> Pending:
    return Network({2: None}).pending


def not_absorbed() -> Pending:
    return Scripted(Broken(), delivers(0)).pending


def not_finished() -> Pending:
    class Unfinished(Count):
        def finish(self) -> Tensor:
            raise MemoryError

    return Scripted(Unfinished(), delivers(0, last=True)).pending


def brought() -> Pending:
    pending = begun(make_pending(Count(), Notifier()))
    pending.fail(DeadlineError("gone"))
    assert outcomes(pending)["failed"] == 1, "whether anybody waits or not"
    return pending


@pytest.mark.parametrize("make", [without_answer, not_absorbed, not_finished, brought])
def test_a_round_that_fails_is_counted_once(make: Callable[[], Pending]) -> None:
    pending = make()
    for _ in range(2):
        with pytest.raises((ZenPSError, MemoryError)):
            pending.wait()
        pending.fail(DeadlineError("gone"))
        assert outcomes(pending) == {"completed": 0, "failed": 1}


@pytest.mark.parametrize("counted", ["rows", "nothing"])
def test_a_failure_within_another_round_is_not_counted(counted: Counted) -> None:
    pending = begun(make_pending(Count(), Notifier(), 0.0, counted=counted))
    with pytest.raises(DeadlineError):
        pending.wait()
    assert outcomes(pending) == {"completed": 0, "failed": 0}


def test_a_round_that_ends_twice_at_the_same_moment_has_one_outcome() -> None:
    """One thread supplies the result while another, which has yet to see that, fails the round."""

    class Both(SuppliedTransfer):
        def finish(self) -> Tensor:
            pending.progress.ended = False
            pending.fail(DeadlineError("gone"))
            return super().finish()

    pending = make_pending(Both(), Notifier())
    pending.complete(torch.ones(1))
    assert pending.wait().tolist() == [1]
    assert outcomes(pending) == {"completed": 0, "failed": 1}


# ── restart ─────────────────────────────────────────────────────────────────────────────────────


class Scripted(Driver):
    """Every wait does the next thing that its test says."""

    def __init__(self, transfer: Count, *script: Callable[[Pending], object]) -> None:
        self.pending = begun(make_pending(transfer, self))
        self.waited_until: list[float] = []
        self._script = iter(script)

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        self.waited_until.append(until)
        while not ready():
            next(self._script)(self.pending)


def delivers(chunk: int, last: bool = False) -> Callable[[Pending], object]:
    return lambda pending: pending.deliver(answer(chunk), last)


def restarts(pending: Pending) -> None:
    pending.restart(ENCODED)


def test_a_restart_between_two_answers_forgets_the_first() -> None:
    transfer = Count()
    pending = Scripted(transfer, delivers(0), restarts, delivers(1), delivers(2, last=True)).pending
    assert pending.wait().tolist() == [1, 2]
    assert transfer.log == [0, "restart", 1, 2]
    assert (pending.progress.pulled_rows, pending.progress.pulled_bytes) == (2, 8)
    assert pending.progress.pushed_rows == 6


def encoded_in(chunks: int) -> EncodedTensor:
    return structs.replace(
        ENCODED, chunks=[EncodedChunk(0, each, 1, 1, "none", ()) for each in range(chunks)]
    )


@pytest.mark.parametrize("absorbs_on", ["caller", "poller"])
def test_a_new_ring_may_have_other_numbers_of_chunks(
    notifier: Notifier, absorbs_on: Literal["caller", "poller"]
) -> None:
    class Resharded(Count):
        def begin(self) -> Sequence[EncodedTensor]:
            return (encoded_in(2),)

    Resharded.absorbs_on = absorbs_on
    pending = make_pending(Resharded(), notifier)
    pending.begin()
    pending.deliver(answer(1), last=False)
    pending.restart(encoded_in(1))
    pending.deliver(answer(0), last=True)
    assert pending.wait().tolist() == [0]


def test_answers_that_nobody_absorbed_before_a_restart_never_are() -> None:
    transfer = Count()

    def everything(pending: Pending) -> None:
        for step in (delivers(0), delivers(1), restarts, restarts, delivers(2, last=True)):
            step(pending)

    pending = Scripted(transfer, everything).pending
    assert pending.wait().tolist() == [2]
    assert transfer.log == ["restart", 2]
    assert (pending.progress.pulled_rows, pending.progress.pulled_bytes) == (1, 4)
    assert pending.progress.pushed_rows == 3


def test_waits_for_answers_are_counted_and_absorbing_them_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two answers, each is waited for; the time from the second to the end is no wait."""
    clock = [100.0]
    monkeypatch.setattr("zenps.worker.core.pending.time.perf_counter", lambda: clock[0])

    class Slow(Count):
        def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
            clock[0] += 16
            return super().on_answer(answer)

        def finish(self) -> Tensor:
            clock[0] += 64
            return super().finish()

    def waits(seconds: float, then: Callable[[Pending], object]) -> Callable[[Pending], object]:
        def wait(pending: Pending) -> None:
            clock[0] += seconds
            then(pending)

        return wait

    pending = Scripted(Slow(), waits(1, delivers(0)), waits(2, delivers(1, last=True))).pending
    pending.wait()
    assert (pending._waited_seconds, pending._worked_seconds) == (3, 2 * 16 + 64)
    ended = Scripted(Count(), waits(4, lambda pending: setattr(pending.progress, "ended", True))).pending
    ended._unabsorbed = 0
    ended.wait()
    assert ended._waited_seconds == 4, "a wait that ends without an answer"


def test_of_a_round_that_failed_no_rows_are_known() -> None:
    pending = Scripted(Count(), delivers(0), lambda pending: pending.fail(DeadlineError("gone"))).pending
    with pytest.raises(DeadlineError):
        pending.wait()
    assert (pending.progress.pushed_rows, pending.progress.pulled_rows) == (0, 0)


def test_an_error_after_the_last_answer_changes_nothing() -> None:
    pending = Scripted(Count()).pending
    pending.deliver(answer(0), last=True)
    pending.fail(DeadlineError("too late"))
    assert pending.wait().tolist() == [0]
    assert pending.progress.pulled_rows == 1


def test_a_restart_gives_the_answers_as_much_time_again() -> None:
    scripted = Scripted(Count(), delivers(0), restarts, delivers(1, last=True))
    scripted.pending.wait()
    first, second, third = scripted.waited_until
    assert first == second < third


class Slow(Count):
    """Absorbs until its test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        self.began.set()
        assert self.go_on.wait(20)
        return super().on_answer(answer)


class Polling(Waiter):
    """Looks again and again for what other threads bring."""

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        while not ready() and time.monotonic() < until:
            time.sleep(0.001)

    def poll(self, ready: Callable[[], bool]) -> None: ...


def test_a_restart_while_another_thread_absorbs_neither_waits_nor_disturbs_it() -> None:
    transfer, results = Slow(), list[list[int]]()
    pending = begun(make_pending(transfer, Polling()))
    thread = threading.Thread(target=lambda: results.append(pending.wait().tolist()))
    thread.start()
    pending.deliver(answer(0), last=False)
    assert transfer.began.wait(20)
    pending.restart(ENCODED)
    assert transfer.log == []
    pending.deliver(answer(1), last=True)
    transfer.go_on.set()
    thread.join(20)
    assert results == [[1]]
    assert transfer.log == [0, "restart", 1]


class Broken(Count):
    """Its device cannot compute the new layout, nor decode any answer."""

    def restart(self, encoded: EncodedTensor) -> None:
        raise ConfigError("sync.table_bytes", 0, "more")

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        raise ProtocolError("payload", "damaged")


@pytest.mark.parametrize(("step", "expected"), [(restarts, ConfigError), (delivers(0), ProtocolError)])
def test_an_error_ends_the_wait_and_a_later_restart_changes_nothing(
    step: Callable[[Pending], object], expected: type[ZenPSError]
) -> None:
    pending = Scripted(Broken(), step).pending
    for _ in range(2):
        with pytest.raises(expected):
            pending.wait()
        pending.restart(ENCODED)


# ── several rounds ──────────────────────────────────────────────────────────────────────────────


class Streams(Count):
    """Two streams, the first of which has a second phase. Answers are absorbed as they come."""

    absorbs_on = "poller"

    def begin(self) -> Sequence[EncodedTensor]:
        return (ENCODED, ENCODED)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        super().on_answer(answer)
        return (ENCODED,) if self.absorbed == [0] else ()


def test_what_is_pushed_upon_an_answer_belongs_to_the_result() -> None:
    transfer = Streams()
    pending = make_pending(transfer, Polling())
    assert len(pending.begin()) == 2
    assert len(pending.deliver(answer(0), last=True)) == 1
    assert transfer.absorbed == [0], "no thread has to wait for that"
    assert not pending.deliver(answer(1), last=True)
    assert not pending.done()
    assert not pending.deliver(answer(0), last=True)
    assert pending.done()
    assert pending.wait().tolist() == [0, 1, 0]
    assert (pending.progress.pulled_rows, pending.progress.pulled_bytes) == (3, 12)


def test_a_restart_of_streams_is_seen_at_once_and_forgets_no_answer() -> None:
    transfer = Streams()
    pending = make_pending(transfer, Polling())
    pending.begin()
    pending.deliver(answer(0), last=True)
    pending.restart(structs.replace(ENCODED, kind="dense"))
    assert transfer.log == [0, "restart"]
    assert pending.progress.pulled_rows == 1


class Seldom(Driver):
    """Delivers an answer in each of the first ``waits``."""

    def __init__(self, waits: int) -> None:
        self.pending = make_pending(Streams(), self, 0.2)
        self.pending.begin()
        self._chunks = iter(range(waits))

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        for chunk in self._chunks:
            self.pending.deliver(answer(chunk), last=True)
            return


def test_a_wait_goes_on_as_long_as_answers_come() -> None:
    assert Seldom(3).pending.wait().tolist() == [0, 1, 2]


def test_a_wait_goes_on_when_the_time_of_a_server_begins_anew() -> None:
    """It refused a push and takes it now, or the ring has changed."""

    class Restarting(Seldom):
        def wait(self, ready: Callable[[], bool], until: float) -> None:
            if calls:
                calls.pop()()
            else:
                super().wait(ready, until)

    restarting = Restarting(3)
    pending = restarting.pending
    calls = [pending.restart_timeout, lambda: pending.restart(structs.replace(ENCODED, kind="dense"))]
    assert pending.wait().tolist() == [0, 1, 2]


def test_a_wait_that_begins_anew_does_so_also_if_an_answer_comes_with_it() -> None:
    """The answer to one chunk, while a server begins to count anew for another."""

    class Restarting(Driver):
        def __init__(self) -> None:
            self.pending = make_pending(Count(), self, 0.2)
            self.pending.begin()
            self.until: list[float] = []

        def wait(self, ready: Callable[[], bool], until: float) -> None:
            self.until.append(until)
            time.sleep(0.001)
            if len(self.until) == 1:
                self.pending.restart_timeout()
            self.pending.deliver(answer(len(self.until) - 1), last=len(self.until) == 2)

    restarting = Restarting()
    assert restarting.pending.wait().tolist() == [0, 1]
    first, second = restarting.until
    assert second > first


@pytest.mark.parametrize("waits", [0, 2])
def test_a_wait_ends_when_no_more_answers_come(waits: int) -> None:
    pending = Seldom(waits).pending
    with pytest.raises(DeadlineError, match=r"tensor 'a': no answer within 0\.2 s; see the logs"):
        pending.wait()
    assert pending.progress.ended


def test_an_answer_to_streams_that_is_wrong_is_the_drivers_to_report() -> None:
    class Hostile(Streams):
        def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
            raise ProtocolError("payload", "damaged")

    pending = make_pending(Hostile(), Polling())
    pending.begin()
    with pytest.raises(ProtocolError) as raised:
        pending.deliver(answer(0), last=True)
    pending.fail(raised.value)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="damaged"):
            pending.wait()
    assert (pending.progress.pushed_rows, pending.progress.pulled_rows) == (0, 0)


# ── a result that another thread brings ─────────────────────────────────────────────────────────


@pytest.fixture
def notifier() -> Notifier:
    return Notifier()


def after(seconds: float, call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    return timer


def test_a_result_that_is_brought_wakes_all_who_wait(notifier: Notifier) -> None:
    pending = make_pending(SuppliedTransfer(), notifier)
    assert not pending.begin()
    assert not pending.done()
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(pending.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    result = torch.ones(3)
    pending.complete(result)
    notifier.notify()
    for thread in threads:
        thread.join(20)
    assert [each is result for each in results] == [True] * 3
    assert pending.done()


def test_an_error_that_is_brought_is_raised_by_every_wait(notifier: Notifier) -> None:
    pending = make_pending(SuppliedTransfer(), notifier)

    def fail() -> None:
        pending.fail(DeadlineError("gone"))
        notifier.notify()

    after(0.05, fail)
    for _ in range(2):
        with pytest.raises(DeadlineError, match="gone"):
            pending.wait()
    pending.complete(torch.ones(3))
    with pytest.raises(DeadlineError, match="gone"):
        pending.wait()


@pytest.mark.parametrize("wait", [Pending.wait, zps.synchronize])
def test_who_drops_a_handle_and_its_error_keeps_nothing(
    wait: Callable[[Pending], Tensor], notifier: Notifier
) -> None:
    transfer = SuppliedTransfer()
    is_kept, pending = weakref.ref(transfer), make_pending(transfer, notifier)
    del transfer
    pending.fail(DeadlineError("gone"))
    gc.disable()
    try:
        for _ in range(2):
            with contextlib.suppress(DeadlineError):
                wait(pending)
        assert is_kept() is not None
        del pending
        assert is_kept() is None
    finally:
        gc.enable()


def test_of_results_and_errors_the_first_counts(notifier: Notifier) -> None:
    pending = make_pending(SuppliedTransfer(), notifier)
    first = torch.ones(3)
    pending.complete(first)
    pending.complete(torch.zeros(3))
    pending.fail(DeadlineError("too late"))
    assert pending.wait() is first
    pending.complete(torch.zeros(3))
    assert pending.wait() is first


@pytest.mark.parametrize("end", ["result", "error", "deadline", "answer", "before"])
def test_whoever_asks_is_told_once_that_a_round_has_ended(end: str, notifier: Notifier) -> None:
    told: list[str] = []
    transfer = Count() if end == "answer" else SuppliedTransfer()
    pending = make_pending(transfer, notifier, 0.05)
    if end == "before":
        pending.complete(torch.ones(1))
    pending.call_at_end(lambda: told.append("ended" if pending.has_ended else "in flight"))
    match end:
        case "result":
            pending.complete(torch.ones(1))
        case "error":
            pending.fail(TensorError("planted"))
        case "deadline":
            with pytest.raises(DeadlineError):
                pending.wait()
        case "answer":
            begun(pending)
            for chunk in range(CHUNKS):
                assert not told
                pending.deliver(answer(chunk), last=chunk == CHUNKS - 1)
    assert told == ["ended"]
    pending.fail(TensorError("planted"))
    assert told == ["ended"]


def test_what_nobody_brings_ends_at_the_deadline(notifier: Notifier) -> None:
    pending = make_pending(SuppliedTransfer(), notifier, 0.05)
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match=r"tensor 'a': no answer within 0\.05 s"):
        pending.wait()
    assert 0.05 <= time.monotonic() - begin < 5
    pending.complete(torch.ones(3))
    with pytest.raises(DeadlineError):
        pending.wait()


def test_what_is_there_already_takes_no_time(notifier: Notifier) -> None:
    pending = make_pending(SuppliedTransfer(torch.ones(3)), notifier, 0.0)
    pending.progress.ended = True
    assert pending.done()
    assert pending.wait().tolist() == [1.0] * 3


def test_news_that_ended_nothing_wake_nobody(notifier: Notifier) -> None:
    """All results of a thread share its notifier."""
    pending = make_pending(SuppliedTransfer(), notifier)
    for seconds in (0.01, 0.02, 0.03):
        after(seconds, notifier.notify)

    def bring() -> None:
        pending.complete(torch.ones(3))
        notifier.notify()

    after(0.1, bring)
    assert pending.wait().tolist() == [1.0] * 3


def test_a_notifier_waits_for_ever_if_it_has_to(notifier: Notifier) -> None:
    answers: Iterator[bool] = iter([False, True])
    after(0.02, notifier.notify)
    notifier.wait(lambda: next(answers), float("inf"))
    assert list(answers) == [], "it asked once before it waited, and once after"


# ── transforms and statistics ───────────────────────────────────────────────────────────────────


class Add(Transform):
    """Takes off again what it has added."""

    def __init__(self, summand: int) -> None:
        self._summand = summand

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor + self._summand

    def undo(self, result: Tensor) -> Tensor:
        return result * 10 + self._summand


def test_transforms_are_undone_in_reverse_order(notifier: Notifier) -> None:
    pending = make_pending(SuppliedTransfer(), notifier, transforms=(Add(1), Add(2)))
    pending.complete(torch.zeros(1))
    assert pending.wait().tolist() == [21.0]
    assert pending.wait().tolist() == [21.0]


def test_a_result_that_cannot_be_undone_is_an_error_of_every_wait(notifier: Notifier) -> None:
    class Refuses(Add):
        def undo(self, result: Tensor) -> Tensor:
            raise ProtocolError("payload", "elements that make no whole rows")

    pending = make_pending(SuppliedTransfer(), notifier, transforms=(Refuses(1),))
    pending.complete(torch.zeros(1))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="no whole rows"):
            pending.wait()


@pytest.mark.parametrize(("counted", "rounds"), [("round", 1), ("rows", 0), ("nothing", 0)])
def test_a_round_is_counted_once_when_its_result_is_there(counted: Counted, rounds: int) -> None:
    pending = make_pending(Count(), Polling(), counted=counted)
    pending.begin()
    pending.deliver(answer(0), last=True)
    statistics = pending._waiting.statistics
    assert statistics.stats.rounds == 0
    for _ in range(2):
        pending.wait()
    stats = statistics.stats
    assert (stats.rounds, stats.pushed_bytes, stats.pulled_bytes) == (rounds, rounds, 4 * rounds)
    assert pending.report == Report(pushed_bytes=1, pulled_bytes=4)
    assert (stats.work_seconds > 0) == (counted != "nothing")


def test_rounds_that_fail_are_not_counted() -> None:
    pending = Scripted(Broken(), delivers(0)).pending
    with pytest.raises(ProtocolError):
        pending.wait()
    assert pending._waiting.statistics.stats.rounds == 0


class InterruptedOnce(Transform):
    """Whose ``undo`` is interrupted, as by Ctrl-C, the first time."""

    def __init__(self) -> None:
        self._is_first = True

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor

    def undo(self, result: Tensor) -> Tensor:
        if self._is_first:
            self._is_first = False
            raise KeyboardInterrupt
        return result + 1


class FinishedOnce(Count):
    """Which lets go of its parts as it finishes."""

    def finish(self) -> Tensor:
        assert self.absorbed
        result = super().finish()
        self.absorbed.clear()
        return result


def test_an_interrupt_while_a_transform_is_undone_loses_no_result() -> None:
    pending = begun(make_pending(FinishedOnce(), Notifier(), transforms=[InterruptedOnce()]))
    for chunk in range(CHUNKS):
        pending.deliver(answer(chunk), last=chunk == CHUNKS - 1)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert pending.wait().tolist() == [1, 2, 3]


class WithChunks(Count):
    """Which has pushed chunks, and is interrupted, as by Ctrl-C, while it absorbs the answer to one."""

    def begin(self) -> Sequence[EncodedTensor]:
        chunk = EncodedChunk(0, 0, 1, 1, "none", FRAMES)
        return (structs.replace(ENCODED, chunks=[chunk] * CHUNKS),)

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        if answer.result.chunk == 1:
            raise KeyboardInterrupt
        return super().on_answer(answer)


def test_an_interrupt_while_an_answer_is_absorbed_gives_no_incomplete_result() -> None:
    pending = make_pending(WithChunks(), Notifier())
    pending.begin()
    for chunk in range(CHUNKS):
        pending.deliver(answer(chunk), last=chunk == CHUNKS - 1)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"tensor 'a': an interrupt has lost 1 answer\(s\)"):
            pending.wait()


class Pressed(WithChunks):
    """Ctrl-C comes while it absorbs an answer."""

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        os.kill(os.getpid(), SIGINT)
        return Count.on_answer(self, answer)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_answers_are_absorbed_waits_until_they_are() -> None:
    pending = make_pending(Pressed(), Notifier())
    pending.begin()
    for chunk in range(CHUNKS):
        pending.deliver(answer(chunk), last=chunk == CHUNKS - 1)
    for _ in range(CHUNKS):  # each wait is interrupted once it has absorbed one more
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
    assert pending.wait().tolist() == [0, 1, 2]


def test_an_answer_that_an_interrupt_has_kept_from_coming_is_missed() -> None:
    pending = make_pending(WithChunks(), Notifier())
    pending.begin()
    pending.deliver(answer(2), last=True)
    with pytest.raises(UsageError, match=r"an interrupt has lost 2 answer\(s\)"):
        pending.wait()
