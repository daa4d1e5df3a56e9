"""Tensors to pushes, pushes to results, results to tensors: workers and servers without sockets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

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
from zenps.config.settings import CudaConfig
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.base import Kernels
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.factory import make_kernels
from zenps.kernels.gpu.place import DeviceLayout
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import Layout, LayoutCache
from zenps.partition.ranges import ServerRanges, even_ranges
from zenps.partition.ring import rebalance
from zenps.partition.strategies.registry import strategy
from zenps.wire.fields import MAX_FRAGMENTS
from zenps.wire.frames import Decoder, encode
from zenps.wire.messages import Push, Result, ToServer
from zenps.wire.tensors import dtype_name
from zenps.worker.core.request import table_shape
from zenps.worker.core.statistics import Progress
from zenps.worker.core.transfer import Answer, EncodedChunk, EncodedTensor, Sharding, Transfer
from zenps.worker.encode.dense import (
    DENSE_GRANULE,
    DenseTransfer,
    RootLostError,
    WholeTransfer,
)
from zenps.worker.encode.gpu import StagedSparse
from zenps.worker.encode.quantizer import Unchanged
from zenps.worker.encode.sparse import SparseTransfer, coalesced
from zenps.worker.encode.staged import StagedDense

torch.set_num_threads(1)

POOL = BufferPool(keep_bytes=1 << 26)
KERNELS = CpuKernels(POOL)
ACCELERATOR = HostAccelerator()
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SUMMED = [*FLOATS, torch.int64]
NAN, INF = float("nan"), float("inf")


def sparse(rows: Sequence[int] | Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse tensor of one sparse dimension; its rows are not checked."""
    indices = torch.as_tensor(rows, dtype=torch.int64)[None]
    return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)


def make_layout(name: str, rows: int, granule: int, servers: Sequence[int], table_bytes: int) -> Layout:
    cache = LayoutCache(7, rebalance(None, servers), servers, table_bytes)
    return cache.get(strategy(name), "weight", max(rows, 1), granule)


def make_ranges(count: int, servers: Sequence[int]) -> ServerRanges:
    """Of a dense tensor."""
    granules = max(-(-count // DENSE_GRANULE), 1)
    return even_ranges(rebalance(None, servers), servers, granules, DENSE_GRANULE)


def on_the_device(layout: Layout) -> DeviceLayout:
    return device_layout_on(layout, ACCELERATOR.device)


class MakeSparse(Protocol):
    """Begins the transfer of a sparse tensor."""

    def __call__(self, tensor: Tensor, layout: Layout, chunks: int, home: int, codec: str) -> Transfer: ...


def on_the_cpu(tensor: Tensor, layout: Layout, chunks: int, home: int, codec: str) -> Transfer:
    return SparseTransfer(tensor, Sharding(layout, chunks, home), codec, KERNELS, Unchanged(tensor.dtype))


def on_a_device(compaction: Literal["sort", "bitmap"]) -> MakeSparse:
    def make(tensor: Tensor, layout: Layout, chunks: int, home: int, codec: str) -> Transfer:
        sharding, settings = Sharding(layout, chunks, home), CudaConfig(compaction=compaction)
        coder = Unchanged(tensor.dtype)
        transfer = StagedSparse(tensor, sharding, codec, settings, on_the_device, ACCELERATOR, coder)
        assert not transfer.prepared()
        return prepared(transfer)

    return make


def prepared(transfer: Transfer) -> Transfer:
    looks = 0
    while not transfer.prepared():
        looks += 1
        assert looks < 100
    return transfer


class MakeDense(Protocol):
    """Begins the transfer of a strided tensor that is split over servers."""

    def __call__(self, tensor: Tensor, sharding: Sharding, contributes: bool = True) -> Transfer: ...


def dense_on_the_cpu(tensor: Tensor, sharding: Sharding, contributes: bool = True) -> Transfer:
    return DenseTransfer(tensor, sharding, POOL, contributes, Unchanged(tensor.dtype))


def dense_on_a_device(tensor: Tensor, sharding: Sharding, contributes: bool = True) -> Transfer:
    coder, pool = Unchanged(tensor.dtype), ACCELERATOR.pinned
    transfer = StagedDense(tensor, sharding, contributes, coder, ACCELERATOR, pool)
    assert transfer.prepared() == (not contributes), "there is nothing to wait for"
    return prepared(transfer)


# Duplicates are summed in no particular order by "bitmap": test_gpu.py has it.
WAYS = {"cpu": on_the_cpu, "device": on_a_device("sort")}
every_way = pytest.mark.parametrize("make_sparse", WAYS.values(), ids=WAYS)
DENSE_WAYS = {"cpu": dense_on_the_cpu, "device": dense_on_a_device}
every_dense_way = pytest.mark.parametrize("make_dense", DENSE_WAYS.values(), ids=DENSE_WAYS)


def encoded_by(transfer: Transfer) -> EncodedTensor:
    """What a transfer of one round pushes under the present ring."""
    (encoded,) = transfer.begin()
    return encoded


def make_push(encoded: EncodedTensor, chunk: EncodedChunk, rank: int, average: bool) -> Push:
    return Push(
        1, rank, "weight", 3, chunk.chunk, encoded.sharding.chunks, encoded.kind, dtype_name(encoded.dtype),
        tuple(encoded.shape), chunk.span, encoded.columns, chunk.rows, chunk.codec, average,
        values=encoded.values,
    )  # fmt: skip


def aggregate(transfers: Sequence[Transfer], average: bool) -> list[Answer]:
    """What the servers answer, in any order. All ranks push the same chunks."""
    tensors = [encoded_by(transfer) for transfer in transfers]
    keys = [[(chunk.server, chunk.chunk, chunk.span) for chunk in each.chunks] for each in tensors]
    assert all(each == keys[0] for each in keys)
    assert len(set(keys[0])) == len(keys[0])
    answers = []
    for index, chunk in enumerate(tensors[0].chunks):
        payloads = []
        for rank, encoded in enumerate(tensors):
            own = encoded.chunks[index]
            push = make_push(encoded, own, rank, average)
            received = [memoryview(bytes(frame)) for frame in own.frames]
            payloads.append(read(push, received))
        result, frames = reduce(payloads)
        assert result.chunk == chunk.chunk
        answers.append(Answer(chunk.server, result, [memoryview(bytes(frame)) for frame in frames]))
    random.Random(len(answers)).shuffle(answers)
    return answers


def absorb_all(transfer: Transfer, answers: Sequence[Answer]) -> None:
    """Nothing is pushed upon any answer to the one round."""
    for answer in answers:
        assert not transfer.on_answer(answer)


def synchronize(
    tensors: Sequence[Tensor], begin: Callable[[Tensor], Transfer], average: bool
) -> tuple[list[Tensor], Transfer]:
    """Every rank's result, and the first rank's transfer."""
    transfers = [begin(tensor) for tensor in tensors]
    answers = aggregate(transfers, average)
    for transfer in transfers:
        absorb_all(transfer, answers)
    return [transfer.finish() for transfer in transfers], transfers[0]


def any_values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, tuple(shape), generator=generator)
    scale = 2.0 ** torch.randint(-10, 10, tuple(shape), generator=generator)
    values = (torch.randn(tuple(shape), generator=generator) * scale).to(dtype)
    special = torch.tensor([0.0, -0.0, NAN, INF, -INF], dtype=dtype)
    drawn = torch.randint(0, 60, tuple(shape), generator=generator)
    return torch.where(drawn < 5, special[drawn.clamp(max=4)], values)


def any_sparse(
    outer: Sequence[int], dense: Sequence[int], nnz: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """Duplicates, unsorted, the first and the last index often; values with their dimensions swapped."""
    nnz = 0 if 0 in outer else nnz
    indices = torch.empty(len(outer), nnz, dtype=torch.int64)
    for dim, size in enumerate(outer):
        if nnz:
            near = torch.randint(0, min(size, 9), (nnz,), generator=generator)
            ends = torch.tensor([0, size - 1])[torch.randint(0, 2, (nnz,), generator=generator)]
            indices[dim] = torch.where(torch.rand(nnz, generator=generator) < 0.2, ends, near)
    values = any_values([*dense[::-1], nnz], dtype, generator).permute(tuple(reversed(range(len(dense) + 1))))
    return torch.sparse_coo_tensor(indices, values, (*outer, *dense), check_invariants=True)


SPARSE_SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((50,), (3,)),
    ((50,), ()),
    ((1,), (4,)),
    ((5000,), ()),
    ((7, 11), (2,)),
    ((3, 4, 5), ()),
    ((9,), (2, 3, 2)),
    ((10**12,), (2,)),
    ((10**6, 10**6), (1,)),
    ((40,), (0,)),
    ((0,), (3,)),
    ((0, 4), ()),
    ((), (3,)),
    ((), ()),
]
PARTITIONS = ["balanced", "parallel", "centralized"]
SERVERS = [[0], [0, 1], [2, 5, 9]]


@every_way
@settings(deadline=None, max_examples=80)
@given(
    shape=st.sampled_from(SPARSE_SHAPES),
    counts=st.lists(st.sampled_from([0, 1, 5, 40]), min_size=1, max_size=4),
    dtype=st.sampled_from(SUMMED),
    partition=st.sampled_from(PARTITIONS),
    servers=st.sampled_from(SERVERS),
    chunks=st.integers(1, 4),
    codec=st.sampled_from(["auto", "coo", "delta"]),
    granule=st.sampled_from([1, 32]),
    table_bytes=st.sampled_from([0, 1 << 20]),
    average=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_sparse(
    make_sparse: MakeSparse,
    shape: tuple[tuple[int, ...], tuple[int, ...]],
    counts: list[int],
    dtype: torch.dtype,
    partition: str,
    servers: list[int],
    chunks: int,
    codec: str,
    granule: int,
    table_bytes: int,
    average: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    average = average and dtype.is_floating_point
    tensors = [any_sparse(*shape, count, dtype, generator) for count in counts]
    before = [(tensor._indices().clone(), tensor._values().clone()) for tensor in tensors]
    rows, columns = table_shape(tensors[0])
    layout = make_layout(partition, rows, granule if columns == 1 else 1, servers, table_bytes)

    def begin(tensor: Tensor) -> Transfer:
        return make_sparse(tensor, layout, chunks, servers[-1], codec)

    results, transfer = synchronize(tensors, begin, average)
    expected = reduce_in_rank_order(tensors, average)
    for result in results:
        assert_same_bits(result, expected)
    pushed_rows = sum(chunk.rows for chunk in encoded_by(transfer).chunks)
    assert pushed_rows == len({*map(tuple, before[0][0].t().tolist())})
    assert transfer.rows_given == tensors[0]._nnz()
    for tensor, (indices, values) in zip(tensors, before, strict=True):
        assert torch.equal(tensor._indices(), indices)
        assert torch.equal(tensor._values().nan_to_num(), values.nan_to_num())


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["auto", "bitmap", "coo", "delta"])
def test_sparse_with_every_row(make_sparse: MakeSparse, dtype: torch.dtype, codec: str) -> None:
    """As many rows as there are: all chunks are full."""
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for _ in range(2):
        rows = torch.cat(
            [torch.randperm(600, generator=generator), torch.randint(0, 600, (400,), generator=generator)]
        )
        # So many duplicates are added in another order on a device: sums of whole numbers are exact.
        values = torch.randint(-9, 9, (1000, 7), generator=generator).to(dtype)
        tensors.append(sparse(rows, values, (600, 7)))
    layout = make_layout("balanced", 600, 1, [0, 1, 2], 1 << 20)
    results, transfer = synchronize(
        tensors, lambda tensor: make_sparse(tensor, layout, 3, 0, codec), average=False
    )
    assert len(encoded_by(transfer).chunks) == 9
    assert transfer.report(Progress(0)).pushed_bytes >= 600 * 7 * dtype.itemsize
    for result in results:
        assert_same_bits(result, reduce_in_rank_order(tensors, average=False))


DENSE_SHAPES: list[tuple[int, ...]] = [
    (), (1,), (255,), (256,), (257,), (5000,), (3, 4), (40, 30), (2, 3, 4, 5, 6), (0,), (0, 3), (4, 0, 2),
]  # fmt: skip


@pytest.mark.parametrize("columns", [2, 64], ids=["narrow", "wide"])
@pytest.mark.parametrize("kernels", [KERNELS, make_kernels(POOL)], ids=["torch", "default"])
def test_backward_adds_rows_to_a_gradient_and_a_result_without_any(kernels: Kernels, columns: int) -> None:
    """As of a micro-batch that looks nothing up. torch refuses to resize memory that NumPy has seen."""
    layout = make_layout("balanced", 50, 1, [0, 1], table_bytes=0)
    given = sparse([], torch.empty(0, columns), (50, columns))
    (pulled,), _ = synchronize(
        [given],
        lambda tensor: SparseTransfer(
            tensor, Sharding(layout, 2, 0), "auto", kernels, Unchanged(tensor.dtype)
        ),
        average=False,
    )
    for gradient in (given, pulled, coalesced(given, kernels)):
        gradient += torch.ones(50, columns).to_sparse(1)
        assert torch.equal(gradient.to_dense(), torch.ones(50, columns))


@every_dense_way
@settings(deadline=None, max_examples=120)
@given(
    shape=st.sampled_from(DENSE_SHAPES),
    contributes=st.lists(st.booleans(), min_size=1, max_size=4).filter(any),
    dtype=st.sampled_from(SUMMED),
    is_whole=st.booleans(),
    servers=st.sampled_from(SERVERS),
    chunks=st.integers(1, 4),
    average=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_dense(
    make_dense: MakeDense,
    shape: tuple[int, ...],
    contributes: list[bool],
    dtype: torch.dtype,
    is_whole: bool,
    servers: list[int],
    chunks: int,
    average: bool,
    transposed: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    average = average and dtype.is_floating_point
    tensors = []
    for _ in contributes:
        values = any_values(shape[::-1] if transposed else shape, dtype, generator)
        tensors.append(values.permute(tuple(reversed(range(len(shape))))) if transposed else values)
    before = [tensor.clone() for tensor in tensors]
    taking_part = iter(contributes)

    def begin(tensor: Tensor) -> Transfer:
        contributing = next(taking_part)
        if is_whole:
            return WholeTransfer(tensor, Sharding(None, 1, servers[-1]), contributing, Unchanged(dtype))
        ranges = make_ranges(tensor.numel(), servers)
        return make_dense(tensor, Sharding(ranges, chunks, servers[-1]), contributing)

    results, _ = synchronize(tensors, begin, average)
    for result in results:
        assert result.is_contiguous()
        assert_same_bits(result, expected_dense(tensors, contributes, average))
    for tensor, original in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), original.nan_to_num())


def expected_dense(tensors: Sequence[Tensor], contributes: Sequence[bool], average: bool) -> Tensor:
    """Ranks that do not contribute count for the average alone."""
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(
        tensors[0].dtype, tensors[0].dtype
    )
    given_tensors = [t.to(wide) for t, given in zip(tensors, contributes, strict=True) if given]
    if not given_tensors:
        return torch.zeros_like(tensors[0], memory_format=torch.contiguous_format)
    total = given_tensors[0]
    for tensor in given_tensors[1:]:
        total = total + tensor
    return (total / len(tensors) if average else total).to(tensors[0].dtype).contiguous()


def begin_sparse(tensor: Tensor) -> Transfer:
    return on_the_cpu(tensor, make_layout("balanced", 50, 1, [0, 1], 0), 2, 0, "auto")


def begin_dense(tensor: Tensor, make: MakeDense = dense_on_the_cpu) -> Transfer:
    return make(tensor, Sharding(make_ranges(5000, [0, 1]), 2, 0))


def begin_dense_on_a_device(tensor: Tensor) -> Transfer:
    return begin_dense(tensor, dense_on_a_device)


def begin_whole(tensor: Tensor) -> Transfer:
    return WholeTransfer(tensor, Sharding(None, 1, 0), True, Unchanged(tensor.dtype))


@pytest.mark.parametrize(
    ("begin", "tensor"),
    [
        (begin_sparse, sparse(torch.arange(40), torch.ones(40, 3), (50, 3))),
        (begin_dense, torch.ones(5000)),
        (begin_whole, torch.ones(200)),
    ],
    ids=["sparse", "dense", "whole"],
)
def test_a_tensor_may_change_once_its_transfer_has_begun(
    begin: Callable[[Tensor], Transfer], tensor: Tensor
) -> None:
    expected = reduce_in_rank_order([tensor.clone(), tensor.clone()], average=False)
    transfers = [begin(tensor.clone()), begin(tensor)]
    (tensor._values() if tensor.is_sparse else tensor).fill_(NAN)
    answers = aggregate(transfers, average=False)
    absorb_all(transfers[0], answers)
    assert_same_bits(transfers[0].finish(), expected)


def test_gradients_that_require_gradients() -> None:
    leaf = torch.ones(50, 3, requires_grad=True)
    graph = leaf * 2
    for tensor, begin in (
        (graph.to_sparse(1), begin_sparse),
        (torch.ones(5000, requires_grad=True), begin_dense),
        (torch.ones(5000, requires_grad=True), begin_dense_on_a_device),
    ):
        results, _ = synchronize([tensor, tensor], begin, average=True)
        assert not results[0].requires_grad


def test_home_is_pushed_even_if_it_has_nothing() -> None:
    """Ranks that disagree about the shape, and so about which servers have any of it, find out there."""
    layout = make_layout("centralized", 50, 1, [0, 1, 2], 0)
    chunks = encoded_by(on_the_cpu(rows_of(50), layout, 1, 7, "auto")).chunks
    (owner,) = (chunk.server for chunk in chunks)
    for home in {0, 1, 2} - {owner}:
        chunks = encoded_by(on_the_cpu(rows_of(50), layout, 1, home, "auto")).chunks
        assert {(chunk.server, chunk.span, chunk.rows) for chunk in chunks} == {(owner, 50, 2), (home, 0, 0)}


def rows_of(count: int) -> Tensor:
    return sparse([0, count - 1], torch.ones(2, 3), (count, 3))


def test_rows_outside_the_tensor_are_refused() -> None:
    for row in (-1, 50):
        with pytest.raises(TensorError, match="expected 0 to 49"):
            begin_sparse(sparse([row], torch.ones(1, 3), (50, 3)))


NOTHING = memoryview(b"")


def damaged(answer: Answer) -> dict[str, Answer]:
    server, result, frames = answer.server, answer.result, answer.frames
    other_codec = "coo" if result.codec == "none" else "none"
    return {
        "rows": Answer(server, structs.replace(result, rows=result.rows + 1), frames),
        "codec": Answer(server, structs.replace(result, codec=other_codec), frames),
        "no frames": Answer(server, result, ()),
        "a frame less": Answer(server, result, frames[:-1]),
        "a frame more": Answer(server, result, (*frames, NOTHING)),
        "a frame before": Answer(server, result, (NOTHING, *frames)),
        "no values": Answer(server, result, (*frames[:-1], NOTHING)),
        "longer values": Answer(server, result, (*frames[:-1], memoryview(bytes(frames[-1]) + b"\0"))),
    }


@pytest.mark.parametrize(
    ("begin", "tensor"),
    [
        (begin_sparse, rows_of(50)),
        (begin_dense, torch.ones(5000)),
        (begin_dense_on_a_device, torch.ones(5000)),
        (begin_whole, torch.ones(200)),
    ],
    ids=["sparse", "dense", "dense on a device", "whole"],
)
def test_answers_that_are_not_as_announced(begin: Callable[[Tensor], Transfer], tensor: Tensor) -> None:
    transfer = begin(tensor)
    answer = next(answer for answer in aggregate([transfer], average=False) if answer.result.rows)
    for bad in damaged(answer).values():
        with pytest.raises(ProtocolError) as raised:
            transfer.on_answer(bad)
        assert raised.value.reason == "payload"


def test_a_position_of_no_row_is_refused() -> None:
    """The last granule is padded: its positions lie in the span, but have no row."""
    layout = make_layout("parallel", 33, 32, [0], 0)
    transfer = on_the_cpu(sparse([0], torch.ones(1), (33,)), layout, 1, 0, "coo")
    result = Result(1, "weight", 3, 0, 1, "coo")
    values = memoryview(bytes(4))
    transfer.on_answer(Answer(0, result, (memoryview((32).to_bytes(4, "little")), values)))
    with pytest.raises(ProtocolError, match="33"):
        transfer.on_answer(Answer(0, result, (memoryview((33).to_bytes(4, "little")), values)))


@pytest.mark.parametrize("contributes", [False, True])
def test_a_whole_tensor_that_nobody_pushed_is_zero_or_its_root_is_lost(contributes: bool) -> None:
    transfer = WholeTransfer(torch.ones(3), Sharding(None, 1, 0), contributes, Unchanged(torch.float32))
    transfer.on_answer(Answer(0, Result(1, "t", 0, 0, 0, "none", 0), (NOTHING,)))
    if contributes:
        assert transfer.finish().tolist() == [0, 0, 0]
        return
    with pytest.raises(RootLostError, match="the root is not in the job, or was lost"):
        transfer.finish()


@pytest.mark.parametrize("columns", [0, 1])
def test_a_chunk_of_more_messages_than_can_be_numbered_has_larger_ones(columns: int) -> None:
    tensor = sparse(range(40_000), torch.ones(40_000, columns), (40_000, columns))
    sharding = Sharding(make_layout("balanced", 40_000, 1, [0], 0), 1, 0, message_rows=1, max_rows=2)
    encoded = encoded_by(SparseTransfer(tensor, sharding, "coo", KERNELS, Unchanged(tensor.dtype)))
    assert [chunk.fragment for chunk in encoded.chunks] == list(range(MAX_FRAGMENTS))
    assert sum(chunk.rows for chunk in encoded.chunks) == 40_000
    decoder: Decoder[ToServer] = Decoder("job", ToServer)
    for chunk in encoded.chunks:
        numbers = {"fragment": chunk.fragment, "fragments": chunk.fragments}
        push = structs.replace(make_push(encoded, chunk, 0, False), **numbers)
        assert decoder.decode(encode("job", push, chunk.frames), chunk.frames) == push


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_chunk_that_the_most_messages_do_not_take_is_refused(
    is_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zenps.worker.encode.sparse.MAX_FRAGMENTS", 4)
    tensor = sparse(range(10), torch.ones(10, 1), (10, 1))
    sharding = Sharding(make_layout("balanced", 10, 1, [0], 0), 1, 0, message_rows=1, max_rows=2)
    coder = Unchanged(tensor.dtype)

    def begin() -> Transfer:
        if not is_on_device:
            return SparseTransfer(tensor, sharding, "coo", KERNELS, coder)
        cuda = CudaConfig()
        return prepared(StagedSparse(tensor, sharding, "coo", cuda, on_the_device, ACCELERATOR, coder))

    with pytest.raises(TensorError, match=r"10 rows .* of 2 rows; raise cluster\.max_message_bytes"):
        begin()
