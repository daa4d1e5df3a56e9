"""Trace recording: starts the user's training, and ends it when enough pushes are recorded."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zenps.cli.launch import launch
from zenps.config.settings import Config
from zenps.errors import ConfigError
from zenps.observe.recording import concatenate


def record(
    config: Config, command: Sequence[str], environ: Mapping[str, str], steps: int, trace: Path
) -> int:
    """Runs ``command`` as the workers of ``config``, until each has pushed ``steps`` gradients of a tensor.

    Its output goes to stderr.

    Args:
        config, command, environ: as for :func:`zenps.cli.launch.launch`.
        steps: the number of recorded steps.
        trace: the file to write.

    Returns:
        The exit code of ``launch``; unless it is 0 there is no trace.

    Raises:
        ConfigError: ``trace`` cannot be written, or no worker called ``zenps.init()``.
    """
    with tempfile.TemporaryDirectory(prefix="zenps-plan-") as folder:
        told = {"ZENPS_PLAN_TRACE": folder, "ZENPS_PLAN_STEPS": str(steps)}
        with _stdout_to_stderr():
            code = launch(config, command, {**environ, **told})
        if code:
            return code
        parts = sorted(Path(folder).iterdir())
        if not parts:
            raise ConfigError("CMD", " ".join(command), "a training that calls zenps.init()")
        try:
            concatenate(parts, trace)
        except OSError as error:
            raise ConfigError(
                "--trace", str(trace), f"a file that can be written ({error.strerror})"
            ) from None
    return 0


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(ours, 1)
        os.close(ours)
