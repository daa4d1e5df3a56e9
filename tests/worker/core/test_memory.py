from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import pytest

from tests.integration.cluster import Cluster

BLOCKS, BLOCK_BYTES = 8, 2 << 20
PAGES = BLOCKS * BLOCK_BYTES // resource.getpagesize()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")


def faults_in_the_last_round() -> int:
    """Of some that do with memory what libzmq does with the messages of a step: all are there, then none."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    before = 0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
        for block in blocks:
            ctypes.memset(block, 1, BLOCK_BYTES)
        for block in blocks:
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_without_a_worker_glibc_gives_every_page_back() -> None:
    code = "from tests.worker.core.test_memory import *; print(faults_in_the_last_round())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) > PAGES // 2


def test_a_worker_keeps_the_pages_of_freed_messages() -> None:
    with Cluster(workers=1) as cluster:
        assert cluster.start(faults_in_the_last_round, rank=0).result() < PAGES // 10
