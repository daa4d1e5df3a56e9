"""Supervisor without real processes or time: which end ends the job, with which code and when."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import pytest

from zenps.cli import supervisor
from zenps.cli.supervisor import Supervisor
from zenps.config.sources import load


class Clock:
    """A clock that advances only while the supervisor waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += 0.0 if seconds == float("inf") else seconds
        return False


class Worker:
    """A process that ends by ``end``; the supervisor notices it in its next turn."""

    is_worker = True

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.exit_code: int | None = None
        self.signals: dict[int, float] = {}
        self._clock = clock
        self._code: int | None = None

    def end(self, code: int) -> None:
        self._code = code

    def has_ended(self) -> bool:
        self.exit_code = self._code
        return self.exit_code is not None

    def how_it_ended(self) -> str:
        return f"exit code {self.exit_code}"

    def signal(self, number: int) -> None:
        self.signals.setdefault(number, self._clock.now)


def make_job(monkeypatch: pytest.MonkeyPatch, on_worker_loss: str) -> Any:
    """Two workers, of which worker 0 has left. The scheduler answers after 1 s: this, the state and epoch."""
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    sets = ["cluster.workers=2", f"cluster.on_worker_loss={on_worker_loss}"]
    job: Any = Supervisor(load(sets=sets, environ={}).config, [])
    job.clock, job.state, job.epoch = clock, "running", 1
    left = [SimpleNamespace(role="worker", rank=0, state="left", silent_seconds=1.0, host="", pid=0)]
    job._address = b"host:1\n"
    job._processes = [Worker(name, clock) for name in ("worker 0", "worker 1")]
    job._read = clock.wait
    job._ask = lambda question: (
        clock.wait(1.0) or SimpleNamespace(state=job.state, epoch=job.epoch, nodes=left)
    )
    return job


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A job that ends with the first worker that fails."""
    job = make_job(monkeypatch, "fail")
    yield job
    job.close()


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A job that continues without a worker that is gone."""
    job = make_job(monkeypatch, "continue")
    yield job
    job.close()


def test_settling_is_part_of_the_grace(failing: Any) -> None:
    settling, failed = failing._processes
    began = failing.clock.now
    failed.end(1)
    failing._turn()
    assert settling.signals[signal.SIGTERM] == pytest.approx(began + supervisor.SETTLE_SECONDS, abs=0.1)
    failing._turn()
    assert settling.signals[signal.SIGKILL] == began + supervisor.GRACE_SECONDS
    assert failing._code == 1


def test_the_worker_that_left_first_is_the_cause(failing: Any) -> None:
    settling, failed = failing._processes
    failed.end(1)
    failing._read = lambda seconds: failing.clock.wait(seconds) or settling.end(7)
    failing._turn()
    assert failing._code == 7


def test_ctrl_c_while_a_worker_settles_has_its_grace(failing: Any) -> None:
    settling, failed = failing._processes
    failed.end(1)

    def read(seconds: float) -> bool:
        if seconds == 0.05:
            failing.on_signal(signal.SIGINT)
        return failing.clock.wait(seconds)

    failing._read = read
    failing._turn()
    assert failing._code == 130
    assert signal.SIGTERM in settling.signals
    assert signal.SIGKILL not in settling.signals


@pytest.mark.parametrize("codes", [(137, 0), (1, 0), (1, 7), (0, 7), (0, 0)])
def test_the_last_worker_of_an_elastic_job_decides(elastic: Any, codes: tuple[int, int]) -> None:
    for worker, code in zip(elastic._processes, codes, strict=True):
        assert elastic._code is None
        worker.end(code)
        elastic._turn()
    assert elastic._code == codes[1]


def test_of_two_workers_that_end_at_once_one_is_the_last(elastic: Any) -> None:
    for worker, code in zip(elastic._processes, (7, 0), strict=True):
        worker.end(code)
    elastic._turn()
    assert elastic._code == 0


def test_an_end_while_another_is_handled_is_noticed(failing: Any) -> None:
    """Its only notice is read with the other's output."""
    first, second = failing._processes
    second.end(0)
    reads = []

    def read(seconds: float) -> bool:
        reads.append(seconds)
        if second.exit_code is not None:
            first.end(0)
        return False

    failing._read = read
    failing._turn()
    assert first.exit_code == 0
    assert failing._code == 0
    assert reads == [float("inf"), 0.0, 0.0]


def test_an_elastic_job_does_not_continue_before_all_have_joined(elastic: Any) -> None:
    elastic.state = "gathering"
    elastic._processes[1].end(7)
    elastic._turn()
    assert elastic._code == 7


@pytest.mark.parametrize(("epoch", "is_asked"), [(0, True), (3, False)])
def test_only_a_job_that_never_ran_is_asked_whether_it_joins(
    elastic: Any, monkeypatch: pytest.MonkeyPatch, epoch: int, is_asked: bool
) -> None:
    """Nodes gather, too, once a job has run and a worker waits that came late."""
    said: list[str] = []
    monkeypatch.setattr(elastic, "_say", said.append)
    elastic.state, elastic.epoch = "gathering", epoch
    for worker in elastic._processes:
        worker.end(0)
        elastic._turn()
    assert elastic._code == 0
    assert any("does CMD call zenps.init()?" in line for line in said) == is_asked


def test_a_scheduler_that_waits_for_workers_to_join_again_hears_that_all_have_ended(
    elastic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(elastic, "_report_end", reported.append)
    elastic.state = "draining"
    for worker in elastic._processes:
        assert not reported
        worker.end(0)
        elastic._turn()
    assert reported == elastic._processes


def test_without_an_answer_of_the_scheduler_an_elastic_job_continues(elastic: Any) -> None:
    elastic._ask = lambda question: None
    elastic._processes[1].end(7)
    elastic._turn()
    assert elastic._code is None


def test_an_end_is_not_reported_once_another_process_has_the_rank(elastic: Any) -> None:
    """As one that was started by hand in place of a process that had stopped."""
    node = SimpleNamespace(role="worker", rank=1, host=gethostname(), pid=7)
    asked: list[Any] = []
    elastic._ask = lambda question: asked.append(question) or SimpleNamespace(state="running", nodes=[node])
    ended = elastic._processes[1]
    ended.is_gone = lambda pid: pid != 7
    elastic._report_end(ended)
    assert asked == [supervisor.fetch]
    node.pid = 8
    elastic._report_end(ended)
    assert [getattr(question, "func", question) for question in asked[1:]] == [
        supervisor.fetch,
        supervisor.report_end,
    ]
