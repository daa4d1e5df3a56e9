"""Process supervisor: starts the processes of a local cluster, and decides which end of one ends the job."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from socket import gethostname
from typing import Final

import msgspec

from zenps.config.settings import ClusterConfig, Config
from zenps.errors import ConfigError, DeadlineError
from zenps.keys import Keys, load_keys
from zenps.termination import held_signals, is_ignored, signals_that_end
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import Status

from .exit_codes import CANNOT_START, FAILED, SIGNALLED
from .local_clusters import options_for
from .output import Lines, Output
from .processes import Guard, Pipe, Process, Program
from .status import fetch, report_end

GRACE_SECONDS: Final = 4.0
"""How long processes have from the event that ends the job to SIGKILL. Also how long scheduler and servers
have to end after the last worker.

So everything has ended within 5 seconds, whatever happens.
"""

STATUS_SECONDS: Final = 1.0
"""How long the scheduler may take to answer a request for the status."""

MAX_SCHEDULER_DEATHS: Final = 3
"""A scheduler that is killed more often than this is not restarted."""

LOOK_SECONDS: Final = 0.05
"""How often it is checked whether what a program has left behind has ended."""

SETTLE_SECONDS: Final = 2.0
"""After a failure: how long a worker that has left the cluster may take to end. It is part of the grace."""


class Supervisor:
    """The processes and their pipes, in one thread. Each turn passes output on, and then reaps processes.

    Args:
        config: the settings of the cluster.
        programs: the scheduler first, then servers and workers, as ``server 0``.
    """

    def __init__(self, config: Config, programs: Sequence[Program]) -> None:
        self._config = config
        self._programs = {program.name: program for program in programs}
        self._output = Output(["launch", *self._programs])
        self._selector = selectors.DefaultSelector()
        self._guard = Guard()
        self._processes: list[Process] = []
        self._lines: list[Lines] = []
        self._address = b""
        """The part of its address that the scheduler has written; a complete one ends with a line end."""
        self._code: int | None = None
        """The exit code of the job, once it is decided."""
        self._scheduler_deaths = 0
        self._signals = [signal.SIGTERM, signal.SIGKILL]
        """The signals that have not been sent to all processes yet."""
        self._grace_ends = float("inf")
        """When the next of them is sent."""

    def run(self) -> int:
        """Starts all processes, waits for their ends, and returns the exit code of the job."""
        if is_ignored(signal.SIGHUP):
            how = f"{signals_that_end()} to launch ends it"
            self._say(f"SIGHUP is ignored, as under nohup: the job goes on; {how}")
        self._start_scheduler()
        while not self._address.endswith(b"\n") and self._code is None:
            self._turn()
        self._start_others()
        while self._left():
            self._turn()
        # A process that left its group may hold the other end of a pipe, which does not end then.
        for lines in self._lines:
            lines.feed(b"")
        return self._code or 0

    def close(self) -> None:
        """Closes everything, and kills processes that are left, as they are if :meth:`run` raised."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        self._guard.close()
        self._selector.close()
        self._output.close()

    def wake_by(self, fd: int) -> None:
        """Begins a turn also when ``fd`` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, lambda: bool(os.read(fd, 4096)))

    @held_signals()
    def on_signal(self, number: int) -> None:
        """A signal asks for the end of the job. Processes have the grace until a second Ctrl-C.

        Others come more than once: from the shell and the kernel if a terminal is closed, or from systemd.
        """
        if self._code is None:
            self._end(SIGNALLED + number)
        elif number == signal.SIGINT or signal.SIGTERM in self._signals:
            self._send_next_signal()

    # ── starting ────────────────────────────────────────────────────────────────────────────────

    def _start_scheduler(self) -> None:
        reader, writer = os.pipe()

        def read_address() -> bool:
            data = os.read(reader, 256)
            self._address += data
            return bool(data)

        self._selector.register(reader, selectors.EVENT_READ, read_address)
        try:
            self._start("scheduler", "--print-address", str(writer), inherited_fd=writer)
        finally:
            os.close(writer)

    def _start_others(self) -> None:
        if self._code is None:
            options = options_for(self._scheduler_address(), self._config.cluster.job)
            self._say(f"zenps status {options} shows this cluster")
        for name in self._programs:
            # A signal may come between any two.
            if self._code is None and name != "scheduler":
                self._start(name)

    def _start(self, name: str, *arguments: str, inherited_fd: int | None = None) -> None:
        program = self._programs[name]
        variables = {"ZENPS_CLUSTER_SCHEDULER": self._scheduler_address()} if self._address else {}
        program = Program(name, [*program.command, *arguments], {**program.environment, **variables})
        # A terminal shows one progress bar: that of rank 0, whose output is a terminal if ours is.
        columns = self._output.columns if name == "worker 0" else None
        try:
            process = Process(program, self._guard, columns, inherited_fd)
        except OSError as error:
            self._say(f"{name} cannot be started: {program.command[0]}: {error.strerror}")
            return self._end(CANNOT_START)
        with held_signals():
            self._processes.append(process)
            if self._code is not None:  # a signal came while it started
                process.signal(signal.SIGTERM if self._signals else signal.SIGKILL)
        for pipe in process.pipes:
            is_live = columns is not None
            self._pass_on(pipe, Lines(self._output, name, is_stderr=pipe.is_stderr, is_live=is_live))

    def _pass_on(self, pipe: Pipe, lines: Lines) -> None:
        def read() -> bool:
            data = pipe.read()
            lines.feed(data)
            return bool(data)

        self._lines.append(lines)
        self._selector.register(pipe.fd, selectors.EVENT_READ, read)

    # ── running ─────────────────────────────────────────────────────────────────────────────────

    def _turn(self) -> None:
        """Waits for output or the end of a process, and handles it."""
        wait_seconds = max(self._grace_ends - time.monotonic(), 0.0)
        self._read(min(wait_seconds, LOOK_SECONDS) if self._left() != self._running() else wait_seconds)
        if self._output.failure is not None and self._code is None:
            is_unread = isinstance(self._output.failure, BrokenPipeError)
            self._end(SIGNALLED + signal.SIGPIPE if is_unread else FAILED)
        # Look at all processes again after each end: handling one end may consume the only notice of another.
        while self._reap():
            pass
        for process in self._processes:
            process.finish()
        if not self._left():
            self._read_remaining_output()
        if time.monotonic() >= self._grace_ends:
            left = ", ".join(self._left())
            if number := self._send_next_signal():
                self._say(f"{left}: not ended after {GRACE_SECONDS:g} s; sending {number.name}")

    def _read(self, wait_seconds: float) -> bool:
        """Reads once from every pipe with output, after at most ``wait_seconds``. False if there is none."""
        ready = self._selector.select(None if wait_seconds == float("inf") else wait_seconds)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fd)
                os.close(key.fd)
        return bool(ready)

    def _reap(self) -> bool:
        """Handles the end of the first process that has ended. False if there is none."""
        for process in self._processes:
            if process.exit_code is None and process.has_ended():
                self._read_remaining_output()
                self._on_end(process)
                return True
        return False

    def _read_remaining_output(self) -> None:
        # A pipe holds 64 KiB, and a terminal is read 4 KiB at a time. Do not wait for the end of the output:
        # a process that left its group may hold the other end for as long as it likes.
        for _ in range(16):
            if not self._read(0.0):
                break

    # ── ends of processes ───────────────────────────────────────────────────────────────────────

    def _on_end(self, process: Process) -> None:
        if self._code is not None:
            return  # the job ends, as all processes should
        began = time.monotonic()
        if process.exit_code and self._survives(process):
            return
        if process.exit_code or not self._address:
            self._on_failure(process, began)
        elif process.is_worker and not self._running("worker"):
            self._on_last_worker()

    def _on_failure(self, process: Process, began: float) -> None:
        """The job cannot continue without this process."""
        cause = self._cause(process, began + SETTLE_SECONDS)
        if self._code is None:  # no signal has ended the job meanwhile
            self._say(f"{cause.name} failed: {cause.how_it_ended()}; ending the others")
            self._end(cause.exit_code or FAILED, began)

    def _on_last_worker(self) -> None:
        """The last worker has ended without a failure: the scheduler and the servers also end.

        The scheduler has seen them leave, and waits in case they join again, unless they never joined.
        """
        self._code = 0
        self._grace_ends = time.monotonic() + GRACE_SECONDS
        status = self._status()
        if status is not None and status.state == "gathering":
            if not status.epoch:  # else the job has run, and a worker has come that would continue it
                self._say("not all workers joined the cluster; does CMD call zenps.init()?")
            self._send_next_signal()
        if status is not None and status.state == "draining":
            for worker in self._processes:
                if worker.is_worker:
                    self._report_end(worker)

    def _survives(self, failed: Process) -> bool:
        """True if the job continues without the process."""
        if failed.is_worker:
            return self._survives_worker(failed)
        if (failed.exit_code or 0) <= SIGNALLED:
            return False
        return (
            self._survives_scheduler(failed) if failed.name == "scheduler" else self._survives_server(failed)
        )

    def _survives_worker(self, failed: Process) -> bool:
        """The workers of an elastic job continue without one, however it ended."""
        if not (self._config.cluster.is_elastic and self._running("worker")):
            return False
        # Without an answer the job continues: if not all have joined, the rendezvous will fail. A scheduler
        # that was started again has no epoch until the first node returns to it, although all had joined.
        status = self._report_end(failed)
        if status is not None and (
            status.state == "failed"
            or (status.state == "gathering" and (status.epoch or not self._scheduler_deaths))
        ):
            return False
        self._say(f"{failed.name} ended: {failed.how_it_ended()}; the others continue without it")
        return True

    def _survives_scheduler(self, failed: Process) -> bool:
        """A scheduler that was killed is started again."""
        self._scheduler_deaths += 1
        if not self._address or self._scheduler_deaths > MAX_SCHEDULER_DEATHS:
            return False
        self._say(f"scheduler ended: {failed.how_it_ended()}; starting it again")
        self._start("scheduler")
        return True

    def _survives_server(self, failed: Process) -> bool:
        """Other servers, also those that were started by hand, take the slots of one that was killed."""
        status = self._report_end(failed)
        has_joined = status is not None and status.state != "gathering"
        # A scheduler that was started again does not know that all had joined before nodes return to it.
        if not (has_joined or self._scheduler_deaths):
            return False
        nodes = () if status is None else status.nodes
        present = [node for node in nodes if (node.role, node.state) == ("server", "present")]
        others = [f"server {node.rank}" for node in present] or self._running("server")
        if others:
            self._say(
                f"{failed.name} ended: {failed.how_it_ended()}; {', '.join(others)} will take its slots"
            )
        return bool(others)

    def _cause(self, failed: Process, until: float) -> Process:
        """Returns the process that caused the failure of ``failed``, as far as it is known at ``until``.

        A script that fails leaves the cluster first. The other workers then fail at once, while its
        interpreter may take a second to end. So the cause is the worker that left first, of those that do
        not end with 0. Workers of an elastic job do not fail because another has left.
        """
        is_asked = failed.is_worker and not self._config.cluster.is_elastic
        status = self._status() if is_asked else None
        nodes = () if status is None else status.nodes
        left = [node for node in nodes if (node.role, node.state) == ("worker", "left")]
        # The last message of a node that left says that it leaves.
        for node in sorted(left, key=lambda node: node.silent_seconds, reverse=True):
            cause = next((p for p in self._processes if p.name == f"worker {node.rank}"), failed)
            while not cause.has_ended() and self._code is None and time.monotonic() < until:
                self._read(0.05)
            if cause.exit_code:
                return cause
        return failed

    def _status(self) -> Status | None:
        """Asks the scheduler for the status. None if it has ended, does not answer, or refuses our key."""
        return self._ask(fetch)

    def _report_end(self, ended: Process) -> Status | None:
        """Reports the end of a server or worker, so that nobody waits for its lease.

        Its rank may belong to another process by now, such as the replacement of a stopped server: that
        process is not reported. Then returns the status, as :meth:`_status` does.
        """
        name, _, rank = ended.name.partition(" ")
        role: Role = "server" if name == "server" else "worker"
        status = self._status()
        if status is None:
            return None
        for node in status.nodes:
            is_here = (node.role, node.rank, node.host) == (role, int(rank), gethostname())
            if is_here and not ended.is_gone(node.pid):
                return status
        return self._ask(partial(report_end, role, int(rank)))

    def _ask(self, question: Callable[[ClusterConfig, float, Keys | None], Status]) -> Status | None:
        if not self._address:
            return None
        cluster = msgspec.structs.replace(self._config.cluster, scheduler=self._scheduler_address())
        try:
            return question(cluster, STATUS_SECONDS, load_keys(self._config.security, "operator"))
        except DeadlineError:
            return None
        except ConfigError as error:  # the operator's key was revoked, or its file is being replaced
            self._say(f"the scheduler cannot be asked: {error}")
            return None

    # ── the end of the job ──────────────────────────────────────────────────────────────────────

    @held_signals()
    def _end(self, code: int, began: float | None = None) -> None:
        """Ends the job with ``code``, unless its code is decided."""
        if self._code is None:
            self._code = code
            self._send_next_signal(began)

    @held_signals()
    def _send_next_signal(self, began: float | None = None) -> signal.Signals | None:
        """Sends SIGTERM, or SIGKILL the next time, to all processes that have not ended.

        The grace is between the two. It begins at ``began``, or now if that is None.

        Returns:
            What was sent. None: nothing, because both have been.
        """
        if not self._signals:
            return None
        number = self._signals.pop(0)
        began = time.monotonic() if began is None else began
        self._grace_ends = began + GRACE_SECONDS if self._signals else float("inf")
        self._output.limit(began + GRACE_SECONDS)
        # Workers first: a server or the scheduler should not tell them first that it ends.
        for process in reversed(self._processes):
            process.signal(number)
            process.signal(signal.SIGCONT)  # a stopped process would not handle the signal
        return number

    def _running(self, role: str = "") -> list[str]:
        """Returns the names of the processes that have not ended, of one role or of all."""
        return [p.name for p in self._processes if p.name.startswith(role) and p.exit_code is None]

    def _left(self) -> list[str]:
        """Returns the names of the processes that have not ended with all that they have started."""
        return [process.name for process in self._processes if not process.is_over]

    def _scheduler_address(self) -> str:
        return self._address.decode().strip()

    def _say(self, text: str) -> None:
        # The name of a program may be any bytes.
        self._output.line("launch", text.encode(errors="surrogateescape"), is_stderr=True)
