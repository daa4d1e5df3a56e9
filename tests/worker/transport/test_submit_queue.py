"""The submission queue: tensors that wait for their device."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.errors import PeerLostError, TensorError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.core.interrupts import MASK
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Report, Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.core.transfer import Answer, EncodedTensor, Transfer
from zenps.worker.core.waiting import Notifier, Ready, Waiting
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.submit_queue import SubmitQueue


class Slow(Transfer):
    """Prepared when its test says so."""

    is_staged = True

    def __init__(self, error: ZenPSError | None = None) -> None:
        self.rows_given = 0
        self.ready = False
        self.error = error

    def prepared(self) -> bool:
        if self.ready and self.error:
            raise self.error
        return self.ready

    def begin(self) -> Sequence[EncodedTensor]:
        raise AssertionError

    def on_answer(self, answer: Answer) -> Sequence[EncodedTensor]:
        raise AssertionError

    def restart(self, encoded: EncodedTensor) -> None:
        raise AssertionError

    def finish(self) -> Tensor:
        raise AssertionError

    def report(self, progress: Progress) -> Report:
        raise AssertionError


class OnTheCpu(Slow):
    """Never asked whether it is prepared."""

    is_staged = False

    def prepared(self) -> bool:
        raise AssertionError


class Submitted(Channel):
    """Notes the names of what is pushed, and how it is waited for."""

    failure: ZenPSError | None = None

    def __init__(self) -> None:
        self.names: list[str] = []

    def submit(self, pending: Pending) -> None:
        if pending.name == "too large":
            raise RuntimeError("can't allocate memory")  # as torch does
        self.names.append(pending.name)

    def wait(self, ready: Ready, until: float) -> None:
        self.names.append(f"wait {until:g}")

    def poll(self, ready: Ready = lambda: False) -> None:
        self.names.append("poll")


class Queue:
    """A queue before a channel that pushes nothing."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics = WorkerMetrics(self.registry)
        self.steps = Steps(metrics.steps)
        self.channel = Submitted()
        self.queue = SubmitQueue(self.channel, self.steps, Spans())
        self._waiting = Waiting(Notifier(), 0.0, Statistics(metrics), Spans())

    @property
    def pushed(self) -> list[str]:
        return self.channel.names

    @property
    def failed(self) -> float | None:
        return self.registry.get_sample_value("zenps_rounds_total", {"outcome": "failed"})

    def submit(self, name: str, transfer: Transfer) -> Pending:
        pending = Pending(name, Options(), transfer, self.steps.begin(name, 1), self._waiting)
        self.queue.submit(pending)
        return pending


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_a_tensor_that_is_prepared_is_pushed_at_once(queue: Queue) -> None:
    transfer = Slow()
    transfer.ready = True
    queue.submit("a", transfer)
    assert queue.pushed == ["a"]


def test_a_tensor_on_the_cpu_is_pushed_at_once(queue: Queue) -> None:
    queue.submit("waits", Slow())
    queue.submit("a", OnTheCpu())
    assert queue.pushed == ["a"]


def test_tensors_are_pushed_in_order(queue: Queue) -> None:
    transfers = [Slow() for _ in range(3)]
    for number, transfer in enumerate(transfers):
        queue.submit(str(number), transfer)
    transfers[1].ready = True
    queue.queue.advance(0)
    assert queue.pushed == []
    transfers[0].ready = True
    queue.queue.advance(0)
    assert queue.pushed == ["0", "1"]
    transfers[2].ready = True
    queue.queue.advance(0)
    assert queue.pushed == ["0", "1", "2"]


def test_a_tensor_that_is_prepared_overtakes_one_that_is_not(queue: Queue) -> None:
    transfer = Slow()
    queue.submit("waits", Slow())
    transfer.ready = True
    queue.submit("a", transfer)
    assert queue.pushed == ["a"]


def test_whatever_is_submitted_pushes_what_has_become_ready(queue: Queue) -> None:
    slow, ready = Slow(), Slow()
    queue.submit("slow", slow)
    slow.ready = ready.ready = True
    queue.submit("ready", ready)
    assert sorted(queue.pushed) == ["ready", "slow"]


def test_a_tensor_that_fails_does_not_hold_up_the_next(queue: Queue) -> None:
    error = TensorError("indices outside")
    bad, good = Slow(error), Slow()
    failed = queue.submit("bad", bad)
    queue.submit("good", good)
    bad.ready = good.ready = True
    queue.queue.advance(0)
    assert queue.pushed == ["good"]
    with pytest.raises(TensorError) as raised:
        failed.wait()
    assert raised.value is error
    assert queue.failed == 1
    assert queue.steps.begin("bad", 1).step == 0, "nothing was pushed under its name"


def test_a_tensor_for_whose_push_memory_lacks_fails_alone(queue: Queue) -> None:
    """Whoever pushed another then took that for not pushed, and pushed the same step again."""
    slow = Slow()
    failed = queue.submit("too large", slow)
    slow.ready = True
    queue.submit("good", OnTheCpu())
    assert queue.pushed == ["good"]
    with pytest.raises(TensorError, match=r"^tensor 'too large': can't allocate memory$"):
        failed.wait()
    queue.queue.wait(lambda: True, 0.0)
    assert queue.steps.begin("too large", 1).step == 0, "nothing was pushed under its name"


def test_advance_waits_no_longer_than_it_may(queue: Queue) -> None:
    queue.submit("waits", Slow())
    begin = time.monotonic()
    queue.queue.advance(begin + 0.05)
    assert 0.05 <= time.monotonic() - begin < 10


def test_advance_returns_when_everything_is_pushed(queue: Queue) -> None:
    transfer = Slow()
    queue.submit("a", transfer)
    threading.Timer(0.05, lambda: setattr(transfer, "ready", True)).start()
    begin = time.monotonic()
    queue.queue.advance(begin + 20)
    assert queue.pushed == ["a"]
    assert time.monotonic() - begin < 10


def test_whoever_waits_pushes_all_before(queue: Queue) -> None:
    """Other ranks wait for these tensors."""
    transfers = [Slow(), Slow()]
    for number, transfer in enumerate(transfers):
        queue.submit(str(number), transfer)
    transfers[0].ready = True
    queue.queue.poll(lambda: False)
    assert queue.pushed == ["0", "poll"]
    until = time.monotonic() + 20
    threading.Timer(0.05, lambda: setattr(transfers[1], "ready", True)).start()
    queue.queue.wait(lambda: False, until)
    assert [each for each in queue.pushed if each != "poll"] == ["0", "1", f"wait {until:g}"]


def test_a_result_that_is_there_waits_for_no_device(queue: Queue) -> None:
    queue.submit("waits", Slow())
    queue.queue.wait(lambda: True, math.inf)
    assert queue.pushed == ["wait inf"]


def test_whoever_waits_for_a_device_reads_answers(queue: Queue) -> None:
    queue.submit("waits", Slow())
    queue.queue.wait(lambda: "poll" in queue.pushed, math.inf)
    assert queue.pushed == ["poll", "wait inf"]


def test_once_the_job_is_lost_no_tensor_waits_for_its_device(queue: Queue) -> None:
    """A kernel of NCCL, for instance, may wait for a lost rank for ever."""
    lost = PeerLostError("worker 1 was lost")
    pending = queue.submit("waits", Slow())
    threading.Timer(0.05, lambda: setattr(queue.channel, "failure", lost)).start()
    queue.queue.advance(math.inf)
    with pytest.raises(PeerLostError) as raised:
        pending.wait()
    assert raised.value is lost
    assert queue.failed == 1


def test_two_threads_push_a_tensor_once(queue: Queue) -> None:
    class Lengthy(Slow):
        def prepared(self) -> bool:
            time.sleep(0.05)
            return self.ready

    transfer = Lengthy()
    queue.submit("a", transfer)
    transfer.ready = True
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(queue.queue.advance, 0.0) for _ in range(2)]:
            each.result()
    assert queue.pushed == ["a"]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", [OnTheCpu, Slow])
def test_a_tensor_whose_submission_is_interrupted_is_not_pushed(queue: Queue, kind: type[Slow]) -> None:
    """Its step was taken back although it was pushed, so that servers kept the old values of that step."""
    is_held, may_end = threading.Event(), threading.Event()

    class Lengthy(Slow):
        def prepared(self) -> bool:
            if self.ready:
                is_held.set()
                assert may_end.wait(30)
            return self.ready

    before, transfer = Lengthy(), kind()
    queue.submit("before", before)
    before.ready = transfer.ready = True
    with ThreadPoolExecutor(1) as threads:
        advanced = threads.submit(queue.queue.advance, 0.0)
        assert is_held.wait(30)
        with MASK:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                queue.submit("a", transfer)
        may_end.set()
        advanced.result(30)
    queue.queue.advance(0.0)
    assert queue.pushed == ["before"]
