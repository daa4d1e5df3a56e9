"""Supervisor without real processes or time: which end ends the job, with which code and when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import pytest

from zenps.cli import processes, supervisor
from zenps.cli.processes import Process
from zenps.cli.status import fetch, report_end
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


class Program:
    """A process that ends by ``end``; the supervisor notices it in its next turn."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.is_worker = name.startswith("worker")
        self.exit_code: int | None = None
        self.signals: dict[int, float] = {}
        self._clock = clock
        self._code: int | None = None

    def end(self, code: int) -> None:
        self._code = code

    def has_ended(self) -> bool:
        self.exit_code = self._code
        return self.exit_code is not None

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None

    def finish(self) -> None:
        pass

    def how_it_ended(self) -> str:
        return f"exit code {self.exit_code}"

    def signal(self, number: int) -> None:
        self.signals.setdefault(number, self._clock.now)


def node_of(rank: int, state: str, silent_seconds: float, role: str = "worker") -> Any:
    return SimpleNamespace(role=role, rank=rank, state=state, silent_seconds=silent_seconds, host="", pid=0)


def make_job(monkeypatch: pytest.MonkeyPatch, on_worker_loss: str) -> Any:
    """Two workers, of which worker 0 has left. The scheduler answers after 1 s: this, the state and epoch."""
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    sets = ["cluster.workers=2", f"cluster.on_worker_loss={on_worker_loss}"]
    job: Any = Supervisor(load(sets=sets, environ={}).config, [])
    job.clock, job.state, job.epoch = clock, "running", 1
    job.left = [node_of(0, "left", 1.0)]
    job._address = b"host:1\n"
    job._processes = [Program(name, clock) for name in ("worker 0", "worker 1")]
    job._read = clock.wait
    job._ask = lambda question: (
        clock.wait(1.0) or SimpleNamespace(state=job.state, epoch=job.epoch, nodes=job.left)
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


@pytest.mark.parametrize("first", [0, 1])
def test_the_worker_that_left_first_is_the_cause(failing: Any, first: int) -> None:
    settling, failed = failing._processes[first], failing._processes[1 - first]
    failing.left = [node_of(first, "left", 1.0), node_of(1 - first, "left", 0.5), node_of(2, "present", 2.0)]
    failed.end(1)
    failing._read = lambda seconds: failing.clock.wait(seconds) or settling.end(7)
    failing._turn()
    assert failing._code == 7


def test_a_worker_that_ended_well_is_not_the_cause(failing: Any) -> None:
    """The next that left is: it ends with 7, after the last one, which failed because of it."""
    settling = failing._processes[0]
    failing._processes.append(Program("worker 2", failing.clock))
    end(failing, "worker 2", 0)
    failing.left = [node_of(2, "left", 99.0), node_of(0, "left", 1.0), node_of(1, "left", 0.5)]
    failing._read = lambda seconds: failing.clock.wait(seconds) or (seconds == 0.05 and settling.end(7))
    end(failing, "worker 1", 1)
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
    assert reads == [float("inf"), 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("state", "epoch", "scheduler_deaths", "code"),
    [
        ("gathering", 0, 0, 7),
        ("gathering", 0, 1, None),
        ("gathering", 3, 1, 7),  # all workers have left, and join again
        ("failed", 3, 0, 7),
        ("failed", 3, 1, 7),
        ("running", 3, 1, None),
    ],
)
def test_an_elastic_job_continues_without_a_worker_once_all_have_joined(
    elastic: Any, state: str, epoch: int, scheduler_deaths: int, code: int | None
) -> None:
    """A scheduler that was started again does not know that they had, until a node returns to it."""
    elastic.state, elastic.epoch, elastic._scheduler_deaths = state, epoch, scheduler_deaths
    elastic._processes[1].end(7)
    elastic._turn()
    assert elastic._code == code


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


@pytest.mark.parametrize("role", ["worker", "server"])
def test_an_end_is_not_reported_once_another_process_has_the_rank(elastic: Any, role: str) -> None:
    """As one that was started by hand in place of a process that had stopped."""
    node = SimpleNamespace(role=role, rank=1, host=gethostname(), pid=7)
    asked: list[Any] = []

    def ask(question: Any) -> SimpleNamespace:
        asked.append(question)
        return SimpleNamespace(state="running", nodes=[node])

    elastic._ask = ask
    ended: Any = Program(f"{role} 1", elastic.clock)
    ended.is_gone = lambda pid: pid != 7
    elastic._report_end(ended)
    assert asked == [fetch]
    node.pid = 8
    elastic._report_end(ended)
    assert asked[1] == fetch
    assert (asked[2].func, asked[2].args) == (report_end, (role, 1))


@pytest.fixture
def whole(failing: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job with a scheduler, two servers and a worker; what it says, and what it starts."""
    names = ("scheduler", "server 0", "server 1", "worker 0")
    failing._processes = [Program(name, failing.clock) for name in names]
    failing.said, failing.started = [], []
    monkeypatch.setattr(failing, "_say", failing.said.append)
    monkeypatch.setattr(failing, "_start", failing.started.append)
    return failing


def end(job: Any, name: str, code: int) -> None:
    """Ends the process of this name that was started last, and has the supervisor notice it."""
    next(process for process in reversed(job._processes) if process.name == name).end(code)
    job._turn()


@pytest.fixture
def starting(failing: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A job of two workers whose starts are noted in ``begun``; ``meanwhile`` happens during each."""
    failing.begun, failing.said, failing._processes = [], [], []
    failing.meanwhile = lambda: None
    monkeypatch.setattr(failing, "_say", failing.said.append)
    failing._output.columns = 70
    failing._programs = {
        name: processes.Program(name, ["train", name], {"A": "1"}) for name in ("worker 0", "worker 1")
    }

    def begin(program: Any, guard: object, columns: int | None, inherited_fd: int | None) -> Any:
        failing.begun.append((*program, columns, inherited_fd))
        failing.meanwhile()
        process: Any = Program(program.name, failing.clock)
        process.pipes = []
        return process

    monkeypatch.setattr(supervisor, "Process", begin)
    yield failing
    failing._output.columns = None


def test_a_process_is_started_with_its_command_and_the_scheduler_s_address(starting: Any) -> None:
    at = {"A": "1", "ZENPS_CLUSTER_SCHEDULER": "host:1"}
    starting._start("worker 0")
    starting._start("worker 1", "--more", inherited_fd=9)
    # The terminal shows one progress bar: that of rank 0.
    assert starting.begun == [
        ("worker 0", ["train", "worker 0"], at, 70, None),
        ("worker 1", ["train", "worker 1", "--more"], at, None, 9),
    ]
    assert [process.name for process in starting._processes] == ["worker 0", "worker 1"]
    assert [process.signals for process in starting._processes] == [{}, {}]


def test_a_process_that_was_about_to_start_when_a_signal_came_is_told(starting: Any) -> None:
    starting.meanwhile = lambda: starting.on_signal(signal.SIGTERM)
    starting._start("worker 0")
    (process,) = starting._processes
    assert {*process.signals} == {signal.SIGTERM}


def test_a_process_that_was_about_to_start_when_a_second_ctrl_c_came_is_killed(starting: Any) -> None:
    def interrupt_twice() -> None:
        starting.on_signal(signal.SIGINT)
        starting.on_signal(signal.SIGINT)

    starting.meanwhile = interrupt_twice
    starting._start("worker 0")
    (process,) = starting._processes
    assert {*process.signals} == {signal.SIGKILL}


def test_a_program_that_cannot_be_started_ends_the_job(starting: Any) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    starting._start("worker 0")
    starting.meanwhile = fail
    starting._start("worker 1")
    assert starting.said == ["worker 1 cannot be started: train: No such file or directory"]
    assert starting._code == 126
    assert signal.SIGTERM in starting._processes[0].signals


def test_a_program_that_cannot_be_started_leaves_the_others_their_grace(starting: Any) -> None:
    """A signal came meanwhile, which has told them to end."""

    def interrupt_and_fail() -> None:
        starting.on_signal(signal.SIGINT)
        raise FileNotFoundError(2, "No such file or directory")

    starting._start("worker 0")
    starting.meanwhile = interrupt_and_fail
    starting._start("worker 1")
    assert starting._code == 130
    assert {*starting._processes[0].signals} == {signal.SIGTERM, signal.SIGCONT}


def test_all_that_a_process_had_written_is_read_once_it_has_ended(failing: Any) -> None:
    """But not waited for: another process may hold the other end for as long as it likes."""
    reader, writer = os.pipe()
    fed: list[bytes] = []
    pipe = SimpleNamespace(fd=reader, read=lambda: os.read(reader, 3))  # as little as a terminal gives
    failing._pass_on(pipe, SimpleNamespace(feed=fed.append))
    os.write(writer, b"the last words")
    del failing._read
    failing._read_remaining_output()
    assert b"".join(fed) == b"the last words"
    os.close(writer)
    failing._read_remaining_output()
    assert reader not in failing._selector.get_map()


@pytest.mark.parametrize("interrupted", ["", "server 1"])
def test_what_a_signal_finds_not_started_stays_so(whole: Any, interrupted: str) -> None:
    names = [process.name for process in whole._processes]
    whole._programs = dict.fromkeys(names)

    def start(name: str) -> None:
        whole.started.append(name)
        if name == interrupted:
            whole.on_signal(signal.SIGTERM)

    whole._start = start
    whole._start_others()
    assert whole.started == (["server 0", "server 1"] if interrupted else names[1:])
    assert whole.said == ["zenps status --set cluster.scheduler=host:1 shows this cluster"]


TAKEN = "server 0 ended: exit code 137; server 1 will take its slots"


def test_the_command_that_shows_a_cluster_names_its_job(whole: Any) -> None:
    whole._config = load(sets=["cluster.job=my job"], environ={}).config
    whole._start_others()
    assert whole.said == [
        "zenps status --set cluster.scheduler=host:1 --set 'cluster.job=my job' shows this cluster"
    ]


@pytest.mark.parametrize(
    ("state", "code", "expected", "said"),
    [
        ("running", 137, None, TAKEN),
        ("running", 129, None, TAKEN.replace("137", "129")),
        ("running", 128, 128, "server 0 failed: exit code 128; ending the others"),
        ("gathering", 137, 137, "server 0 failed: exit code 137; ending the others"),
        (None, 137, 137, "server 0 failed: exit code 137; ending the others"),
        ("running", 0, None, None),
    ],
)
def test_a_job_survives_a_server_that_is_killed_once_all_have_joined(
    whole: Any, state: str | None, code: int, expected: int | None, said: str | None
) -> None:
    """Not one that fails by itself: the next would, too."""
    whole.state = state
    if state is None:
        whole._ask = lambda question: None
    end(whole, "server 0", code)
    assert whole._code == expected
    assert whole.said == ([said] if said else [])


def test_a_job_ends_with_its_last_server(whole: Any) -> None:
    end(whole, "server 1", 137)
    assert whole._code is None
    end(whole, "server 0", 137)
    assert whole._code == 137


@pytest.mark.parametrize("code", [143, 0])
def test_a_server_that_left_long_ago_is_not_the_cause(whole: Any, code: int) -> None:
    """It was told to end, or drained, and the job went on; later a worker fails because another has left."""
    whole._processes.append(Program("worker 1", whole.clock))
    end(whole, "server 1", code)
    assert whole._code is None
    whole.left = [node_of(1, "left", 99.0, "server"), node_of(0, "left", 1.0)]
    settling = whole._processes[3]
    whole._read = lambda seconds: whole.clock.wait(seconds) or (seconds == 0.05 and settling.end(7))
    end(whole, "worker 1", 1)
    assert whole._code == 7


@pytest.mark.parametrize("answers", [False, True])
def test_a_server_and_the_scheduler_may_be_killed_together(whole: Any, answers: bool) -> None:
    """As by the kernel where memory is short. No node has returned to the new scheduler, if that answers."""
    whole.state, whole.epoch, whole.left = "gathering", 0, []
    if not answers:
        whole._ask = lambda question: None
    end(whole, "scheduler", 137)
    end(whole, "server 0", 137)
    assert whole._code is None
    assert whole.said[-1] == TAKEN
    end(whole, "server 1", 137)
    assert whole._code == 137, "the last server"


@pytest.mark.parametrize(("state", "code"), [("present", None), ("lost", 137)])
def test_a_server_that_was_started_by_hand_takes_the_slots_of_launch_s_last_one(
    whole: Any, state: str, code: int | None
) -> None:
    end(whole, "server 1", 137)
    whole.left = [node_of(0, "lost", 1.0, "server"), node_of(2, state, 0.0, "server")]
    end(whole, "server 0", 137)
    assert whole._code == code
    assert (whole.said[-1] == TAKEN.replace("server 1", "server 2")) == (code is None)


def test_a_scheduler_that_is_killed_is_started_again_a_few_times(whole: Any) -> None:
    for number in range(1, supervisor.MAX_SCHEDULER_DEATHS + 1):
        end(whole, "scheduler", 137)
        assert whole._code is None
        assert whole.started == number * ["scheduler"]
        whole._processes.append(Program("scheduler", whole.clock))
    end(whole, "scheduler", 137)
    assert whole._code == 137
    assert len(whole.started) == supervisor.MAX_SCHEDULER_DEATHS


@pytest.mark.parametrize(("address", "code"), [(b"host:1\n", 1), (b"", 137), (b"", 0)])
def test_a_scheduler_that_fails_or_never_began_ends_the_job(whole: Any, address: bytes, code: int) -> None:
    whole._address = address
    end(whole, "scheduler", code)
    assert whole._code == (code or 1)
    assert whole.started == []


def test_a_server_that_ends_well_leaves_its_job_to_the_workers(whole: Any) -> None:
    for name in ("server 0", "server 1", "scheduler"):
        end(whole, name, 0)
        assert whole._code is None
    end(whole, "worker 0", 0)
    assert whole._code == 0


def test_whatever_does_not_end_is_told_and_then_killed(whole: Any) -> None:
    whole.on_signal(signal.SIGTERM)
    told = {process.name: dict(process.signals) for process in whole._processes}
    assert {*told["server 0"]} == {signal.SIGTERM, signal.SIGCONT}
    end(whole, "worker 0", 0)  # it waits until the grace is over
    assert whole.said == ["scheduler, server 0, server 1: not ended after 4 s; sending SIGKILL"]
    assert all(signal.SIGKILL in process.signals for process in whole._processes[:3])
    whole.on_signal(signal.SIGINT)  # there is nothing more to send
    assert whole._code == 128 + signal.SIGTERM
    assert whole._grace_ends == float("inf")


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_only_a_second_ctrl_c_ends_the_grace(
    whole: Any, first: signal.Signals, second: signal.Signals
) -> None:
    """Who closes a terminal or a systemd scope sends SIGHUP twice, or SIGTERM and SIGHUP in either order."""
    whole.on_signal(first)
    whole.on_signal(second)
    for process in whole._processes:
        assert (signal.SIGKILL in process.signals) == (second == signal.SIGINT)
    assert whole._code == 128 + first


def test_a_second_ctrl_c_while_the_first_is_handled_comes_after_it(whole: Any) -> None:
    """A process that gets SIGTERM after SIGKILL may let its group linger for ever."""
    worker = whole._processes[-1]
    tell = worker.signal

    def interrupted(number: signal.Signals) -> None:
        worker.signal = tell
        signal.raise_signal(signal.SIGINT)
        tell(number)

    worker.signal = interrupted
    with processes.handled_signals(whole.on_signal):
        signal.raise_signal(signal.SIGINT)
    for process in whole._processes:
        assert [*process.signals] == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL]
    assert whole._grace_ends == float("inf")


def test_a_process_is_over_only_once_its_end_was_noticed() -> None:
    """The supervisor handles the end of a process once :meth:`Process.has_ended` finds it, and only then."""
    guard: Any = SimpleNamespace(report=lambda line: None)
    process = Process(processes.Program("worker 0", ["true"], dict(os.environ)), guard)
    os.waitid(os.P_PID, process._popen.pid, os.WEXITED | os.WNOWAIT)
    process.finish()
    assert (process.exit_code, process.is_over) == (None, False)
    assert process.has_ended()
    process.finish()
    assert (process.exit_code, process.is_over) == (0, True)
    for pipe in process.pipes:
        os.close(pipe.fd)
