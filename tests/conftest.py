"""Settings that every test, and every process that a test starts, runs under."""

from __future__ import annotations

import os

# torch reads it on import: test processes share few cores, and more threads would fight for them.
os.environ["OMP_NUM_THREADS"] = "1"
