"""Training scripts as users start them: an interpreter of their own, with its exit handlers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """``python script`` in its own folder, with no setting of ZenPS but those of ``environ``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    return subprocess.run(
        [sys.executable, script], env=clean | environ, cwd=script.parent, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
