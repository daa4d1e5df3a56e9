"""SIGTERM and Ctrl-C end a role, even where Python drops the exception that their handler raises."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROLE = """
import signal, sys
from zenps.cli import commands
from zenps.scheduler import service

number, tick = int(sys.argv[1]), service._Service._on_tick

class Finalized:
    def __del__(self):
        signal.raise_signal(number)

def tick_and_drop(self, *times):
    Finalized()
    tick(self, *times)

service._Service._on_tick = tick_and_drop
if __name__ == "__main__":
    sys.exit(commands.main(["scheduler"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_whose_exception_is_dropped_ends_a_role_all_the_same(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script = tmp_path / "role.py"
    script.write_text(ROLE)
    done = subprocess.run(
        [sys.executable, str(script), str(int(number))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert "Exception ignored in" in done.stderr
    assert done.returncode == code, done.stderr
