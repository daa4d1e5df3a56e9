"""What workers push while a server does not read: bounded in bytes, whatever their number."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest

from tests.dealer import connect_dealer
from tests.waiting import eventually
from zenps.config.settings import MAX_WORKERS, Config
from zenps.config.sizes import message_bytes
from zenps.server.receive_queue import size_receive_queue
from zenps.wire.sockets import MAX_UNREAD_MESSAGES, context

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def config_of(workers: int, budget_bytes: int = GIB, chunk_bytes: int = 8 * MIB) -> Config:
    config, replace = Config(), msgspec.structs.replace
    cluster = replace(config.cluster, workers=workers, server_budget_bytes=budget_bytes)
    return replace(config, cluster=cluster, sync=replace(config.sync, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize("chunk_bytes", [4 * KIB, 64 * KIB, 8 * MIB, 128 * MIB])
@pytest.mark.parametrize("workers", [1, 2, 3, 8, 15, 16, 17, 32, 64, 1000, MAX_WORKERS])
def test_unread_pushes_and_rounds_fit_the_budget_together(workers: int, chunk_bytes: int) -> None:
    config = config_of(workers, chunk_bytes=chunk_bytes)
    queue = size_receive_queue(config)
    assert queue.unread_bytes == workers * (queue.max_messages + 1) * message_bytes(config)
    assert queue.unread_bytes + queue.rounds_bytes == GIB
    assert queue.rounds_bytes >= GIB // 2
    assert 1 <= queue.max_messages <= MAX_UNREAD_MESSAGES


def test_small_chunks_are_bounded_by_their_number() -> None:
    queue = size_receive_queue(config_of(2, chunk_bytes=64 * KIB))
    assert queue.max_messages == MAX_UNREAD_MESSAGES
    assert queue.rounds_bytes == GIB - 2 * 65 * 128 * KIB


# Binds as a server with these settings does; reads nothing. Says by how much it has grown when it is asked.
STANDS_STILL = """
import sys
from pathlib import Path
from tests.server.test_receive_queue import config_of
from zenps.server.receive_queue import size_receive_queue
from zenps.wire.sockets import bind_router, context

def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

queue = size_receive_queue(config_of(*map(int, sys.argv[1:])))
with context() as ctx:
    socket, address = bind_router(ctx, "127.0.0.1", 0, 1 << 28, max_unread=queue.max_messages)
    print(address, flush=True)
    before = resident_bytes()
    for _ in sys.stdin:
        print(resident_bytes() - before, flush=True)
"""

WORKERS, CHUNK_BYTES, PUSHES = 4, 1 * MIB, 40


def test_a_server_that_does_not_read_takes_no_more_than_it_counts() -> None:
    budget_bytes = 128 * MIB
    config = config_of(WORKERS, budget_bytes, CHUNK_BYTES)
    queue = size_receive_queue(config)
    arguments = [sys.executable, "-c", STANDS_STILL, str(WORKERS), str(budget_bytes), str(CHUNK_BYTES)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        questions, answers = server.stdin, server.stdout

        def grown_bytes() -> int:
            questions.write("\n")
            questions.flush()
            return int(answers.readline())

        address = answers.readline().strip()
        with context() as ctx:
            message = memoryview(bytes(message_bytes(config)))
            for number in range(WORKERS):
                worker = connect_dealer(ctx, address, b"worker%d" % number, 1 << 28)
                for _ in range(PUSHES):
                    worker.send_multipart([b"envelope", b"positions", message], copy=False)
            eventually(lambda: grown_bytes() > queue.unread_bytes / 2)
            time.sleep(1)  # in which it would take the rest
            assert grown_bytes() < queue.unread_bytes + 8 * MIB
            ctx.destroy(linger=0)
    assert queue.unread_bytes == 32 * MIB
