"""Training runs of the benchmarks: a cluster on this machine trains one case, and rank 0 writes its curve."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 900

Curve = TypeVar("Curve")


def run_training(
    script: str, case: msgspec.Struct, curve: type[Curve], workers: int, servers: int, sets: Iterable[str]
) -> Curve:
    """Runs ``script CASE FILE`` on each worker; returns the curve that rank 0 has written.

    Args:
        script: in this folder.
        case: what to train, given as JSON.
        curve: the type of the result.
        workers, servers: how many.
        sets: settings, as ``section.field=value``.

    Raises:
        SystemExit: it failed; the message is its output.
    """
    with tempfile.TemporaryDirectory(prefix="zenps.training.") as folder:
        output = Path(folder, "curve.json")
        launch = [sys.executable, "-m", "zenps.cli", "launch"]
        launch += ["--workers", str(workers), "--servers", str(servers)]
        launch += [part for item in (*sets, "log.level=warning") for part in ("--set", item)]
        worker = [sys.executable, str(HERE / script), msgspec.json.encode(case).decode()]
        run_or_exit([*launch, "--", *worker, str(output)], TIMEOUT_SECONDS)
        return msgspec.json.decode(output.read_bytes(), type=curve)


def run_or_exit(
    command: Sequence[str], timeout_seconds: float, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a command with one thread per process: every run adds in the same order, and cores are few.

    Args:
        command: with its arguments.
        timeout_seconds: how long it may take.
        environment: variables beside those of this process.

    Raises:
        SystemExit: it failed, or took too long; the message is its output.
    """
    try:
        subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_seconds,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        outcome, output = f"exit status {error.returncode}", error.output
    except subprocess.TimeoutExpired as error:
        outcome, output = f"expected its end within {timeout_seconds:g} s", error.output
    else:
        return
    sys.exit(f"{' '.join(command)}: {outcome}\n{(output or b'').decode(errors='replace')}")
