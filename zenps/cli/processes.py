"""Programs that run as process groups of their own, so that each can be ended with all that it started.

And how this process hears of their ends, and that they shall end.
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

TERMINAL_ROWS: Final = 24
_GUARD: Final = Path(__file__).with_name("guard.py")
_HANDLED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Pipe(NamedTuple):
    """An end from which a process's output can be read."""

    fd: int
    is_stderr: bool

    def read(self) -> bytes:
        """What has come, at least one byte; empty at the end."""
        try:
            return os.read(self.fd, 65536)
        except OSError:  # Linux reports EIO once a terminal's other end is closed
            return b""


class Guard:
    """A process that kills the groups it was told of, should this process vanish."""

    def __init__(self) -> None:
        # -I and -S: it needs the standard library alone, and starts in a third of the time.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, line: str) -> None:
        """``+GROUP``: started; ``-GROUP``: ended."""
        assert self._popen.stdin is not None
        # Somebody killed the guard: the job can go on without it.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(f"{line}\n".encode())
            self._popen.stdin.flush()

    def close(self) -> None:
        """Let the guard end, and with it whatever group has not."""
        self._popen.communicate()


class Process:
    """A running program: the leader of its own session and process group, without input.

    Args:
        name: for messages.
        command: program and arguments.
        environment: all of its variables.
        guard: is told when the group starts and when it has ended.
        terminal_columns: gives it a terminal of this width for its output; None: pipes.
        inherited_fd: a file descriptor that it shall have; None: none beside output.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Guard,
        terminal_columns: int | None = None,
        inherited_fd: int | None = None,
    ) -> None:
        self.name = name
        self.exit_code: int | None = None
        """As a shell shows it: 128 + n after signal n; None while the program runs."""
        self._guard = guard
        if terminal_columns is None:
            (out, child_out), (err, child_err) = os.pipe(), os.pipe()
            self.pipes = [Pipe(out, False), Pipe(err, True)]
        else:
            out, child_out = os.openpty()
            child_err = child_out
            termios.tcsetwinsize(child_out, (TERMINAL_ROWS, max(terminal_columns, 1)))
            self.pipes = [Pipe(out, False)]
            # Programs believe these more than their terminal, and they are of another: readline sets them.
            environment = {k: v for k, v in environment.items() if k not in ("COLUMNS", "LINES")}
        try:
            self._popen = subprocess.Popen(
                command,
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
        guard.tell(f"+{self._popen.pid}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, if the program has not ended."""
        if self.exit_code is None:
            os.killpg(self._popen.pid, number)

    def has_ended(self) -> bool:
        """Whether the program has; then what it left in its group is killed, and ``exit_code`` is set."""
        if self.exit_code is not None:
            return True
        pid = self._popen.pid
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is None:
            return False
        # Until the leader is reaped, its number cannot pass to a process that is not ours.
        os.killpg(pid, signal.SIGKILL)
        self._guard.tell(f"-{pid}")
        self.exit_code = info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status
        self._popen.wait()
        return True

    def how_it_ended(self) -> str:
        """``exit code 3``, or ``killed by signal 9 (Killed)``."""
        code = self._popen.returncode
        return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def watched(on_signal: Callable[[int], None]) -> Iterator[int]:
    """Calls ``on_signal`` with the number of a signal that asks for an end.

    Gives a file descriptor that can be read after such a signal, and when a child has ended.
    """
    awake, wake = net.socketpair()
    wake.setblocking(False)

    def handle(number: int, _: FrameType | None) -> None:
        on_signal(number)

    # nohup has SIGHUP ignored, and means it.
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
