"""How workers are connected: gloo, of which each failure names a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zenps.worker.transport.peer_group import GlooGroup, GroupError

DEADLINE_SECONDS = 20.0


@pytest.fixture
def groups() -> Iterator[list[GlooGroup]]:
    """Two ranks, connected."""
    given: list[bytes] = [b"", b""]
    barrier = threading.Barrier(2, timeout=DEADLINE_SECONDS)

    def connect(rank: int) -> GlooGroup:
        def share(own: bytes) -> Sequence[bytes]:
            given[rank] = own
            barrier.wait()
            both = list(given)
            barrier.wait()
            return both

        return GlooGroup(rank, 2, "127.0.0.1", share)

    with ThreadPoolExecutor(2) as threads:
        connected = list(threads.map(connect, range(2)))
    yield connected
    for group in connected:
        group.abort()


def test_tensors_are_swapped_and_counted(groups: list[GlooGroup]) -> None:
    received = [torch.zeros(3), torch.zeros(3)]

    def swap(rank: int) -> None:
        groups[rank].exchange({1 - rank: [torch.full((3,), rank + 1.0)]}, {1 - rank: [received[rank]]})

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(swap, range(2)))
    assert [tensor.tolist() for tensor in received] == [[2.0] * 3, [1.0] * 3]
    assert [(group.sent_bytes, group.received_bytes) for group in groups] == [(12, 12)] * 2


def test_what_is_posted_comes_before_what_is_exchanged(groups: list[GlooGroup]) -> None:
    first, second = groups
    for value in (1.0, 2.0):
        first.post({1: torch.full((3,), value)})
    received = [torch.zeros(3) for _ in range(3)]
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(first.exchange, {1: [torch.full((3,), 3.0)]}, {})
        for tensor in received:
            second.exchange({}, {0: [tensor]})
        sent.result(DEADLINE_SECONDS)
    assert [tensor[0].item() for tensor in received] == [1.0, 2.0, 3.0]
    assert first.sent_bytes == second.received_bytes == 36


def test_who_is_gone_is_named_at_each_further_exchange(groups: list[GlooGroup]) -> None:
    mine, other = groups
    other.abort()
    until = time.monotonic() + DEADLINE_SECONDS
    errors: list[GroupError] = []
    # The first may still be sent to nobody, the next is told while it waits, and all that follow at once.
    while len(errors) < 3:
        assert time.monotonic() < until, f"{errors} of a rank that is gone"
        try:
            mine.exchange({1: [torch.ones(3)]}, {1: [torch.zeros(3)]})
        except GroupError as error:
            errors.append(error)
    assert {error.rank for error in errors} == {1}
    with pytest.raises(GroupError):
        mine.allreduce(torch.ones(3))
