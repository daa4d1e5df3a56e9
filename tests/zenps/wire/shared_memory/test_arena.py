"""Shared memory of one host: read through the descriptor alone, used again, and given back."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.descriptors import open_descriptors
from zenps.config.settings import ClusterConfig
from zenps.errors import ProtocolError, TensorError
from zenps.finalizers import run_finalizers
from zenps.wire.shared_memory.arena import (
    CAPACITY_BYTES,
    SEALS,
    Arena,
    Window,
    map_pages,
    open_arena,
    window_of,
)
from zenps.wire.tensors import tensor_from_bytes

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(keep_bytes=MIB)
    yield made
    made.close()


def taken_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_what_is_written_is_seen_and_used_again(arena: Arena) -> None:
    window = Window(arena.fd)
    offset, memory = arena.allocate(10_000)
    other, beside = arena.allocate(10_000)
    memory.fill_(7)
    seen = tensor_from_bytes(window.read(offset, 10_000), torch.uint8, (10_000,))
    assert torch.equal(seen, memory)
    memory[0] = 8
    assert seen[0] == 8, "a copy"
    assert other != offset
    beside.fill_(9)
    assert window.read(other, 10_000) == b"\t" * 10_000
    del memory
    again, _ = arena.allocate(10_000)
    assert again == offset


def test_what_is_too_much_to_keep_goes_back_to_the_system(arena: Arena) -> None:
    for _ in range(3):
        offset, memory = arena.allocate(8 * MIB)
        memory.fill_(1)
        assert 8 * MIB <= taken_bytes(arena) < 9 * MIB
        del memory
        run_finalizers()
        assert taken_bytes(arena) == 0
    again, memory = arena.allocate(8 * MIB)
    assert again == offset
    assert not torch.any(memory)


def test_what_is_ones_own_is_changed_by_nobody_else(arena: Arena) -> None:
    window, ended = Window(arena.fd), list[str]()
    offset, memory = arena.allocate(100_000)
    memory.fill_(7)
    own = tensor_from_bytes(
        window.map_private(offset + 100, 90_000, ended.append, "one"), torch.uint8, (90_000,)
    )
    other = tensor_from_bytes(
        window.map_private(offset, 100_000, ended.append, "other"), torch.uint8, (100_000,)
    )
    own[0] = 8
    assert [each.item() for each in (memory[100], other[100], own[0], own[1])] == [7, 7, 8, 7]
    part = own[5:]
    del own
    run_finalizers()
    assert not ended, "somebody refers to a part of it"
    del part
    run_finalizers()
    assert ended == ["one"]
    del other
    run_finalizers()
    assert ended == ["one", "other"]


def test_private_ranges_keep_no_descriptors(arena: Arena) -> None:
    window = Window(arena.fd)
    offset, memory = arena.allocate(MIB)
    memory.fill_(7)
    before = open_descriptors()
    own = [
        window.map_private(offset + 1000 * number, size, lambda: None)
        for number in range(50)
        for size in (100, 100_000)
    ]
    assert open_descriptors() == before
    assert all(set(bytes(each)) == {7} for each in own)


def test_a_mapping_ends_with_its_last_reference(arena: Arena) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:zenps")

    gc.collect()
    run_finalizers()
    window, before = Window(arena.fd), mapped()
    own = window.map_private(0, MIB, lambda: None)
    assert mapped() == before + 1
    del own
    run_finalizers()
    assert mapped() == before


def test_a_small_range_is_copied_and_given_back_at_once(arena: Arena) -> None:
    offset, memory = arena.allocate(8192)
    memory.fill_(7)
    ended: list[str] = []
    own = Window(arena.fd).map_private(offset, 8192, ended.append, "one")
    assert ended == ["one"]
    memory.fill_(8)
    assert bytes(own) == b"\7" * 8192


@pytest.mark.parametrize("size_bytes", [0, 1, 8192])
def test_the_smallest_are_ones_own_too(arena: Arena, size_bytes: int) -> None:
    offset, memory = arena.allocate(8192)
    memory.fill_(7)
    own = Window(arena.fd).map_private(offset, size_bytes, lambda: None)
    assert bytes(own) == b"\7" * size_bytes


def test_what_others_may_have_stays_when_its_arena_closes(arena: Arena) -> None:
    offset, memory = arena.allocate(8 * MIB)
    memory.fill_(7)
    own = Window(arena.fd).map_private(offset, 8 * MIB, lambda: None)
    closing = Arena(keep_bytes=0)
    offset, allocation = closing.allocate(MIB)
    allocation.fill_(9)
    seen = Window(closing.fd).map_private(offset, MIB, lambda: None)
    closing.close()
    closing.close()
    del allocation, closing
    run_finalizers()
    assert set(bytes(seen)) == {9}
    if os.fork() == 0:  # as DataLoader does
        del memory
        run_finalizers()
        os._exit(0)
    os.wait()
    assert set(bytes(own)) == {7}


@pytest.mark.parametrize(
    "read", [Window.read, lambda window, *place: window.map_private(*place, lambda: None)]
)
def test_an_offset_outside_is_refused(arena: Arena, read: Callable[..., memoryview]) -> None:
    with pytest.raises(ProtocolError, match="of shared memory, expected at most"):
        read(Window(arena.fd), CAPACITY_BYTES - 10, 11)


def test_closing_frees_the_descriptor_and_later_no_other(tmp_path: Path) -> None:
    closing = Arena(keep_bytes=MIB)
    number = closing.fd
    closing.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with (tmp_path / "file").open("wb") as file:
        if file.fileno() != number:
            os.dup2(file.fileno(), number)
        closing.close()
        os.fstat(number)
        if file.fileno() != number:
            os.close(number)


def test_a_memfd_of_another_size_is_no_arena() -> None:
    other = os.memfd_create("zenps", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, MIB)
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(OSError, match="not that of an arena"):
        window_of(other)


def test_a_mapping_that_the_system_refuses_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_pages(1 << 20, 4096, 0)


def test_it_has_no_name(arena: Arena) -> None:
    arena.allocate(MIB)
    assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:zenps (deleted)"


def test_what_is_copied_is_found(arena: Arena) -> None:
    copy = arena.copy(memoryview(b"12345678" * 1000))
    offset = arena.find(copy)
    assert offset is not None
    assert Window(arena.fd).read(offset, 8000) == b"12345678" * 1000
    assert arena.find(copy[8:16]) == offset + 8
    assert arena.find(memoryview(b"12345678")) is None


def test_what_is_no_arena_is_refused(arena: Arena) -> None:
    unsealed = os.memfd_create("zenps", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, CAPACITY_BYTES)
    with pytest.raises(OSError, match="not that of an arena"):
        window_of(unsealed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(unsealed)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 1)


def test_without_addresses_to_spare_nothing_is_shared(caplog: pytest.LogCaptureFixture) -> None:
    before = open_descriptors()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (CAPACITY_BYTES, limits[1]))
    try:
        assert open_arena(ClusterConfig(), MIB) is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert open_descriptors() == before
    assert "will travel by TCP within this host, too: no memory to share" in caplog.text
    assert open_arena(ClusterConfig(same_host="tcp"), MIB) is None


def test_memory_of_a_copy_that_is_not_pooled_goes_back_to_the_system(arena: Arena) -> None:
    for is_pooled in (False, True):
        copy = arena.copy(memoryview(bytes(1 << 20)), is_pooled=is_pooled)
        assert arena.find(copy) is not None
        del copy
        assert (arena.pool.kept_bytes > 0) == is_pooled


def test_an_arena_that_was_full_has_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(keep_bytes=0)
    monkeypatch.setattr("zenps.wire.shared_memory.arena.CAPACITY_BYTES", 8 * MIB)
    offset, memory = arena.allocate(4 * MIB)
    with pytest.raises(TensorError, match=f"{12 * MIB} bytes of shared memory in flight, expected at most"):
        arena.allocate(8 * MIB)
    del memory
    again, memory = arena.allocate(4 * MIB)
    other, _ = arena.allocate(4 * MIB)
    assert (again, other) == (offset, 4 * MIB)
    with pytest.raises(TensorError):
        arena.allocate(1)
    del memory
    assert arena.allocate(4 * MIB)[0] == offset
    arena.close()
