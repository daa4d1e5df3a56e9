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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from .exit_codes import SIGNALLED

TERMINAL_ROWS: Final = 24
_GUARD: Final = Path(__file__).with_name("guard.py")
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        self._guard = guard
        environment = program.environment
        if terminal_columns is None:
            (out, child_out), (err, child_err) = os.pipe(), os.pipe()
            self.pipes = [Pipe(out, False), Pipe(err, True)]
        else:
            out, child_out = os.openpty()
            child_err = child_out
            termios.tcsetwinsize(child_out, (TERMINAL_ROWS, max(terminal_columns, 1)))
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
        """Sends a signal to the whole group, if the program has not ended."""
        if self.exit_code is None:
            _signal_group(self._popen.pid, number)

    def has_ended(self) -> bool:
        """True if the program has ended. Then its process group is killed, and ``exit_code`` is set."""
        if self.exit_code is not None:
            return True
        pid = self._popen.pid
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return False
        # Until the leader is reaped, no other process can get its number.
        _signal_group(pid, signal.SIGKILL)
        self._guard.report(f"-{pid}")
        self.exit_code = info.si_status if info.si_code == os.CLD_EXITED else SIGNALLED + info.si_status
        self._popen.wait()
        return True

    def is_gone(self, pid: int) -> bool:
        """True if no process has this number, or one of this group, which is killed when the program ends."""
        try:
            return os.getpgid(pid) == self._popen.pid
        except ProcessLookupError:
            return True

    def how_it_ended(self) -> str:
        """Returns a text such as ``exit code 3``, or ``killed by signal 9 (Killed)``."""
        code = self._popen.returncode
        return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


def _signal_group(group: int, number: signal.Signals) -> None:
    # Perhaps we may not signal any process of the group, as under sudo. It then ends by itself.
    with contextlib.suppress(PermissionError):
        os.killpg(group, number)


@contextlib.contextmanager
def handled_signals(on_signal: Callable[[int], None]) -> Iterator[int]:
    """Calls ``on_signal`` with the number of each signal that asks this process to end.

    Yields a file descriptor that can be read after such a signal, and when a child has ended.
    """
    awake, wake = net.socketpair()
    wake.setblocking(False)

    def handle(number: int, _: FrameType | None) -> None:
        on_signal(number)

    # nohup makes a process ignore SIGHUP: leave it so.
    handled = [n for n in _HANDLED if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
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
