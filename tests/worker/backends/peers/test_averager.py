"""Averages of models in groups: what callers get and what is counted, and how the averager ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.worker.backends.test_negotiated_rounds import Silent, TwoWorkers
from tests.worker.local_group import DEADLINE_SECONDS, on_all_ranks
from zenps.config.sources import load
from zenps.errors import DeadlineError, MismatchError, PeerLostError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.backends.base import Session
from zenps.worker.backends.peers.averager import GroupAverager
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Statistics
from zenps.worker.transport.peer_group import Group, GroupError

PAIR = [((0, 1),)]
"""Two ranks, together in all steps."""


class Held(TwoWorkers):
    """A lease that ends if the test says so."""

    def __init__(self, loss: ZenPSError | None = None) -> None:
        super().__init__()
        self._loss = loss

    def await_loss(self, is_over: Callable[[], bool] = lambda: False) -> ZenPSError | None:
        return self._loss


class Unanswered(Group):
    """Of rank 0 of 2: the other one never comes."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.waits, self.aborted = threading.Event(), threading.Event()

    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        self.waits.set()
        assert self.aborted.wait(DEADLINE_SECONDS)
        raise GroupError(1, "gone")

    def post(self, send: Mapping[int, Tensor]) -> None: ...
    def allreduce(self, tensor: Tensor) -> None: ...
    def abort(self) -> None:
        self.aborted.set()


class Averager(GroupAverager):
    def __init__(
        self, group: Group, seconds: float = DEADLINE_SECONDS, loss: ZenPSError | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.lease, self.metrics = Held(loss), WorkerMetrics(self.registry)
        self.statistics = Statistics(self.metrics)
        config = load(sets=["cluster.workers=2", f"cluster.deadline_seconds={seconds}"], environ={}).config
        session = Session(config, self.lease, Silent(), self.statistics, self.metrics, Spans())
        super().__init__(session, group, PAIR)


@pytest.fixture
def unanswered() -> Iterator[Unanswered]:
    group = Unanswered()
    yield group
    group.abort()


def test_each_step_is_counted_once_however_many_models_there_are() -> None:
    """A resumed job begins with a later one."""

    def run(group: Group) -> tuple[list[list[float]], Averager]:
        averager = Averager(group)
        models = [torch.full((3,), 2.0 * group.rank), torch.full((2,), 4.0 * group.rank)]
        for step in (100, 101, 102):
            for name, model in zip("ab", models, strict=True):
                averager.settle()
                averager.average(name, step, [model])
                assert averager.lease.wait_sources[0]() is None
        averager.close()
        assert not averager._thread.is_alive()
        return [model.tolist() for model in models], averager

    for models, averager in on_all_ranks(2, run):
        assert models == [[1.0] * 3, [2.0] * 2]
        assert averager.metrics.steps.total == 3
        sent = 3 * (2 * 16 + 4 * (3 + 2))
        assert averager.metrics.push_bytes.total == sent
        assert averager.statistics.stats.peer_rounds == 6
        assert averager.statistics.stats.dense_bytes == 3 * 2 * 4 * (3 + 2)
        assert averager.statistics.load().items() >= {"group": 0, "group_size": 2, "distance": 0.0}.items()
        with pytest.raises(UsageError, match="has left the cluster"):
            averager.average("a", 103, [torch.ones(1)])


def test_models_of_other_steps_end_the_job() -> None:
    def run(group: Group) -> list[str]:
        averager = Averager(group)
        found = []
        for step in range(2):
            with pytest.raises(MismatchError) as error:
                averager.average("a", step + group.rank, [torch.ones(3)])
            found.append(str(error.value))
        averager.close()
        return found

    for rank, (first, second) in enumerate(on_all_ranks(2, run)):
        assert f"step {rank} here averages with step {1 - rank} of rank {1 - rank}" in first == second


def test_a_rank_that_comes_too_late_is_named_and_waited_for_no_more(unanswered: Unanswered) -> None:
    averager = Averager(unanswered, seconds=0.2)
    late = r"model 'a', step 3: not averaged with rank\(s\) 1: .* 0.2 s; .*; see their logs"
    for failed, step in enumerate((3, 4), start=1):
        with pytest.raises(DeadlineError, match=late):
            averager.average("a", step, [torch.ones(3)])
        assert averager.registry.get_sample_value("zenps_rounds_total", {"outcome": "failed"}) == failed
        assert unanswered.aborted.is_set()
        assert averager.lease.wait_sources[0]() is None
    averager.close()


def test_a_rank_that_is_late_for_an_interrupted_average_is_waited_for_no_more(
    unanswered: Unanswered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The averager's thread uses the model as long as it waits for that rank."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    averager = Averager(unanswered, seconds=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(averager._notifier, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            averager.average("a", 3, [torch.ones(3)])
    with pytest.raises(DeadlineError, match=r"model 'a', step 3: not averaged with rank\(s\) 1: "):
        averager.settle()
    assert unanswered.aborted.is_set()
    with pytest.raises(DeadlineError, match="step 3"):
        averager.average("a", 4, [torch.ones(3)])
    averager.close()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_comes_with_the_deadline_leaves_no_average_behind(
    unanswered: Unanswered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    averager = Averager(unanswered)
    monkeypatch.setattr(averager._notifier, "wait", wait)  # as at the deadline
    with pytest.raises(KeyboardInterrupt):
        averager.average("a", 3, [torch.ones(3)])
    assert unanswered.aborted.is_set()
    averager.close()


@pytest.mark.usefixtures("interruptible")
def test_an_average_that_is_interrupted_as_it_begins_has_begun(
    unanswered: Unanswered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next step would wait for it, and nobody would end it."""
    averager = Averager(unanswered)
    monkeypatch.setattr(averager, "_note_step", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        averager.average("a", 3, [torch.ones(3)])
    assert unanswered.waits.wait(DEADLINE_SECONDS)
    averager.close()


LOST = PeerLostError("worker 1 is lost")


@pytest.mark.parametrize(
    ("loss", "end", "message"),
    [
        (LOST, lambda averager: averager._group.abort(), "worker 1 is lost"),
        (
            None,
            lambda averager: averager._group.abort(),
            r"the exchange with worker 1 \(host box, pid 50\) has failed: gone; see their logs",
        ),
        (None, lambda averager: averager.lease.ended.set_exception(LOST), "worker 1 is lost"),
        (LOST, lambda averager: averager.close(), "this worker has left the cluster"),
    ],
    ids=["lost", "silent", "lease", "left"],
)
def test_a_wait_ends_with_the_reason(
    loss: ZenPSError | None, end: Callable[[Averager], None], message: str, unanswered: Unanswered
) -> None:
    averager = Averager(unanswered, loss=loss)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(averager.average, "a", 2, [torch.ones(3)])
        assert unanswered.waits.wait(DEADLINE_SECONDS)
        assert (wait := averager.lease.wait_sources[0]()) is not None
        assert wait[0] == "models of rank(s) 1, step 2"
        end(averager)
        with pytest.raises(ZenPSError, match=message):
            waiting.result(DEADLINE_SECONDS)
    with pytest.raises(ZenPSError, match=message):
        averager.average("a", 3, [torch.ones(3)])
    averager.close()
