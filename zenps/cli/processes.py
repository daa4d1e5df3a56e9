"""Child processes: each program runs in its own process group, and is ended with all that it has started.

Also the signals that tell this process of their ends, or ask it to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket as net
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from zenps.termination import ASK_TO_END, is_ignored

from .exit_codes import SIGNALLED

LINGER_SECONDS: Final = 0.75
"""How long the other processes of a group may run after their program: Python's resource tracker unlinks the
shared memory of a program that has crashed."""

TERMINAL_ROWS: Final = 24
_GUARD: Final = Path(__file__).with_name("guard.py")


class Program(NamedTuple):
    """What a process runs: its name for messages, the command, and all variables of its environment."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


class Pipe(NamedTuple):
    """The end of a pipe or terminal from which the output of a process is read."""

    fd: int
    is_stderr: bool

    def read(self) -> bytes:
        """Returns the bytes that have come, at least one; empty at the end of the output."""
        try:
            return os.read(self.fd, 65536)
        except OSError:  # Linux reports EIO when the other end of a terminal is closed
            return b""


class Guard:
    """A process that kills the reported process groups if this process is killed: ``guard.py``."""

    def __init__(self) -> None:
        # -I and -S: the guard needs only the standard library, and starts in a third of the time.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def report(self, line: str) -> None:
        """Reports that a process group has started, ``+GROUP``, or ended, ``-GROUP``."""
        assert self._popen.stdin is not None
        # If the guard was killed, the job continues without it.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(f"{line}\n".encode())
            self._popen.stdin.flush()

    def close(self) -> None:
        """Ends the guard, and with it all groups that have not ended."""
        self._popen.communicate()


class Process:
    """A running program, which leads its own session and process group, and has no input.

    Args:
        program: what it runs.
        guard: gets a report when the process group starts and when it has ended.
        terminal_columns: its output is a terminal of this width; None: pipes.
        inherited_fd: a file descriptor that it inherits; None: only those of its output.

    Attributes:
        name: that of the program.
        exit_code: as a shell shows it: 128 + n after signal n; None while the program runs.
        pipes: from which its output is read.
        is_over: True if no process of its group is left.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        program: Program,
        guard: Guard,
        terminal_columns: int | None = None,
        inherited_fd: int | None = None,
    ) -> None:
        self.name = program.name
        self.exit_code: int | None = None
        self.is_over = False
        self._guard = guard
        self._killed_by = 0
        self._ended_at = 0.0
        self._linger_seconds = LINGER_SECONDS
        environment = program.environment
        if terminal_columns is None:
            (out, child_out), (err, child_err) = os.pipe(), os.pipe()
            self.pipes = [Pipe(out, False), Pipe(err, True)]
        else:
            out, child_out = os.openpty()
            child_err = child_out
            termios.tcsetwinsize(child_out, (TERMINAL_ROWS, terminal_columns))
            self.pipes = [Pipe(out, False)]
            # Programs prefer these to the size of their terminal. Ours may be set, as readline does.
            environment = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        try:
            self._popen = subprocess.Popen(
                program.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=child_out,
                stderr=child_err,
                start_new_session=True,
                pass_fds=() if inherited_fd is None else (inherited_fd,),
            )
        finally:
            for fd in {child_out, child_err}:
                os.close(fd)
        guard.report(f"+{self._popen.pid}")

    @property
    def is_worker(self) -> bool:
        """True if the program is a worker, by its name."""
        return self.name.startswith("worker")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group. After SIGTERM, the group may run until SIGKILL.

        SIGKILL is for the program itself; the rest of the group follows after :data:`LINGER_SECONDS`.
        """
        if self.is_over:
            return
        if number == signal.SIGTERM:
            self._linger_seconds = float("inf")
        if number != signal.SIGKILL:
            return _signal(os.killpg, self._popen.pid, number)
        self._linger_seconds = LINGER_SECONDS
        _signal(os.kill, self._popen.pid, number)

    def has_ended(self) -> bool:
        """True if the program has ended. Then ``exit_code`` is set; its group may run on: :meth:`finish`."""
        if self.exit_code is not None:
            return True
        # Until the program is reaped, no other process or group can get its number.
        info = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return False
        self._killed_by = 0 if info.si_code == os.CLD_EXITED else info.si_status
        self.exit_code = SIGNALLED + self._killed_by if self._killed_by else info.si_status
        self._ended_at = time.monotonic()
        return True

    def finish(self) -> None:
        """After :meth:`has_ended`: sets ``is_over`` if no process of the group is left.

        Kills the group if its time is over.
        """
        group = self._popen.pid
        if self.is_over or self.exit_code is None:
            return
        if time.monotonic() < self._ended_at + self._linger_seconds and _has_members(group):
            return
        _signal(os.killpg, group, signal.SIGKILL)
        self._guard.report(f"-{group}")
        # Before it is reaped: a signal handler may come, and sends signals to groups that are not over.
        self.is_over = True
        self._popen.wait()

    def is_gone(self, pid: int) -> bool:
        """True if no process has this number, or one of this group, which ends soon after the program."""
        try:
            return os.getpgid(pid) == self._popen.pid
        except ProcessLookupError:
            return True

    def how_it_ended(self) -> str:
        """Returns a text such as ``exit code 3``, or ``killed by signal 9 (Killed)``."""
        number = self._killed_by
        if not number:
            return f"exit code {self.exit_code}"
        return f"killed by signal {number} ({signal.strsignal(number)})"


def _signal(send: Callable[[int, int], None], whom: int, number: signal.Signals) -> None:
    # Perhaps we may not signal any of these processes, as under sudo. They then end by themselves.
    with contextlib.suppress(PermissionError):
        send(whom, number)


def _has_members(group: int) -> bool:
    """True if a process of the group runs, other than the one that led it."""
    return any(_runs_in(group, int(name)) for name in os.listdir("/proc") if name.isdigit())


def _runs_in(group: int, pid: int) -> bool:
    try:
        # The call is much faster than the file, and nearly all processes are of other groups.
        if pid == group or os.getpgid(pid) != group:
            return False
        # A zombie does not run. In a container, nobody may reap those whose parent is gone.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False  # it has ended just now


@contextlib.contextmanager
def handled_signals(on_signal: Callable[[int], None]) -> Iterator[int]:
    """Calls ``on_signal`` with the number of each signal that asks this process to end.

    Yields a file descriptor that can be read after such a signal, and when a child has ended.
    """
    awake, wake = net.socketpair()
    wake.setblocking(False)

    def handle(number: int, _: FrameType | None) -> None:
        on_signal(number)

    # nohup makes a process ignore SIGHUP, and a shell script makes one in the background ignore SIGINT.
    handled = [n for n in ASK_TO_END if n == signal.SIGTERM or not is_ignored(n)]
    before = {number: signal.signal(number, handle) for number in handled}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    fd_before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    try:
        yield awake.fileno()
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        awake.close()
        wake.close()
