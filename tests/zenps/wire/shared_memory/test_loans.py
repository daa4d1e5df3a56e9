"""Loans of shared memory: kept until dropped as often as lent, and counted."""

from __future__ import annotations

import threading
import weakref

import torch

from zenps.wire.shared_memory.loans import Loans


def test_memory_is_kept_until_it_was_dropped_as_often_as_lent() -> None:
    loans = Loans()
    memory = torch.zeros(100, dtype=torch.uint8)
    kept = weakref.ref(memory)
    loans.lend(7, memory)
    loans.lend(7, memory)
    loans.lend(8, torch.zeros(10))
    del memory
    assert loans.lent_bytes == 240
    loans.drop(7)
    loans.collect()
    assert loans.lent_bytes == 140
    assert kept() is not None
    loans.drop(7)
    assert kept() is not None, "dropped, but not yet collected"
    loans.collect()
    assert loans.lent_bytes == 40
    assert kept() is None
    assert [*loans._lent] == [8], "keys are offsets, of which there are very many"


def test_a_key_that_was_not_lent_is_ignored() -> None:
    loans = Loans()
    loans.lend(7, memoryview(b"1234"))
    for key in (8, 7, 7):
        loans.drop(key)
    loans.collect()
    assert loans.lent_bytes == 0


def test_any_thread_may_drop() -> None:
    loans = Loans()

    def drop() -> None:
        for _ in range(1000):
            loans.drop(7)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for _ in range(4000):
        loans.lend(7, memoryview(b"1234"))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        loans.collect()
    loans.collect()
    assert loans.lent_bytes == 0
