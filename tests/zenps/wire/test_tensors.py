from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE
from zenps.wire.fields import MAX_COLUMNS, MAX_FRAGMENTS, Dtype
from zenps.wire.tensors import (
    DTYPES,
    RECEIVE_BUFFER_BYTES,
    copied_bytes,
    cut_fragments,
    dtype_name,
    tensor_bytes,
    tensor_from_bytes,
)

torch.set_num_threads(1)

every_dtype = pytest.mark.parametrize("name", DTYPES)
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (0, 4), (4, 0), (2, 0, 3), (2, 1, 3, 1, 2)]


def filled(shape: Sequence[int], name: Dtype) -> torch.Tensor:
    """Every bit pattern may occur: NaN and the like travel as they are."""
    size = int(np.prod(shape)) * DTYPES[name].itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    return bits.view(DTYPES[name]).view(tuple(shape))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor_bytes(one).tobytes() == tensor_bytes(other).tobytes()


def test_names() -> None:
    assert set(DTYPES.values()) == set(ACCUMULATE)
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(name: Dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, name)
    data = tensor_bytes(tensor)
    assert (data.format, data.nbytes, data.contiguous) == ("B", tensor.nbytes, True)
    for received in (data, memoryview(data.tobytes()), memoryview(bytearray(data))):
        got = tensor_from_bytes(received, tensor.dtype, shape)
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
        assert same_bits(got, tensor)


@every_dtype
@pytest.mark.parametrize("index", [(slice(None), 1), (slice(None), slice(1, 2)), (0, 1), (slice(3, 3), 1)])
def test_a_lone_element_is_contiguous_with_any_stride(name: Dtype, index: tuple[Any, ...]) -> None:
    view = filled((1, 5), name)[index]
    assert tensor_bytes(view).tobytes() == copied_bytes(view) == tensor_bytes(view.clone()).tobytes()


@every_dtype
def test_bytes_are_little_endian(name: Dtype) -> None:
    one = torch.tensor([1]).to(DTYPES[name])
    as_numpy = {"bfloat16": b"\x80\x3f"}.get(name) or np.array(
        [1], np.dtype(name).newbyteorder("<")
    ).tobytes()
    assert tensor_bytes(one).tobytes() == as_numpy


@every_dtype
def test_large_memory_is_not_copied(name: Dtype) -> None:
    tensor = filled((3000, 3), name)
    got = tensor_from_bytes(tensor_bytes(tensor), tensor.dtype, (9000,))
    assert got.data_ptr() == tensor.data_ptr()


def test_memory_in_a_receive_buffer_is_copied() -> None:
    """It would keep the whole buffer alive, of which libzmq makes another for each message."""
    small = filled((RECEIVE_BUFFER_BYTES,), "uint8")
    assert tensor_from_bytes(tensor_bytes(small), small.dtype, small.shape).data_ptr() != small.data_ptr()


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_copy_is_in_order_and_of_its_own(name: Dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, name)
    backwards = tensor.permute(list(reversed(range(tensor.dim()))))
    expected = [
        tensor_bytes(each.clone(memory_format=torch.contiguous_format)).tobytes()
        for each in (tensor, backwards)
    ]
    got = [copied_bytes(each) for each in (tensor, backwards)]
    tensor.zero_()
    assert got == expected


def test_a_copy_of_what_needs_a_gradient_or_is_negated_by_a_flag() -> None:
    needs = torch.ones(3, requires_grad=True)
    flagged = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert flagged.is_neg()
    assert copied_bytes(needs) == np.ones(3, np.float32).tobytes()
    assert copied_bytes(flagged) == np.array([-2, -4], np.float32).tobytes()
    assert copied_bytes(flagged[:1]) == np.array([-2], np.float32).tobytes()


@every_dtype
@pytest.mark.parametrize("rows", [5, 5000])
@pytest.mark.parametrize("offset", range(9))
def test_misaligned_memory_is_copied(name: Dtype, offset: int, rows: int) -> None:
    tensor = filled((rows, 3), name)
    # NumPy's memory is aligned to 16 bytes, a bytearray's need not be.
    memory = np.zeros(offset + tensor.nbytes, dtype=np.uint8).data
    memory[offset:] = tensor_bytes(tensor)
    got = tensor_from_bytes(memory[offset:], tensor.dtype, (rows, 3))
    assert same_bits(got, tensor)
    assert got.data_ptr() % tensor.dtype.itemsize == 0


@pytest.mark.parametrize("count", [4, RECEIVE_BUFFER_BYTES])
def test_read_only_memory_is_not_written_to(count: int) -> None:
    data = np.arange(count, dtype=np.float32).tobytes()
    got = tensor_from_bytes(memoryview(data), torch.float32, (count,))
    got += 1
    assert data == np.arange(count, dtype=np.float32).tobytes()


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_another_size_is_refused(name: Dtype, shape: tuple[int, ...]) -> None:
    size = filled(shape, name).nbytes
    for wrong in {size + 1, size - 1, size + 8, 2 * size + 2, 0} - {size, -1}:
        with pytest.raises(ProtocolError, match=f"{wrong} bytes of values") as raised:
            tensor_from_bytes(memoryview(bytes(wrong)), DTYPES[name], shape)
        assert raised.value.reason == "payload"


@settings(deadline=None, max_examples=100)
@given(
    st.binary(max_size=40),
    st.sampled_from(list(DTYPES.values())),
    st.integers(0, 1 << 62),
    st.integers(0, MAX_COLUMNS),
)
def test_any_announced_shape(data: bytes, dtype: torch.dtype, rows: int, columns: int) -> None:
    try:
        got = tensor_from_bytes(memoryview(data), dtype, (rows, columns))
    except ProtocolError:
        return
    assert got.nbytes == len(data)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(0, 200_000), st.integers(1, 300))
@example(0, 40_000, 1)
def test_fragments_cover_all_rows_and_are_no_more_than_a_message_can_number(
    begin: int, rows: int, most_rows: int
) -> None:
    cuts = cut_fragments(begin, begin + rows, most_rows)
    assert [cuts[0][0], *[stop for _, stop in cuts]] == [*[first for first, _ in cuts], begin + rows]
    sizes = {stop - first for first, stop in cuts}
    assert max(sizes) - min(sizes) <= 1
    assert len(cuts) == min(max(1, math.ceil(rows / most_rows)), MAX_FRAGMENTS)
