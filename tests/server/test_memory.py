from __future__ import annotations

import subprocess
import sys

import pytest

# Takes and frees what libzmq would for a step: six messages of 4 MiB, on a heap that glibc may trim.
# Prints the pages that had to be faulted in once it has done so a few times.
STEPS = """
import ctypes, resource, sys
from zenps.server.memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if sys.argv[1] == "keep":
    keep_freed_memory(1 << 30)
for step in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(4 << 20) for _ in range(6)]
    for block in blocks:
        libc.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", STEPS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_not_faulted_in_again() -> None:
    assert faults("leave") > 10 * max(faults("keep"), 1)
