"""Pinned memory that servers on this host read, with a CUDA runtime that only notes what it is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator

import pytest
import torch

from zenps.errors import TensorError
from zenps.finalizers import run_finalizers
from zenps.wire.shared_memory.arena import Arena
from zenps.worker.encode import pinned
from zenps.worker.encode.pinned import shared_pinned_pool

MIB = 1 << 20


DEVICE = torch.device("cuda", 3)


class Runtime:
    """``torch.cuda.cudart()``. Registered memory must stay as it is until it is unregistered."""

    def __init__(self) -> None:
        self.error = self.last_error = 0
        self.device = 0
        self.registered: dict[int, int] = {}
        self.first_bytes: list[bytes] = []
        """Of each block when it was unregistered."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1, "for every device"
        assert address % os.sysconf("SC_PAGE_SIZE") == 0
        if not self.error:
            self.registered[address] = size
        return self._ended()

    def cudaHostUnregister(self, address: int) -> int:
        self.first_bytes.append(ctypes.string_at(address, 1))
        del self.registered[address]
        return self._ended()

    def _ended(self) -> int:
        assert self.device == DEVICE.index, "a context on another device"
        self.last_error = self.error or self.last_error
        return self.error

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before

    def launch(self, *_: object, device: torch.device) -> None:
        """Any kernel of torch, which checks the last error behind it."""
        assert device == DEVICE
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(keep_bytes=MIB)
    yield made
    made.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> Iterator[Runtime]:
    run_finalizers()
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "ones", fake.launch)
    monkeypatch.setattr(pinned, "on_device", fake.on_device)
    yield fake
    arena.close()
    run_finalizers()
    assert not fake.registered


def test_each_block_is_registered_once_and_servers_find_it(arena: Arena, runtime: Runtime) -> None:
    pool = shared_pinned_pool(arena, DEVICE)
    assert pool is not None
    for _ in range(3):
        values = pool.empty((70_000,), torch.float32)
        assert values.data_ptr() in runtime.registered
        assert arena.find(values.numpy().data) is not None
        small = pool.empty((3,), torch.float32)
        assert small.data_ptr() in runtime.registered
        del values, small
    assert len(runtime.registered) == 3, "one more for the attempt"


def test_a_block_is_unregistered_before_its_pages_go(arena: Arena, runtime: Runtime) -> None:
    pool = shared_pinned_pool(arena, DEVICE)
    assert pool is not None
    values = pool.allocate(8 * MIB)
    values.fill_(1)
    del values
    run_finalizers()
    assert runtime.first_bytes == [b"\1"]
    assert os.fstat(arena.fd).st_blocks * 512 < MIB


def test_the_end_of_the_arena_unregisters_all_that_nobody_uses(arena: Arena, runtime: Runtime) -> None:
    pool = shared_pinned_pool(arena, DEVICE)
    assert pool is not None
    used, unused = pool.allocate(100_000), pool.allocate(100_000)
    del unused
    arena.close()
    run_finalizers()
    assert list(runtime.registered) == [used.data_ptr()], "a copy may still write there"
    del used
    run_finalizers()
    assert not runtime.registered


def test_memory_that_cannot_be_registered_is_logged_once(
    arena: Arena, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.error = 304
    with caplog.at_level(logging.WARNING, "zenps.worker"):
        assert shared_pinned_pool(arena, DEVICE) is None
    (record,) = caplog.records
    assert "need one more copy to reach servers on this host: cudaHostRegister cannot pin 1 bytes" in record.message
    assert "CUDA error 304" in record.message


def test_an_error_is_not_met_by_the_next_launch(arena: Arena, runtime: Runtime) -> None:
    pool = shared_pinned_pool(arena, DEVICE)
    assert pool is not None
    used = pool.allocate(100_000)
    runtime.error = 2
    with pytest.raises(TensorError, match=r"cannot pin .* \(CUDA error 2\)"):
        pool.allocate(300_000)
    runtime.launch(device=DEVICE)
    del used
    arena.close()
    for _ in range(2):  # the blocks of the attempt and of the lease
        with pytest.raises(TensorError, match=r"cudaHostUnregister of .* failed \(CUDA error 2\)"):
            run_finalizers()
        runtime.launch(device=DEVICE)
