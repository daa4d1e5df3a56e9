from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.server.reducers.reduction import read, reduce
from tests.worker.host_accelerator import HostAccelerator
from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.wire.blocks import PHASES
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import dtype_name
from zenps.worker.core.statistics import Progress
from zenps.worker.core.transfer import Answer, EncodedTensor, Sharding
from zenps.worker.encode.blocks import BlockTransfer
from zenps.worker.encode.reshard import reshard
from zenps.worker.encode.staged import StagedBlocks
from zenps.worker.encode.streams import Plan, plan_streams

POOL = BufferPool(1 << 26)
NAN = float("nan")


Streamed = BlockTransfer | StagedBlocks
Make = Callable[[Tensor, Plan], Streamed]


def shardings_of(plan: Plan) -> list[Sharding]:
    """Streams on two servers in turn."""
    return [Sharding(None, plan.streams, stream % 2, 1, stream) for stream in range(plan.streams)]


def on_the_cpu(tensor: Tensor, plan: Plan) -> BlockTransfer:
    return BlockTransfer(tensor, plan, shardings_of(plan), POOL)


def on_a_device(tensor: Tensor, plan: Plan) -> StagedBlocks:
    transfer = StagedBlocks(tensor, plan, shardings_of(plan), HostAccelerator())
    while not transfer.prepared():
        pass
    return transfer


def push_of(encoded: EncodedTensor, rank: int, average: bool) -> Push:
    (chunk,) = encoded.chunks
    return Push(
        *(1, rank, "t", 0, chunk.chunk, encoded.sharding.chunks, encoded.kind, dtype_name(encoded.dtype)),
        *(tuple(encoded.shape), chunk.span, encoded.columns, chunk.rows, "bitmap", average),
    )


def answer_to(phases: Sequence[EncodedTensor], average: bool) -> Answer:
    """What the server of a stream answers to one phase of all ranks."""
    pushes = [(push_of(phase, rank, average), phase.chunks[0].frames) for rank, phase in enumerate(phases)]
    result, frames = reduce([read(push, frames) for push, frames in pushes])
    return Answer(phases[0].chunks[0].server, result, frames)


def reduce_in_streams(
    tensors: Sequence[Tensor], plan: Plan, average: bool, rng: random.Random, make: Make = on_the_cpu
) -> list[Tensor]:
    """What each rank gets, when streams are answered in any order; checks what is pushed for it."""
    transfers = [make(tensor, plan) for tensor in tensors]
    in_flight = [{phase.stream: phase for phase in transfer.begin()} for transfer in transfers]
    assert all(list(streams) == list(range(plan.streams)) for streams in in_flight)
    pushed_blocks, pushed_bytes = [0] * len(tensors), [0] * len(tensors)
    while in_flight[0]:
        stream = rng.choice(list(in_flight[0]))
        phases = [streams.pop(stream) for streams in in_flight]
        for rank, phase in enumerate(phases):
            (chunk,) = phase.chunks
            assert phase.phase == phases[0].phase
            assert (phase.sharding, chunk.server) == (shardings_of(plan)[stream], stream % 2)
            pushed_blocks[rank] += chunk.rows
            pushed_bytes[rank] += sum(frame.nbytes for frame in chunk.frames)
        answer = answer_to(phases, average)
        for transfer, streams in zip(transfers, in_flight, strict=True):
            for following in transfer.on_answer(answer):
                assert (following.stream, following.phase) == (stream, phases[0].phase + 1)
                streams[stream] = following
        assert all(streams.keys() == in_flight[0].keys() for streams in in_flight)
    for rank, (tensor, transfer) in enumerate(zip(tensors, transfers, strict=True)):
        assert pushed_blocks[rank] == blocks_not_zero(tensor, plan)
        report = transfer.report(Progress(0, pulled_bytes=7))
        assert (report.pushed_bytes, report.pulled_bytes) == (pushed_bytes[rank], 7)
        assert report.dense_bytes == 2 * tensor.nbytes
        pointers = report.pushed_bytes - pushed_blocks[rank] * plan.block * tensor.dtype.itemsize
        assert 0 <= pointers <= 8 * (plan.blocks + plan.streams)
    return [transfer.finish() for transfer in transfers]


def blocks_not_zero(tensor: Tensor, plan: Plan) -> int:
    return sum(bool((block != 0).any()) for block in tensor.reshape(-1).split(plan.block))


def without_minus_zeros(tensor: Tensor, plan: Plan) -> Tensor:
    """Blocks of nothing but zeros count as 0.0."""
    blocks = [
        block if (block != 0).any() else torch.zeros_like(block)
        for block in tensor.reshape(-1).split(plan.block)
    ]
    return torch.cat(blocks)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 1 << 30),
    ranks=st.integers(1, 4),
    count=st.integers(0, 300),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]),
    block=st.sampled_from([1, 2, 8, 64]),
    fusion=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    average=st.booleans(),
)
def test_sums_are_those_of_whole_tensors_bit_for_bit(
    seed: int,
    ranks: int,
    count: int,
    dtype: torch.dtype,
    block: int,
    fusion: int,
    density: float,
    average: bool,
) -> None:
    average = average and dtype.is_floating_point
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, NAN, 1e30] if dtype.is_floating_point else [0, 1, -1, 2]).to(dtype)
    tensors = []
    for _ in range(ranks):
        values = (torch.randn(count, generator=generator) * 100).to(dtype)
        drawn = torch.randint(0, 12, (count,), generator=generator)
        values = torch.where(drawn < 4, special[drawn.clamp(max=3)], values)
        tensors.append(torch.where(torch.rand(count, generator=generator) < density, values, 0).to(dtype))
    plan = plan_streams(count, dtype.itemsize, block, fusion, 1 << 20)
    expected = reduce_in_rank_order([without_minus_zeros(tensor, plan) for tensor in tensors], average)
    for result in reduce_in_streams(tensors, plan, average, random.Random(seed)):
        assert_same_bits(result, expected)


def test_a_lone_element_is_contiguous_with_any_stride() -> None:
    tensors = [(torch.arange(5.0) + rank).view(1, 5)[:, 1] for rank in range(2)]
    for result in reduce_in_streams(tensors, plan_streams(1, 4, 1, 8, 1 << 20), True, random.Random(0)):
        assert_same_bits(result, torch.tensor([1.5]))


def test_minus_zero_needs_a_block_that_travels_from_all_ranks() -> None:
    plan = plan_streams(6, 4, 2, 8, 1 << 20)
    first, second = torch.tensor([-0.0, 1.0, -0.0, 1.0, -0.0, -0.0]), torch.tensor([-0.0, 1.0, *[-0.0] * 4])
    for result in reduce_in_streams([first, second], plan, False, random.Random(0)):
        assert torch.signbit(result).tolist() == [True, False, False, False, False, False]


def test_a_tensor_on_a_device_takes_the_same_way() -> None:
    tensors = [torch.arange(60.0).view(3, 20) * rank for rank in range(3)]
    plan = plan_streams(60, 4, 8, 2, 1 << 20)
    for result in reduce_in_streams(tensors, plan, False, random.Random(0), on_a_device):
        assert_same_bits(result, reduce_in_rank_order(tensors, average=False))


@pytest.fixture
def transfer() -> BlockTransfer:
    """Of 6 blocks of 4 elements in one stream; it has pushed the first and the fourth."""
    tensor = torch.zeros(24)
    tensor[0] = tensor[13] = 1.0
    transfer = on_the_cpu(tensor, plan_streams(24, 4, 4, 6, 1 << 20))
    (encoded,) = transfer.begin()
    assert encoded.chunks[0].rows == 2
    return transfer


GOOD = Result(1, "t", 0, 0, 2, "bitmap")
POINTERS, BITS, VALUES = b"\xff" * 24, b"\x09", bytes(32)


@pytest.mark.parametrize(
    ("result", "frames"),
    [
        (structs.replace(GOOD, codec="coo"), [POINTERS + BITS, VALUES]),
        (GOOD, [POINTERS + BITS]),
        (GOOD, [POINTERS + BITS, VALUES[1:]]),
        (GOOD, [POINTERS, VALUES]),
        (GOOD, [b"\0" * 24 + BITS, VALUES]),
        (GOOD, [POINTERS + b"\x03", VALUES]),
        (structs.replace(GOOD, rows=7), [POINTERS + b"\x7f", bytes(112)]),
    ],
    ids=["codec", "frames", "values", "bitmap", "pointers", "other blocks", "too many"],
)
def test_hostile_answers_are_refused_and_change_nothing(
    transfer: BlockTransfer, result: Result, frames: list[bytes]
) -> None:
    with pytest.raises(ProtocolError):
        transfer.on_answer(Answer(0, result, [memoryview(frame) for frame in frames]))
    assert not transfer.finish().any()
    assert not transfer.on_answer(Answer(0, GOOD, [memoryview(POINTERS + BITS), memoryview(VALUES)]))


def test_a_stream_that_goes_to_another_server_stays_there() -> None:
    """So do the phases that follow. Other streams, and what was summed so far, stay as they are."""
    tensor = torch.arange(1.0, 33.0)
    transfer = on_the_cpu(tensor, plan_streams(32, 4, 4, 1, 1 << 20)._replace(streams=2))
    moving, other = transfer.begin()
    (moving,) = transfer.on_answer(answer_to([moving], average=False))
    sharding = Sharding(None, 2, 7, 2, 0)
    moving = reshard(moving, sharding, "auto")
    transfer.restart(moving)
    for stream, server, expected in ((moving, 7, sharding), (other, 1, other.sharding)):
        phases = [stream]
        while phases:
            (phase,) = phases
            assert (phase.sharding, phase.chunks[0].server) == (expected, server)
            phases = list(transfer.on_answer(answer_to([phase], average=False)))
    assert torch.equal(transfer.finish(), tensor)


def test_each_phase_of_a_stream_is_a_round_with_a_name_and_step_of_its_own() -> None:
    transfer = on_the_cpu(torch.ones(64), plan_streams(64, 4, 4, 1, 1 << 20))
    begun = transfer.begin()
    assert [phase.round_of("t", 3) for phase in begun] == [(f"t#{n}", 3 * PHASES) for n in range(16)]
    assert structs.replace(begun[5], phase=2).round_of("t", 3) == ("t#5", 3 * PHASES + 2)


def test_of_a_tensor_on_a_device_only_blocks_that_are_not_zero_are_copied() -> None:
    """And a byte for each block. NaN, subnormal numbers and one element of the padded block are not zero."""
    copied: list[int] = []

    class Pool(BufferPool):
        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            copied.append(math.prod(shape) * dtype.itemsize)
            return super().empty(shape, dtype)

    accelerator = HostAccelerator()
    accelerator.pinned = Pool(1 << 26)
    tensor, plan = torch.zeros(1001), Plan(10, 101, 2, 5)
    tensor[[17, 503, 1000]] = torch.tensor([NAN, 1e-42, 1.0])
    tensor[42] = -0.0
    transfer = StagedBlocks(tensor, plan, shardings_of(plan), accelerator)
    while not transfer.prepared():
        pass
    # Flags, numbers and values of three blocks; then memory for the result.
    assert copied[:3] == [101, 3 * 8, 3 * 10 * 4]
    assert sum(len(phase.chunks) for phase in transfer.begin()) == 2
