"""Running the command ``zenps`` as a user does: as a process, in a clean environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually

ZENPS = (sys.executable, "-m", "zenps.cli")
PATIENT_SECONDS = 20.0
PATIENT_ZENPS = (
    *(sys.executable, "-c"),
    "import sys; from zenps.cli import __main__, supervisor; "
    f"supervisor.GRACE_SECONDS = {PATIENT_SECONDS}; sys.exit(__main__.main())",
)
"""On a busy machine an interpreter with torch may take longer to end than launch's usual grace."""
SETTINGS = re.compile(r"(ZENPS|DMLC)_.*|(LOCAL_)?(RANK|WORLD_SIZE)|NO_COLOR|OMP_NUM_THREADS")


class Command:
    """Starts ``zenps`` with an environment of its own, which marks every process that comes of it.

    ``temporary`` is its directory for temporary files, where ``zenps status`` finds only what came of this.
    """

    def __init__(self, cwd: Path, temporary: Path) -> None:
        self._mark = f"MARK_OF_A_TEST={uuid.uuid4().hex}"
        self._cwd = cwd
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {key: value for key, value in os.environ.items() if not SETTINGS.fullmatch(key)}
        self.environment |= dict([self._mark.split("=")]) | {"TMPDIR": str(temporary)}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """``zenps ARGUMENTS``, running; its output comes through pipes unless ``options`` say otherwise.

        Their ``program`` is run instead of ``zenps``.
        """
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = self.environment | options.pop("env", {})
        popen = subprocess.Popen(
            [*options.pop("program", ZENPS), *arguments],
            text=True,
            env=environment,
            cwd=self._cwd,
            **(pipes | options),
        )
        self._started.append(popen)
        return popen

    def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """``zenps ARGUMENTS``, ended."""
        popen = self.start(*arguments, **options)
        out, err = popen.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, popen.returncode, out, err)

    def processes(self) -> dict[int, str]:
        """Command line of every living process that came of this."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if marked:
                found[int(folder.name)] = line
        return found

    def pid_of(self, part: str) -> int:
        """The one process that has ``part`` in its command line, once it is there."""
        pids: list[int] = []

        def found() -> bool:
            pids[:] = [pid for pid, line in self.processes().items() if part in line]
            return len(pids) == 1

        eventually(found)
        return pids[0]

    def close(self) -> None:
        for popen in self._started:
            popen.kill()
            for stream in (popen.stdout, popen.stderr):
                if stream is not None:
                    stream.close()
            popen.wait()


@pytest.fixture
def zenps(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    command = Command(tmp_path, tmp_path_factory.mktemp("temporary"))
    yield command
    command.close()
    # A failed test leaves nothing to the next one either.
    left = command.processes()
    for pid in left:
        os.kill(pid, 9)
    assert left == {}


@pytest.fixture
def scheduler(zenps: Command) -> str:
    """Address of a scheduler of one worker and one server."""
    reader, writer = os.pipe()
    arguments = ("scheduler", "--print-address", str(writer), "--set", "cluster.lease_seconds=60")
    zenps.start(*arguments, pass_fds=(writer,), stdout=None, stderr=None)
    os.close(writer)
    with open(reader, encoding="ascii") as stream:
        address = stream.read().strip()
    assert address
    return address
