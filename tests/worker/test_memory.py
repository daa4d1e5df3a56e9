from __future__ import annotations

import subprocess
import sys

import pytest

# What libzmq does with the messages of a step: all are there, then none.
ROUNDS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
BYTES = 2 << 20
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    blocks = [libc.malloc(BYTES) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, BYTES)
    for block in blocks:
        libc.free(block)
print(faults() - before)
"""
FREE = "from zenps.worker.memory import free_a_large_block\nfree_a_large_block()\n"
PAGES = 8 * (2 << 20) // 4096


def faults_in_the_last_round(code: str) -> int:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_messages_keep_their_pages() -> None:
    assert faults_in_the_last_round("import zenps.worker.memory\n" + ROUNDS) > PAGES // 2
    assert faults_in_the_last_round(FREE + ROUNDS) < PAGES // 10
