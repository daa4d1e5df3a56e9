"""Reruns of kernel tests in a process of their own: under a sanitizer, on other sources, or both.

A sanitizer must be loaded when Python starts. One process starts with it, imports the modules that take
seconds, and then forks for each request.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

import pytest

from tests.cuda.host.build import BUILD, Sanitizer

ROOT = BUILD.parents[1]
REPORTED = 66
"""The exit status of a process that a sanitizer ended."""

LIBRARIES = {Sanitizer.THREAD: "libtsan.so", Sanitizer.ADDRESS: "libasan.so"}
OPTIONS = {
    "TSAN_OPTIONS": f"exitcode={REPORTED}:halt_on_error=1:atexit_sleep_ms=0:ignore_noninstrumented_modules=1",
    "ASAN_OPTIONS": f"exitcode={REPORTED}:detect_leaks=0",
    "UBSAN_OPTIONS": f"exitcode={REPORTED}:print_stacktrace=1",
}


class Outcome(NamedTuple):
    """The result of a rerun."""

    status: int
    """pytest's exit status, ``REPORTED``, or minus a signal's number."""
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0

    @property
    def reported(self) -> bool:
        """True if the sanitizer found a fault; ``output`` ends with its report."""
        return self.status == REPORTED


class Rerun:
    """A process that runs tests on request; a context manager."""

    def __init__(self, sanitizer: Sanitizer) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        self._output = BUILD / f"rerun-{sanitizer}-{os.getpid()}.txt"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        environment |= OPTIONS | {"ZENPS_HOST_SANITIZER": sanitizer.value}
        if sanitizer in LIBRARIES:
            # libstdc++, too: a sanitizer looks up at its start what throws, and Python alone brings none.
            environment["LD_PRELOAD"] = f"{_library(LIBRARIES[sanitizer])} {_library('libstdc++.so.6')}"
        self._process = subprocess.Popen(
            [*_fixed_addresses(), sys.executable, "-m", __name__],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, tests: Sequence[str], sources: Path | None = None, timeout_seconds: float = 220) -> Outcome:
        """Runs tests, given as pytest's arguments, with the kernels of the folder ``sources``.

        Raises:
            TimeoutError: they took longer than ``timeout_seconds``; the process is closed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"tests": [*tests], "sources": sources and str(sources), "output": str(self._output)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        if not ready:
            self.close()
            raise TimeoutError(f"{' '.join(tests)}: expected an end within {timeout_seconds} s")
        status = int(self._process.stdout.readline() or -signal.SIGKILL)
        return Outcome(status, self._output.read_text(encoding="utf-8", errors="replace"))

    @property
    def is_closed(self) -> bool:
        return self._process.returncode is not None

    def close(self) -> None:
        if self.is_closed:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=10)
        self._output.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _library(name: str) -> str:
    done = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60, check=True
    )
    path = Path(done.stdout.strip()).resolve()
    if not path.is_file():
        raise RuntimeError(
            f"{name} is missing: expected it beside g++; install the libraries of its sanitizers"
        )
    return str(path)


def _fixed_addresses() -> list[str]:
    """The command prefix for fixed addresses: ThreadSanitizer does not support all random ones."""
    prefix = ["setarch", platform.machine(), "-R"]
    allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=False).returncode == 0
    return prefix if allowed else []


def _serve() -> None:
    # What takes seconds, before the forks.
    import hypothesis.strategies

    import tests.cuda.host.launcher  # noqa: F401

    # Of tests that run again to fail: one failure is enough, nobody asks for the smallest.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("rerun", phases=phases, database=None)

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _answer(**request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _answer(tests: list[str], sources: str | None, output: str) -> NoReturn:
    with open(output, "w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if sources is not None:
        os.environ["ZENPS_HOST_SOURCES"] = sources
    options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=rerun")
    # Reports go to the file that 2 is now; and rewriting hypothesis's asserts takes a second.
    status = pytest.main([*options, "--capture=sys", "--assert=plain", *tests])
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
