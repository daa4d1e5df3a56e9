"""A whole cluster on this machine: one scheduler, servers, and workers, from first to last process."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from zenps.config.settings import Config
from zenps.errors import DeadlineError
from zenps.keys import load_keys
from zenps.observe.timeline import collected
from zenps.wire.messages import Status

from .environments import environments
from .output import Lines, Output
from .processes import Guard, Pipe, Process, watched
from .status import fetch

GRACE_SECONDS: Final = 4.0
"""From what ends the job to SIGKILL; and how long scheduler and servers have to end after the last worker.

So that whatever happens everything has ended within 5 seconds.
"""

STATUS_SECONDS: Final = 1.0

MOST_SCHEDULER_DEATHS: Final = 3
"""One that is killed this often is not the victim of an accident."""

SETTLE_SECONDS: Final = 2.0
"""How long after a failure a worker that had left the cluster has for the rest of its way out.

What is left of the grace is the others'.
"""

_ZENPS: Final = (sys.executable, "-P", "-m", "zenps.cli")
"""Without -P a random.py in the working directory would be taken for Python's."""

_FAILED: Final = 1
_CANNOT_START: Final = 126  # as a shell has it
_SIGNALLED: Final = 128


def launch(
    config: Config,
    command: Sequence[str],
    environment: Mapping[str, str],
    prefix: Callable[[str], Sequence[str]] = lambda _: (),
) -> int:
    """Run ``command`` as every worker of a new cluster; returns when no process of it is left.

    Args:
        config: ``cluster.workers`` and ``cluster.servers`` say how many. ``cluster.scheduler``, where it
            is set, must be an address of this machine.
        command: program and arguments of a worker.
        environment: of all roles; settings in it must give ``config``.
        prefix: what the command of a process begins with, by its name, ``server 0``: a program that runs the
            rest, as ``env`` does, in its own place.

    Returns:
        0 when all workers ended with 0. Otherwise the exit code of the process that failed first, or
        128 + n where signal n ended it or this process; all others are ended then. Where workers go on
        without one that is gone: the exit code of the worker that ended last.

    Raises:
        ConfigError: ``cluster.scheduler`` is not on this machine, fixed ports run out, or ``sync.trace``
            cannot be written.
    """
    environment_of = environments(config, environment)
    with collected(config.sync.trace) as trace:
        for variables in environment_of.values() if trace else ():
            variables["ZENPS_SYNC_TRACE"] = trace
        job = _Job(config, command, environment_of, prefix)
        with watched(job.on_signal) as news:
            job.wake_by(news)
            try:
                return job.run()
            finally:
                job.close()


class _Job:
    """The processes and their pipes, in one thread. Each turn passes output on, then looks who has ended."""

    def __init__(
        self,
        config: Config,
        command: Sequence[str],
        environment_of: dict[str, dict[str, str]],
        prefix: Callable[[str], Sequence[str]],
    ) -> None:
        self._config = config
        self._command = command
        self._environment_of = environment_of
        self._prefix = prefix
        self._output = Output(["launch", *environment_of])
        self._selector = selectors.DefaultSelector()
        self._guard = Guard()
        self._processes: list[Process] = []
        self._address = b""
        self._code: int | None = None  # of the whole job, once it is known
        self._deaths = 0  # of schedulers
        self._measures = [signal.SIGTERM, signal.SIGKILL]
        self._patience_until = float("inf")  # then the next measure is taken

    def run(self) -> int:
        self._start_scheduler()
        while not self._address.endswith(b"\n") and self._code is None:
            self._turn()
        self._start_others()
        while self._running():
            self._turn()
        return self._code or 0

    def close(self) -> None:
        """Let go of everything; what is left is killed, which is nothing unless :meth:`run` raised."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        self._guard.close()
        self._selector.close()
        self._output.close()

    def wake_by(self, fd: int) -> None:
        """Look who has ended also when ``fd`` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, lambda: bool(os.read(fd, 4096)))

    def on_signal(self, number: int) -> None:
        """Somebody wants an end. At the first time there is grace, at the second none."""
        self._end(_SIGNALLED + number)

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def _start_scheduler(self) -> None:
        reader, writer = os.pipe()

        def read_address() -> bool:
            data = os.read(reader, 256)
            self._address += data
            return bool(data)

        self._selector.register(reader, selectors.EVENT_READ, read_address)
        try:
            self._start("scheduler", [*_ZENPS, "scheduler", "--print-address", str(writer)], writer)
        finally:
            os.close(writer)

    def _start_others(self) -> None:
        address = self._address.decode().strip()
        self._environment_of["scheduler"]["ZENPS_CLUSTER_SCHEDULER"] = address  # should it be started again
        if self._code is None:
            self._say(f"zenps status --set cluster.scheduler={address} shows this cluster")
        for name, environment in self._environment_of.items():
            # A signal may come between any two.
            if self._code is None and name != "scheduler":
                environment["ZENPS_CLUSTER_SCHEDULER"] = address
                self._start(name, self._command if _is_worker(name) else [*_ZENPS, "server"])

    def _start(self, name: str, command: Sequence[str], inherited_fd: int | None = None) -> None:
        # One progress bar can be watched: that of rank 0, which gets a terminal where we have one.
        columns = self._output.columns if name == "worker 0" else None
        command = [*self._prefix(name), *command]
        try:
            process = Process(name, command, self._environment_of[name], self._guard, columns, inherited_fd)
        except OSError as error:
            self._say(f"{name} cannot be started: {command[0]}: {error.strerror}")
            return self._end(_CANNOT_START)
        self._processes.append(process)
        for pipe in process.pipes:
            self._pass_on(
                pipe, Lines(self._output, name, is_stderr=pipe.is_stderr, is_live=columns is not None)
            )
        if self._code is not None:  # a signal came while it started
            process.signal(signal.SIGTERM)

    def _pass_on(self, pipe: Pipe, lines: Lines) -> None:
        def read() -> bool:
            data = pipe.read()
            lines.feed(data)
            return bool(data)

        self._selector.register(pipe.fd, selectors.EVENT_READ, read)

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        """Wait for output or an end, and deal with it."""
        self._read(max(self._patience_until - time.monotonic(), 0.0))
        if self._output.failure is not None and self._code is None:
            is_unread = isinstance(self._output.failure, BrokenPipeError)
            self._end(_SIGNALLED + signal.SIGPIPE if is_unread else _FAILED)
        # From the start each time: what is read while one is dealt with may be the news of another's end.
        while self._reap():
            pass
        if time.monotonic() >= self._patience_until:
            left, measure = ", ".join(self._running()), self._measures[0].name
            self._say(f"{left}: not ended after {GRACE_SECONDS:g} s; sending {measure}")
            self._take_next_measure()

    def _read(self, wait_seconds: float) -> bool:
        """Read once from all that have output, after at most ``wait_seconds``; False: nobody has."""
        ready = self._selector.select(None if wait_seconds == float("inf") else wait_seconds)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fd)
                os.close(key.fd)
        return bool(ready)

    def _reap(self) -> bool:
        """Deal with the first process found to have ended; False: there is none."""
        for process in self._processes:
            if process.exit_code is None and process.has_ended():
                self._read_what_is_there()
                self._on_end(process)
                return True
        return False

    def _read_what_is_there(self) -> None:
        # A pipe holds 64 KiB and a terminal is read 4 KiB at a time. There is no waiting for the end of
        # the output: a process that left its group may hold the other end for as long as it likes.
        for _ in range(16):
            if not self._read(0.0):
                break

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    def _on_end(self, process: Process) -> None:
        if self._code is not None:
            return  # as it should
        began = time.monotonic()
        if process.exit_code and self._survives(process):
            return
        if process.exit_code or not self._address:
            cause = self._cause(process, began + SETTLE_SECONDS)
            if self._code is None:  # else somebody wanted an end meanwhile
                self._say(f"{cause.name} failed: {cause.how_it_ended()}; ending the others")
                self._end(cause.exit_code or _FAILED, began)
        elif _is_worker(process.name) and not self._running("worker"):
            # The scheduler has seen them leave and tells the servers, unless they never joined.
            self._code = 0
            self._patience_until = time.monotonic() + GRACE_SECONDS
            status = self._status()
            if status is not None and status.state == "gathering":
                self._say("not all workers joined the cluster; does CMD call zenps.init()?")
                self._take_next_measure()

    def _survives(self, failed: Process) -> bool:
        """Whether the job goes on without it.

        Other servers take the slots of one that was killed, and such a scheduler is started again. Other
        workers do without one, however it ended, where the settings say so.
        """
        how = failed.how_it_ended()
        if _is_worker(failed.name):
            if not (self._config.cluster.is_elastic and self._running("worker")):
                return False
            # Without an answer it goes on: if not all had met, the rendezvous will fail.
            status = self._status()
            if status is not None and status.state in ("gathering", "failed"):
                return False
            self._say(f"{failed.name} ended: {how}; the others go on")
            return True
        if (failed.exit_code or 0) <= _SIGNALLED:
            return False
        if failed.name == "scheduler":
            self._deaths += 1
            if not self._address or self._deaths > MOST_SCHEDULER_DEATHS:
                return False
            self._say(f"scheduler ended: {how}; starting it again")
            self._start("scheduler", [*_ZENPS, "scheduler"])
            return True
        status = self._status()
        if status is None or status.state == "gathering":
            return False
        others = self._running("server")
        if others:
            self._say(f"{failed.name} ended: {how}; {', '.join(others)} will take its slots")
        return bool(others)

    def _cause(self, failed: Process, until: float) -> Process:
        """The process on which to blame that ``failed`` has, known ``until`` then.

        A script that ends early leaves the cluster first. The others then fail at once, while it may take
        its interpreter a second to end: so it is the worker that left first. Workers that go on without
        one do not fail by that.
        """
        is_asked = _is_worker(failed.name) and not self._config.cluster.is_elastic
        status = self._status() if is_asked else None
        left = [node for node in status.nodes if node.state == "left"] if status is not None else []
        if not left:
            return failed
        # The last message of a node that left was that it does.
        first = max(left, key=lambda node: node.silent_seconds)
        cause = next((p for p in self._processes if p.name == f"{first.role} {first.rank}"), failed)
        while not cause.has_ended() and self._code is None and time.monotonic() < until:
            self._read(0.05)
        return cause if cause.exit_code else failed

    def _status(self) -> Status | None:
        """How the cluster looks; None where the scheduler has ended or cannot answer."""
        if not self._address:
            return None
        cluster = msgspec.structs.replace(self._config.cluster, scheduler=self._address.decode().strip())
        try:
            return fetch(cluster, STATUS_SECONDS, load_keys(self._config.security, "operator"))
        except DeadlineError:
            return None

    def _end(self, code: int, began: float | None = None) -> None:
        """The job ends with ``code``, unless that is settled. Runs in the signal handler, too."""
        if self._code is None:
            self._code = code
        self._take_next_measure(began)

    def _take_next_measure(self, began: float | None = None) -> None:
        """SIGTERM first, then SIGKILL, to all that were started and have not ended.

        Between them is the grace, since ``began``; None: from now on.
        """
        if not self._measures:
            return
        measure = self._measures.pop(0)
        began = time.monotonic() if began is None else began
        self._patience_until = began + GRACE_SECONDS if self._measures else float("inf")
        # Workers first: they should not learn from a server or the scheduler that those have to go.
        for process in reversed(self._processes):
            process.signal(measure)
            process.signal(signal.SIGCONT)  # one that is stopped would not see it

    def _running(self, role: str = "") -> list[str]:
        """The names of those that have not ended, of a role or of all."""
        return [p.name for p in self._processes if p.name.startswith(role) and p.exit_code is None]

    def _say(self, text: str) -> None:
        self._output.line("launch", text.encode(), is_stderr=True)


def _is_worker(name: str) -> bool:
    return name.startswith("worker")
