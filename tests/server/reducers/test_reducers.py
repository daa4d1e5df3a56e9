from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.server.reducers.reduction import (
    Frames,
    OrdinaryMemory,
    blocks_push,
    dense_push,
    read,
    reduce,
    sparse_push,
)
from zenps.buffers import BufferPool
from zenps.codecs.base import CodecName, ValueForm
from zenps.codecs.registry import CODECS
from zenps.codecs.values import VALUE_CODECS
from zenps.errors import ProtocolError
from zenps.kernels.base import ACCUMULATE
from zenps.server.reducers.base import Payload
from zenps.server.reducers.registry import make_reducers
from zenps.wire.blocks import NONE_LEFT, decode_blocks
from zenps.wire.fields import MAX_RESULT_FRAGMENTS, Dtype, Kind
from zenps.wire.frames import Decoder, encode
from zenps.wire.messages import Failure, FromServer, Push, Result
from zenps.wire.sockets import MAX_QUEUED_MESSAGES
from zenps.wire.tensors import (
    DTYPES,
    RECEIVE_BUFFER_BYTES,
    cut_fragments,
    tensor_bytes,
    tensor_from_bytes,
)

torch.set_num_threads(1)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SUMMED = [*FLOATS, torch.int64]
NAN, INF = float("nan"), float("inf")


def reduce_pushes(pushes: Sequence[tuple[Push, Frames]]) -> tuple[Result, Tensor | None, Tensor]:
    """What a worker reads from the answer: positions (None if dense) and values."""
    result, frames = reduce([read(push, frames) for push, frames in pushes])
    push = pushes[0][0]
    assert (result.tensor, result.step, result.chunk) == (push.tensor, push.step, push.chunk)
    values = tensor_from_bytes(frames[-1], DTYPES[push.dtype], (result.rows, push.columns))
    if result.codec == "none":
        assert len(frames) == 1
        return result, None, values
    return result, torch.from_numpy(CODECS[result.codec].decode(frames[0], result.rows, push.span)), values


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """But for NaN: an addition makes of it any other."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    same = got.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((same | (got.isnan() & expected.isnan()) if got.is_floating_point() else same).all())


def any_values(count: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values whose sum depends on the order, with some special ones among them."""
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, (count, columns), generator=generator)
    scale = 2.0 ** torch.randint(-10, 10, (count, columns), generator=generator)
    values = (torch.randn(count, columns, generator=generator) * scale).to(dtype)
    special = torch.tensor([0.0, -0.0, NAN, INF, -INF], dtype=dtype)
    drawn = torch.randint(0, 40, (count, columns), generator=generator)
    return torch.where(drawn < 5, special[drawn.clamp(max=4)], values)


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 1 << 30),
    ranks=st.integers(1, 5),
    span=st.integers(1, 60),
    columns=st.sampled_from([0, 1, 2, 3, 48]),
    dtype=st.sampled_from(SUMMED),
    codec=st.sampled_from(list(CODECS)),
    average=st.booleans(),
)
def test_sparse_sums_are_those_of_a_loop_over_ranks(
    seed: int, ranks: int, span: int, columns: int, dtype: torch.dtype, codec: CodecName, average: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    average = average and dtype.is_floating_point
    codec = codec if columns else "coo"
    pushes, sums = [], dict[int, Tensor]()
    for rank in range(ranks):
        present = torch.rand(span, generator=generator) < torch.rand(1, generator=generator)
        positions = present.nonzero().squeeze(1).tolist()
        values = any_values(len(positions), columns, dtype, generator)
        pushes.append(sparse_push(rank, positions, values, span, codec, average))
        for position, row in zip(positions, values.to(ACCUMULATE[dtype]), strict=True):
            sums[position] = sums[position] + row if position in sums else row
    result, positions_got, values_got = reduce_pushes(pushes)
    assert result.rows == len(sums)
    assert result.pushed == sum(push.rows for push, _ in pushes)
    assert positions_got is not None
    assert positions_got.tolist() == sorted(sums)
    rows = [sums[position] / ranks if average else sums[position] for position in sorted(sums)]
    expected = torch.stack(rows).to(dtype) if rows else torch.empty(0, columns, dtype=dtype)
    assert same_bits(values_got, expected)


@pytest.mark.parametrize("form", list(VALUE_CODECS))
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_quantized_values_are_summed_as_float32_and_quantized_again(
    kind: str, ranks: int, form: ValueForm
) -> None:
    """The average of ``ranks`` times the same values, which each form can write, is these values."""
    codec, columns = VALUE_CODECS[form], 1 if kind == "dense" else 3
    values = torch.tensor([[64.0], [-127.0], [0.0], [5.0]]).repeat(1, columns)
    coded = torch.empty(codec.size_bytes(4, columns), dtype=torch.uint8)
    codec.encode(values, coded, 5)
    pushes = []
    for rank in range(ranks):
        push, frames = sparse_push(rank, [0, 2, 3, 5], values, 6, average=True)
        if kind == "dense":
            push = msgspec.structs.replace(push, kind="dense", codec="none", span=4)
        push = msgspec.structs.replace(push, values=form)
        pushes.append(read(push, (*(frames[:1] if kind == "sparse" else ()), tensor_bytes(coded))))
    _, sums = reduce(pushes)
    got = torch.empty(4, columns)
    codec.decode(memoryview(bytearray(sums[-1])), got)
    assert sums[-1].nbytes == coded.nbytes
    assert got.tolist() == values.tolist()


@settings(deadline=None, max_examples=120)
@given(
    seed=st.integers(0, 1 << 30),
    contributes=st.lists(st.booleans(), min_size=1, max_size=5),
    span=st.integers(1, 300),
    dtype=st.sampled_from(SUMMED),
    average=st.booleans(),
)
def test_dense_sums_are_those_of_a_loop_over_ranks(
    seed: int, contributes: list[bool], span: int, dtype: torch.dtype, average: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    average = average and dtype.is_floating_point
    pushes, total = [], None
    for rank, present in enumerate(contributes):
        values = any_values(span, 1, dtype, generator).view(-1)
        pushes.append(dense_push(rank, values if present else None, values, average))
        if present:
            wide = values.to(ACCUMULATE[dtype])
            total = wide.clone() if total is None else total + wide
    result, positions, values = reduce_pushes(pushes)
    assert positions is None
    if total is None:
        assert (result.rows, len(values)) == (0, 0)
        return
    # An average is over all ranks, also those that only take part.
    expected = (total / len(contributes) if average else total).to(dtype)
    assert same_bits(values.view(-1), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype: torch.dtype) -> None:
    one = sparse_push(0, [0, 1, 2, 3], torch.tensor([[-0.0], [2.5], [NAN], [INF]], dtype=dtype), 9)
    two = sparse_push(1, [1, 2, 3, 8], torch.tensor([[-2.5], [1], [-INF], [-INF]], dtype=dtype), 9)
    _, positions, values = reduce_pushes([one, two])
    assert positions is not None
    assert positions.tolist() == [0, 1, 2, 3, 8]  # 1 cancels to zero, and comes back
    assert same_bits(values, torch.tensor([[-0.0], [0.0], [NAN], [NAN], [-INF]], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_16_bit_floats_are_summed_as_float32_and_rounded_once(dtype: torch.dtype, kind: str) -> None:
    """1 + 2⁻¹² thirty-two times: in the dtype itself, every addition would be lost."""
    values = [torch.full((2, 1), 1.0 if rank == 0 else 2.0**-12, dtype=dtype) for rank in range(33)]
    if kind == "dense":
        pushes = [dense_push(rank, each.view(-1), each.view(-1)) for rank, each in enumerate(values)]
    else:
        pushes = [sparse_push(rank, [3, 4], each, 9) for rank, each in enumerate(values)]
    _, _, got = reduce_pushes(pushes)
    assert same_bits(got.view(2, 1), torch.full((2, 1), 1 + 32 * 2.0**-12, dtype=dtype))
    assert float(got.view(-1)[0]) > 1


def test_averages_are_rounded_once() -> None:
    """(65504 + 65504) / 2 overflows float16 unless the division comes before the rounding."""
    largest = torch.tensor([[65504.0]], dtype=torch.float16)
    for pushes in (
        [sparse_push(rank, [0], largest, 1, average=True) for rank in (0, 1)],
        [dense_push(rank, largest.view(-1), largest.view(-1), average=True) for rank in (0, 1)],
    ):
        _, _, values = reduce_pushes(pushes)
        assert same_bits(values.view(1, 1), largest)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_an_average_is_over_all_ranks_also_those_that_others_push_for(kind: str) -> None:
    ones = torch.ones(1, 1)
    for_three, for_itself = (
        sparse_push(rank, [0], ones, 1, average=True)
        if kind == "sparse"
        else dense_push(rank, ones.view(-1), ones.view(-1), average=True)
        for rank in (0, 3)
    )
    for_three = (msgspec.structs.replace(for_three[0], stands_for=(1, 2)), for_three[1])
    assert reduce_pushes([for_three, for_itself])[2].item() == 2 / 4


def test_the_union_takes_the_codec_that_suits_it() -> None:
    values, quantize = torch.ones(20, 64), torch.ones(20, 1)
    few = [sparse_push(rank, range(20), values, 10_000, "bitmap") for rank in (0, 1)]
    many = [sparse_push(rank, range(20 * rank, 20 * rank + 20), values, 1000, "coo") for rank in (0, 1)]
    scalars = [sparse_push(rank, range(0, 10_000, 500), quantize, 10_000, "bitmap") for rank in (0, 1)]
    shared_memory = [sparse_push(rank, range(20), quantize, 10_000, "bitmap") for rank in (0, 1)]
    assert reduce_pushes(few)[0].codec == "coo"
    assert reduce_pushes(many)[0].codec == "bitmap"
    assert reduce_pushes(scalars)[0].codec == "delta"
    assert reduce_pushes(shared_memory)[0].codec == "blocks"


def test_inputs_are_not_written_to() -> None:
    values = torch.arange(6.0).view(3, 2)
    pushes = [sparse_push(rank, [1, 2, 3], values, 9, average=True) for rank in (0, 1, 2)]
    reduce_pushes(pushes)
    assert torch.equal(values, torch.arange(6.0).view(3, 2))
    flat = torch.arange(6.0)
    reduce_pushes([dense_push(rank, flat, flat, average=True) for rank in (0, 1, 2)])
    assert torch.equal(flat, torch.arange(6.0))


SPARSE, SPARSE_FRAMES = sparse_push(0, [1, 5], torch.ones(2, 3), 8)
DENSE, DENSE_FRAMES = dense_push(0, torch.ones(8), torch.ones(8))
EMPTY = memoryview(b"")


@pytest.mark.parametrize(
    ("push", "frames", "message"),
    [
        (SPARSE, (), "0 frames"),
        (SPARSE, SPARSE_FRAMES[:1], "1 frames"),
        (SPARSE, (*SPARSE_FRAMES, EMPTY), "3 frames"),
        (SPARSE, (EMPTY, SPARSE_FRAMES[1]), "coo: 0 bytes"),
        (SPARSE, (SPARSE_FRAMES[0], EMPTY), "0 bytes of values"),
        (SPARSE, (SPARSE_FRAMES[1], SPARSE_FRAMES[0]), "bytes of values"),
        (msgspec.structs.replace(SPARSE, rows=3), SPARSE_FRAMES, "bytes of values"),
        (msgspec.structs.replace(SPARSE, rows=9), SPARSE_FRAMES, "9 rows in a span of 8"),
        (msgspec.structs.replace(SPARSE, columns=2), SPARSE_FRAMES, "bytes of values"),
        (msgspec.structs.replace(SPARSE, dtype="float64"), SPARSE_FRAMES, "bytes of values"),
        (msgspec.structs.replace(SPARSE, span=5), SPARSE_FRAMES, "increase within"),
        (msgspec.structs.replace(SPARSE, codec="bitmap"), SPARSE_FRAMES, "bitmap: 8 bytes"),
        (msgspec.structs.replace(SPARSE, codec="none"), SPARSE_FRAMES, "needs a codec"),
        (
            msgspec.structs.replace(SPARSE, rows=8, columns=0, codec="dense"),
            (EMPTY, EMPTY),
            "rows without values as dense, expected coo",
        ),
        (msgspec.structs.replace(SPARSE, rows=2**61, columns=0, span=2**61), (EMPTY, EMPTY), "coo: 0 bytes"),
        (msgspec.structs.replace(SPARSE, kind="dense"), SPARSE_FRAMES, "dense chunk"),
        (msgspec.structs.replace(SPARSE, dtype="int64", average=True), SPARSE_FRAMES, "average of int64"),
        (DENSE, (), "dense chunk"),
        (DENSE, (EMPTY,), "bytes of values"),
        (DENSE, (EMPTY, *DENSE_FRAMES), "dense chunk"),
        (msgspec.structs.replace(DENSE, rows=7), (DENSE_FRAMES[0][4:],), "dense chunk"),
        (msgspec.structs.replace(DENSE, codec="coo"), DENSE_FRAMES, "dense chunk"),
        (msgspec.structs.replace(DENSE, columns=2, span=4, rows=4), DENSE_FRAMES, "dense chunk"),
        (msgspec.structs.replace(DENSE, dtype="uint8", average=True), DENSE_FRAMES, "average of uint8"),
        (
            msgspec.structs.replace(SPARSE, values="int8"),
            SPARSE_FRAMES,
            "24 bytes of int8 values .* expected 8",
        ),
        (msgspec.structs.replace(SPARSE, values="float16"), SPARSE_FRAMES, "for 2 × 3, expected 12"),
        (
            msgspec.structs.replace(SPARSE, kind="blocks", codec="bitmap", rows=0, values="float16"),
            (EMPTY, EMPTY),
            "blocks with codec 'bitmap' and values 'float16', expected bitmap and same",
        ),
        (msgspec.structs.replace(DENSE, values="bfloat16"), DENSE_FRAMES, "for 8 × 1, expected 16"),
        (msgspec.structs.replace(DENSE, values="int8"), DENSE_FRAMES, "for 8 × 1, expected 9"),
        (
            msgspec.structs.replace(DENSE, dtype="bfloat16", values="int8"),
            (memoryview(bytes(9)),),
            "bfloat16 as int8: expected float32",
        ),
    ],
)
def test_frames_that_are_not_as_announced(push: Push, frames: Sequence[memoryview], message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as raised:
        read(push, frames)
    assert raised.value.reason == "payload"


DTYPE_NAMES = list(DTYPES)


@settings(deadline=None, max_examples=300)
@given(
    kind=st.sampled_from(["dense", "sparse"]),
    dtype=st.sampled_from(DTYPE_NAMES),
    codec=st.sampled_from([*CODECS, "none"]),
    span=st.one_of(st.integers(0, 9), st.integers(0, (1 << 62) - 1)),
    rows=st.one_of(st.integers(0, 9), st.integers(0, (1 << 62) - 1)),
    columns=st.one_of(st.integers(0, 3), st.integers(0, (1 << 28) - 1)),
    average=st.booleans(),
    values=st.sampled_from(["same", "same", *VALUE_CODECS]),
    frames=st.lists(st.binary(max_size=80), min_size=2, max_size=2),
    fits=st.booleans(),
)
def test_what_is_accepted_can_be_reduced(
    kind: Kind,
    dtype: Dtype,
    codec: CodecName | Literal["none"],
    span: int,
    rows: int,
    columns: int,
    average: bool,
    values: ValueForm,
    frames: list[bytes],
    fits: bool,
) -> None:
    """Whatever a hostile push announces: it is refused, or summed with a second one like it."""
    if values != "same":
        dtype = "float32"
    push = Push(1, 0, "t", 0, 0, 1, kind, dtype, (9,), span, columns, rows, codec, average, values=values)
    values_bytes = rows * columns * DTYPES[push.dtype].itemsize
    if values != "same":
        values_bytes = VALUE_CODECS[values].size_bytes(rows, columns)
    views = [memoryview(frame) for frame in frames]
    if fits and kind == "dense":
        del views[0]
    if fits and rows < 10:
        views[-1] = memoryview(bytes(values_bytes if values_bytes < 10_000 else 0))
        if kind != "dense" and push.codec != "none":
            positions_bytes = CODECS[push.codec].max_bytes(rows, span)
            views[0] = memoryview(bytes(range(positions_bytes)) if positions_bytes < 100 else b"")
    try:
        payload = read(push, views)
    except ProtocolError:
        return
    result, answer = reduce([payload, payload])
    assert result.rows == rows
    assert answer[-1].nbytes == values_bytes


def test_a_payload_says_what_a_row_more_takes() -> None:
    assert read(SPARSE, SPARSE_FRAMES).row_bytes == 8 + 3 * 4
    push = msgspec.structs.replace(SPARSE, rows=0, values="int8", dtype="float32")
    assert read(push, [memoryview(b""), memoryview(b"")]).row_bytes == 8 + 1 + 3


def test_a_chunk_beyond_the_last_is_refused() -> None:
    for push, frames in ((SPARSE, SPARSE_FRAMES), (DENSE, DENSE_FRAMES)):
        read(msgspec.structs.replace(push, chunk=2, chunks=3), frames)
        with pytest.raises(ProtocolError, match="payload: chunk 3 of 3, expected less"):
            read(msgspec.structs.replace(push, chunk=3, chunks=3), frames)


def test_a_payload_counts_its_decoded_positions() -> None:
    assert read(SPARSE, SPARSE_FRAMES).size_bytes == 2 * 8 + 2 * 3 * 4 + RECEIVE_BUFFER_BYTES
    assert read(DENSE, DENSE_FRAMES).size_bytes == 8 * 4 + RECEIVE_BUFFER_BYTES


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"kind": "dense", "span": 500}, True),
        ({"kind": "dense", "span": 501}, False),
        ({"kind": "dense", "span": 3, "fragments": 2}, False),
        ({"kind": "dense", "span": 3, "fragment": 1}, False),
        ({"rows": 100, "columns": 3, "span": 2**61}, True),
        ({"rows": 101, "columns": 3, "span": 2**61}, False),
        ({"rows": 250, "columns": 0, "span": 250}, True),
        ({"rows": 251, "columns": 0, "span": 251}, False),
        ({"span": 0, "columns": 2**28 - 1}, True),
        ({"answer": "bitmap", "span": 250}, True),
        ({"answer": "bitmap", "span": 251}, False),
        ({"answer": "dense", "span": 251}, False),
        ({"answer": "delta", "span": 251}, True),
        ({"codec": "bitmap", "rows": 10, "span": 320}, True),
        ({"codec": "bitmap", "rows": 10, "span": 321}, False),
        ({"codec": "dense", "rows": 10, "span": 321}, False),
        ({"fragment": 1, "fragments": 2, "span": 10}, True),
        ({"fragment": 2, "fragments": 2, "span": 10}, False),
    ],
)
def test_a_push_that_takes_more_memory_than_a_message_is_refused(changes: dict[str, Any], fits: bool) -> None:
    push = Push(1, 0, "t", 0, 0, 1, "sparse", "float32", (9, 1), 9, 1, 0, "coo", False)
    push = msgspec.structs.replace(push, **changes)
    reducer = make_reducers(OrdinaryMemory(BufferPool(1 << 20)), 2000)[push.kind]
    if fits:
        reducer.check_size(push)
    else:
        with pytest.raises(ProtocolError, match="payload: "):
            reducer.check_size(push)


def test_a_sum_too_large_for_a_message_comes_in_fragments_with_the_same_bits() -> None:
    """Three ranks push in 1, 2 and 3 fragments."""
    generator = torch.Generator().manual_seed(1)
    whole, cut = list[Payload](), list[Payload]()
    for rank, count in enumerate((1, 2, 3)):
        rows = torch.randperm(3000, generator=generator)[:900].sort().values.numpy()
        values = torch.randn(900, 4, generator=generator)
        for fragments, parts in ((1, whole), (count, cut)):
            for fragment, (begin, end) in enumerate(cut_fragments(0, 900, 900 // fragments)):
                push = Push(
                    *(1, rank, "t", 0, 0, 1, "sparse", "float32", (3000, 4), 3000, 4, end - begin, "coo"),
                    *(True,),
                    fragment=fragment,
                    fragments=fragments,
                )
                frames = CODECS["coo"].encode(rows[begin:end], 3000).data, tensor_bytes(values[begin:end])
                parts.append(read(push, frames))
    expected, (positions, sums) = reduce(whole)
    reducer = make_reducers(OrdinaryMemory(BufferPool(1 << 20)), 2 * 1000 * (16 + 8))["sparse"]
    outcome = reducer.reduce(cut)
    answers = outcome.reply(0)
    results: list[Any] = [each.message for each in answers]
    assert [(result.fragment, result.fragments) for result in results] == [(0, 2), (1, 2)]
    assert [result.pushed for result in results] == [2700, 0]
    assert sum(result.rows for result in results) == outcome.rows == expected.rows
    assert b"".join(each.frames[1] for each in answers) == bytes(sums)
    decoded = [
        CODECS[result.codec].decode(each.frames[0], result.rows, 3000)
        for result, each in zip(results, answers, strict=True)
    ]
    union = CODECS[expected.codec].decode(positions, expected.rows, 3000)
    assert np.array_equal(np.concatenate(decoded), union)
    assert outcome.size_bytes == sum(frame.nbytes for each in answers for frame in each.frames)


def test_a_sum_of_more_messages_than_a_send_queue_takes_has_larger_ones() -> None:
    assert 2 * MAX_RESULT_FRAGMENTS <= MAX_QUEUED_MESSAGES
    rows = 40_000
    push, frames = sparse_push(0, range(rows), torch.ones(rows, 1), rows)
    payload = read(push, frames)
    reducer = make_reducers(OrdinaryMemory(BufferPool(1 << 20)), 2 * 9 * 12)["sparse"]  # 9 rows in half of it
    answers = reducer.reduce([payload]).reply(0)
    decoder: Decoder[FromServer] = Decoder("job", FromServer)
    results: list[Any] = [decoder.decode(encode("job", each.message)) for each in answers]
    assert [result.fragment for result in results] == list(range(MAX_RESULT_FRAGMENTS))
    assert sum(result.rows for result in results) == rows

    reducer = make_reducers(OrdinaryMemory(BufferPool(1 << 20)), 9 * 12)["sparse"]
    failure = reducer.reduce([payload]).reply(0)[0].message
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.tensor, failure.step, failure.chunk) == ("size", "t", 5, 2)
    assert "a sum of 40000 rows on one server" in failure.reason


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────


def test_blocks_are_summed_as_if_all_ranks_had_pushed_all() -> None:
    pushes = [
        blocks_push(0, {0: [-0.0, 1.0], 2: [-0.0, 5.0]}, [4, NONE_LEFT, 9]),
        blocks_push(1, {}, [8, 7, NONE_LEFT]),
        blocks_push(2, {0: [1e8, -1.0], 1: [-0.0, 2.0]}, [NONE_LEFT, NONE_LEFT, 6]),
    ]
    result, frames = reduce([read(push, frames) for push, frames in pushes])
    assert (result.tensor, result.step, result.chunk, result.rows) == ("t", 5, 2, 3)
    assert result.pushed == sum(push.rows for push, _ in pushes)
    assert result.codec == "bitmap"
    positions, ahead = decode_blocks(frames[0], 3, 3)
    assert (positions.tolist(), ahead.tolist()) == ([0, 1, 2], [4, 7, 6])
    values = tensor_from_bytes(frames[1], torch.float32, (3, 2))
    assert same_bits(values, torch.tensor([[1e8, 0.0], [0.0, 2.0], [0.0, 5.0]]))


def test_blocks_after_one_that_no_rank_has_are_summed() -> None:
    pushes = [
        blocks_push(0, {0: [1.0, 2.0], 2: [3.0, 4.0], 4: [5.0, 6.0]}, [NONE_LEFT] * 5),
        blocks_push(1, {4: [10.0, 20.0]}, [NONE_LEFT] * 5),
    ]
    _, frames = reduce([read(push, frames) for push, frames in pushes])
    assert decode_blocks(frames[0], 3, 5)[0].tolist() == [0, 2, 4]
    values = tensor_from_bytes(frames[1], torch.float32, (3, 2))
    assert values.tolist() == [[1.0, 2.0], [3.0, 4.0], [15.0, 26.0]]


def test_minus_zero_survives_where_all_ranks_have_pushed_it() -> None:
    pushes = [blocks_push(rank, {0: [-0.0, 1.0]}, [NONE_LEFT], average=True) for rank in range(2)]
    _, frames = reduce([read(push, frames) for push, frames in pushes])
    assert same_bits(tensor_from_bytes(frames[1], torch.float32, (1, 2)), torch.tensor([[-0.0, 1.0]]))


def test_a_phase_without_blocks_says_what_comes_next() -> None:
    pushes = [blocks_push(rank, {}, [3 + rank, NONE_LEFT]) for rank in range(2)]
    result, frames = reduce([read(push, frames) for push, frames in pushes])
    assert (result.rows, frames[1].nbytes) == (0, 0)
    assert decode_blocks(frames[0], 0, 2)[1].tolist() == [3, NONE_LEFT]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"codec": "coo"}, "expected bitmap"),
        ({"codec": "none"}, "expected bitmap"),
        ({"rows": 1}, "bytes of values"),
        ({"span": 4}, "blocks: "),
        ({"columns": 3}, "bytes of values"),
    ],
)
def test_malformed_blocks_are_refused(changes: dict[str, object], says: str) -> None:
    push, frames = blocks_push(0, {0: [1.0, 2.0], 1: [3.0, 4.0]}, [NONE_LEFT] * 2)
    with pytest.raises(ProtocolError, match=says):
        read(msgspec.structs.replace(push, **changes), frames)


def test_blocks_that_might_not_fit_into_an_answer_are_refused() -> None:
    push, _ = blocks_push(0, {}, [NONE_LEFT] * 3, columns=4)
    memory, max_bytes = OrdinaryMemory(BufferPool(1 << 20)), 3 * (4 * 4 + 8)
    make_reducers(memory, max_bytes)[push.kind].check_size(push)
    with pytest.raises(ProtocolError, match="a span of 3 rows"):
        make_reducers(memory, max_bytes - 1)[push.kind].check_size(push)
