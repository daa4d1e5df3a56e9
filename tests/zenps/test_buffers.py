from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from zenps.buffers import SMALLEST_POOLED_BYTES, BufferPool
from zenps.wire.tensors import tensor_bytes

torch.set_num_threads(1)

DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64]
LARGE = (50_000,)
PLENTY = 1 << 30
MIB = 1 << 20


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 80), max_size=4), st.sampled_from(DTYPES)), max_size=6),
)
def test_tensors_are_as_asked_for_and_share_no_memory(wanted: list[tuple[list[int], torch.dtype]]) -> None:
    pool = BufferPool(PLENTY)
    for _ in range(2):
        tensors = [pool.empty(tuple(shape), dtype) for shape, dtype in wanted]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
            assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
            assert tensor.is_contiguous()
            assert bool((tensor == number).all())


def test_memory_is_used_again() -> None:
    pool = BufferPool(PLENTY)
    first = pool.empty(LARGE, torch.float32)
    address = first.data_ptr()
    assert pool.kept_bytes == 0
    del first
    assert pool.kept_bytes >= 4 * LARGE[0]
    assert pool.empty(LARGE, torch.float32).data_ptr() == address
    # Steps that differ a little share a buffer, whatever their shape and dtype.
    assert pool.empty((LARGE[0] // 2 - 99, 4), torch.float16).data_ptr() == address


@pytest.mark.parametrize("count", [SMALLEST_POOLED_BYTES, SMALLEST_POOLED_BYTES + 1, 100_001, 1_234_567])
def test_a_buffer_is_at_most_a_quarter_too_large(count: int) -> None:
    pool = BufferPool(PLENTY)
    pool.empty((count,), torch.uint8)
    assert count <= pool.kept_bytes <= count * 5 / 4


@pytest.mark.parametrize(
    ("wanted", "size"), [(1, 1), (5, 8), (4096, 4096), (4097, 8192), (1_234_567, 1 << 21)]
)
def test_blocks_of_pinned_memory_are_powers_of_two(wanted: int, size: int) -> None:
    """As torch's allocator of pinned memory rounds: it would waste the rest of any other block."""
    pool = BufferPool(PLENTY, smallest_bytes=1, sizes_per_doubling=1)
    pool.empty((wanted,), torch.uint8)
    assert pool.kept_bytes == size


def test_small_tensors_are_not_pooled() -> None:
    pool = BufferPool(PLENTY)
    pool.empty((SMALLEST_POOLED_BYTES - 1,), torch.uint8)
    assert pool.kept_bytes == 0


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda tensor: tensor[5:9],
    "detached": lambda tensor: tensor.detach(),
    "array": lambda tensor: tensor.numpy()[3:],
    "frame": lambda tensor: tensor_bytes(tensor[7:]),
    "frame of a frame": lambda tensor: memoryview(tensor_bytes(tensor))[8:].cast("B"),
    "parameter": lambda tensor: torch.nn.Parameter(tensor),
    "sparse": lambda tensor: torch.sparse_coo_tensor(
        torch.arange(len(tensor))[None], tensor, check_invariants=False
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_returns_only_with_its_last_holder(holder: str) -> None:
    pool = BufferPool(PLENTY)
    tensor = pool.empty(LARGE, torch.float32)
    held = HOLDERS[holder](tensor)
    del tensor
    assert pool.kept_bytes == 0
    del held
    assert pool.kept_bytes > 0


def test_no_more_than_the_limit_is_kept() -> None:
    pool = BufferPool(keep_bytes=3 * SMALLEST_POOLED_BYTES)
    tensors = [pool.empty((SMALLEST_POOLED_BYTES,), torch.uint8) for _ in range(5)]
    del tensors
    assert pool.kept_bytes == 3 * SMALLEST_POOLED_BYTES
    assert "kept_bytes=196608" in repr(pool)


def test_blocks_of_sizes_that_are_not_used_again_make_room() -> None:
    allocated: list[int] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        allocated.append(size)
        return np.empty(size, np.uint8)

    pool = BufferPool(33 * MIB, allocate)
    for size in range(3, 9):  # each once; together they fill the pool
        pool.empty((size * MIB,), torch.uint8)
    assert pool.kept_bytes == 33 * MIB
    for _ in range(3):
        step = [pool.empty((count,), torch.float32) for count in (5 << 17, 5 << 16, 7 << 16) * 2]
        del step
    assert len(allocated) == 6 + 6
    assert pool.kept_bytes <= 33 * MIB


def test_a_block_makes_no_room_for_one_of_an_older_size() -> None:
    pool = BufferPool(keep_bytes=8 * MIB)
    older = pool.empty((6 * MIB,), torch.uint8)
    newer = pool.empty((4 * MIB,), torch.uint8)
    del newer
    del older
    assert pool.kept_bytes == 4 * MIB


def test_a_block_beyond_the_limit_makes_no_room_for_itself() -> None:
    pool = BufferPool(keep_bytes=8 * MIB)
    pool.empty((4 * MIB,), torch.uint8)
    pool.empty((9 * MIB,), torch.uint8)
    assert pool.kept_bytes == 4 * MIB


def test_the_pool_may_go_before_its_tensors() -> None:
    tensor = BufferPool(PLENTY).empty(LARGE, torch.float32)
    tensor.fill_(3)
    assert float(tensor.sum()) == 3 * LARGE[0]


def test_threads_never_get_the_same_memory() -> None:
    pool = BufferPool(PLENTY)
    start = threading.Barrier(4)
    clashes: list[tuple[int, int]] = []

    def use(number: int) -> None:
        start.wait(timeout=10)
        for turn in range(300):
            tensor = pool.empty((SMALLEST_POOLED_BYTES + 1000 * (turn % 3),), torch.uint8)
            tensor.fill_(number)
            if not bool((tensor == number).all()):
                clashes.append((number, turn))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert clashes == []
    assert pool.kept_bytes <= 4 * 3 * 2 * SMALLEST_POOLED_BYTES


def test_pooled_memory_is_writable_and_aligned() -> None:
    tensor = BufferPool(PLENTY).empty((100, 100, 10), torch.float64)
    assert tensor.numpy().flags.writeable
    assert tensor.numpy().flags.aligned


@pytest.mark.parametrize("size_bytes", [SMALLEST_POOLED_BYTES, 1 << 20, 12_345_678])
def test_rows_begin_with_a_cache_line(size_bytes: int) -> None:
    pool = BufferPool(PLENTY)
    for _ in range(2):  # fresh, and used again
        assert pool.allocate(size_bytes).data_ptr() % 64 == 0
