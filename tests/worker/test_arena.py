"""Memory that ranks of one host share: read through the descriptor alone, used again, and given back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from zenps.errors import ProtocolError
from zenps.wire.tensors import tensor_from_bytes
from zenps.worker.levels.arena import CAPACITY_BYTES, Arena, Window

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
    offset, memory = arena.lease(10_000)
    other, _ = arena.lease(10_000)
    memory.fill_(7)
    seen = tensor_from_bytes(window.look(offset, 10_000), torch.uint8, (10_000,))
    assert torch.equal(seen, memory)
    memory[0] = 8
    assert seen[0] == 8, "a copy"
    assert other != offset
    del memory
    again, _ = arena.lease(10_000)
    assert again == offset


def test_what_is_too_much_to_keep_goes_back_to_the_system(arena: Arena) -> None:
    for _ in range(3):
        offset, memory = arena.lease(8 * MIB)
        memory.fill_(1)
        assert 8 * MIB <= taken_bytes(arena) < 9 * MIB
        del memory
        assert taken_bytes(arena) == 0
    again, memory = arena.lease(8 * MIB)
    assert again == offset
    assert not torch.any(memory)


def test_a_place_outside_is_refused(arena: Arena) -> None:
    with pytest.raises(ProtocolError, match="not in what a rank shares"):
        Window(arena.fd).look(CAPACITY_BYTES - 10, 11)


def test_it_has_no_name(arena: Arena) -> None:
    arena.lease(MIB)
    assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:zenps (deleted)"
