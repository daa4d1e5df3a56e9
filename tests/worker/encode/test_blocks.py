from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.server.reducers.reduction import read, reduce
from tests.worker.host_accelerator import HostAccelerator
from zenps.buffers import BufferPool
from zenps.errors import ProtocolError
from zenps.wire.messages import Push, Result
from zenps.wire.tensors import dtype_name
from zenps.worker.core.transfer import EncodedChunk
from zenps.worker.encode.blocks import BlockTransfer
from zenps.worker.encode.gpu import StagedBlocks
from zenps.worker.encode.streams import Plan, plan_streams

POOL = BufferPool(1 << 26)
NAN = float("nan")


Streamed = BlockTransfer | StagedBlocks
Make = Callable[[Tensor, Plan], Streamed]


def on_the_cpu(tensor: Tensor, plan: Plan) -> BlockTransfer:
    return BlockTransfer(tensor, plan, POOL)


def on_a_device(tensor: Tensor, plan: Plan) -> StagedBlocks:
    transfer = StagedBlocks(tensor, plan, HostAccelerator())
    while not transfer.prepared():
        pass
    return transfer


def push_of(transfer: Streamed, rank: int, part: EncodedChunk, average: bool) -> Push:
    return Push(
        *(1, rank, "t", 0, part.chunk, transfer.chunks, transfer.kind, dtype_name(transfer.dtype)),
        *(tuple(transfer.shape), part.span, transfer.columns, part.rows, "bitmap", average),
    )


def reduce_in_streams(
    tensors: Sequence[Tensor], plan: Plan, average: bool, rng: random.Random, make: Make = on_the_cpu
) -> list[Tensor]:
    """What each rank gets, when streams are answered in any order; checks what is pushed for it."""
    transfers = [make(tensor, plan) for tensor in tensors]
    going = list(range(plan.streams))
    pushed_blocks = [0] * len(tensors)
    while going:
        stream = rng.choice(going)
        phases = [transfer.push(stream) for transfer in transfers]
        if phases[0] is None:
            assert not any(phases)
            going.remove(stream)
            continue
        payloads = []
        for rank, (transfer, phase) in enumerate(zip(transfers, phases, strict=True)):
            assert phase is not None
            _, part = phase
            push = push_of(transfer, rank, part, average)
            payloads.append(read(push, part.frames))
            pushed_blocks[rank] += part.rows
        result, frames = reduce(payloads)
        for transfer in transfers:
            transfer.absorb(0, stream, result, frames)
    for tensor, transfer, count in zip(tensors, transfers, pushed_blocks, strict=True):
        assert count == blocks_not_zero(tensor, plan)
        pointers = transfer.pushed_bytes - count * plan.block * tensor.dtype.itemsize
        assert 0 <= pointers <= 8 * (plan.blocks + plan.streams)
    return [transfer.finish() for transfer in transfers]


def blocks_not_zero(tensor: Tensor, plan: Plan) -> int:
    return sum(bool((block != 0).any()) for block in tensor.reshape(-1).split(plan.block))


def without_minus_zeros(tensor: Tensor, plan: Plan) -> Tensor:
    """Blocks of nothing but zeros count as 0.0."""
    parts = [
        block if (block != 0).any() else torch.zeros_like(block)
        for block in tensor.reshape(-1).split(plan.block)
    ]
    return torch.cat(parts)


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
    transfer = BlockTransfer(tensor, plan_streams(24, 4, 4, 6, 1 << 20), POOL)
    assert transfer.push(0) is not None
    return transfer


GOOD = Result(1, "t", 0, 0, 2, "bitmap")
POINTERS, BITS, VALUES = b"\xff" * 24, b"\x09", bytes(32)


@pytest.mark.parametrize(
    ("result", "frames"),
    [
        (msgspec.structs.replace(GOOD, codec="coo"), [POINTERS + BITS, VALUES]),
        (GOOD, [POINTERS + BITS]),
        (GOOD, [POINTERS + BITS, VALUES[1:]]),
        (GOOD, [POINTERS, VALUES]),
        (GOOD, [b"\0" * 24 + BITS, VALUES]),
        (GOOD, [POINTERS + b"\x03", VALUES]),
        (msgspec.structs.replace(GOOD, rows=7), [POINTERS + b"\x7f", bytes(112)]),
    ],
    ids=["codec", "frames", "values", "bitmap", "pointers", "other blocks", "too many"],
)
def test_hostile_answers_are_refused_and_change_nothing(
    transfer: BlockTransfer, result: Result, frames: list[bytes]
) -> None:
    with pytest.raises(ProtocolError):
        transfer.absorb(0, 0, result, [memoryview(frame) for frame in frames])
    assert not transfer.finish().any()
    transfer.absorb(0, 0, GOOD, [memoryview(POINTERS + BITS), memoryview(VALUES)])
    assert transfer.push(0) is None
