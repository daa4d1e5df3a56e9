"""Tensors on a GPU: what differs from the CPU's way. The rest is in test_transfer.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_model import FREE
from tests.cuda.host.launcher import HostLauncher
from tests.cuda.mirror import ON_A_GPU
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.encode.test_transfer import (
    ACCELERATOR,
    POOL,
    absorb_all,
    aggregate,
    damaged,
    dense_on_a_device,
    dense_on_the_cpu,
    encoded_by,
    make_layout,
    make_ranges,
    on_a_device,
    on_the_cpu,
    on_the_device,
    prepared,
    rows_of,
    sparse,
    synchronize,
)
from tests.worker.host_accelerator import HostAccelerator, HostStream
from zenps.buffers import BufferPool
from zenps.codecs.base import ValueForm
from zenps.codecs.values import RUN, VALUE_CODECS, value_codec
from zenps.config.settings import CudaConfig
from zenps.errors import DeadlineError, ProtocolError, TensorError
from zenps.kernels.gpu.bitmap_compact import VALUES
from zenps.kernels.gpu.launcher import Argument
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.messages import Result
from zenps.wire.tensors import DTYPES
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.core.transfer import Answer, Sharding, Transfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.encode.dense import DENSE_GRANULE, WholeTransfer
from zenps.worker.encode.gpu import StagedSparse
from zenps.worker.encode.quantizer import Quantizer, Unchanged
from zenps.worker.encode.staged import StagedDense
from zenps.worker.training.gradients.buckets import Bucket
from zenps.worker.transport.channel import Channel
from zenps.worker.transport.submit_queue import SubmitQueue

LAYOUT = make_layout("balanced", 600, 1, [0, 1, 2], 0)


def whole_numbers(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-8, 8, (count, columns), generator=generator).to(dtype)


def staged(tensor: Tensor, settings: CudaConfig, codec: str = "auto") -> StagedSparse:
    coder = Unchanged(tensor.dtype)
    return StagedSparse(tensor, Sharding(LAYOUT, 2, 0), codec, settings, on_the_device, ACCELERATOR, coder)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("nnz", [0, 1, 900])
def test_a_bitmap_gives_the_same_sums(dtype: torch.dtype, nnz: int) -> None:
    generator = torch.Generator().manual_seed(nnz)
    tensors = [
        sparse(torch.randint(0, 600, (nnz,), generator=generator), whole_numbers(nnz, 5, dtype), (600, 5))
        for _ in range(2)
    ]

    def begin(tensor: Tensor) -> Transfer:
        return prepared(staged(tensor, CudaConfig(compaction="bitmap")))

    results, _ = synchronize(tensors, begin, average=False)
    for result in results:
        assert_same_bits(result, reduce_in_rank_order(tensors, average=False))


@pytest.mark.parametrize("codec", ["coo", "bitmap", "delta"])
def test_the_bytes_on_the_wire_are_those_of_the_cpu(codec: str) -> None:
    tensor = sparse(torch.arange(0, 600, 7).flip(0), torch.randn(86, 5), (600, 5))
    ours = on_a_device("sort")(tensor, LAYOUT, 2, 0, codec)
    theirs = on_the_cpu(tensor, LAYOUT, 2, 0, codec)
    assert encoded_by(ours) == encoded_by(theirs)


class _Counted(HostAccelerator):
    """Notes the kernels of ZenPS by stream, and buffers in pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, list[str]] = {"pushing": [], "pulling": []}
        self.pinned_buffers: list[Tensor] = []
        self.stream = "none"
        counted = self

        class Launcher(HostLauncher):
            def launch(
                self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]
            ) -> None:
                if grid:
                    counted.kernels[counted.stream].append(expression.partition("<")[0])
                super().launch(source, expression, grid, block, args)

        class Pool(BufferPool):
            def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
                counted.pinned_buffers.append(super().empty(shape, dtype))
                return counted.pinned_buffers[-1]

        class Counting(HostStream):
            def __init__(self, name: str) -> None:
                self._name = name

            @contextlib.contextmanager
            def current(self) -> Iterator[None]:
                before, counted.stream = counted.stream, self._name
                yield
                counted.stream = before

        self.launcher, self.pinned = Launcher(), Pool(keep_bytes=1 << 26)
        self.pushing, self.pulling = Counting("pushing"), Counting("pulling")


class _Operations(TorchDispatchMode):
    """Counts PyTorch's launches, and apart from them copies between host and device.

    Args:
        counted: says on which stream they are; these are noted in ``streams``.
    """

    ON_THE_HOST = ("_nnz", "sparse_dim", "_indices", "_values", "_local_scalar_dense", "lift_fresh")
    launches = copies = 0

    def __init__(self, counted: _Counted) -> None:
        super().__init__()
        self._counted = counted
        self.streams: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            self.copies += 1
        elif name not in FREE and name not in self.ON_THE_HOST:
            self.launches += 1
        else:
            return func(*args, **(kwargs or {}))
        self.streams.add(self._counted.stream)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(ON_A_GPU, reason="each launch of the tests then copies its tensors there and back")
@pytest.mark.parametrize("servers", [2, 16])
@pytest.mark.parametrize("rows", [300, 70_000])
@pytest.mark.parametrize(("codec", "last"), [("bitmap", "encode_bitmaps"), ("coo", "encode_coo")])
def test_launches_and_copies_of_a_push_grow_with_nothing(
    codec: str, last: str, rows: int, servers: int
) -> None:
    """PyTorch launches nothing. One copy comes back, and what is sent is that memory itself."""
    layout = make_layout("balanced", 600, 1, list(range(servers)), 0)
    tensor = sparse(torch.arange(0, 2 * rows, 2) % 600, torch.randn(rows, 5), (600, 5))
    counted, coder = _Counted(), Unchanged(tensor.dtype)
    with _Operations(counted) as operations:
        transfer = StagedSparse(
            tensor, Sharding(layout, 2, 0), codec, CudaConfig(), on_the_device, counted, coder
        )
        prepared(transfer)
    chunks = encoded_by(transfer).chunks
    assert len(chunks) >= servers
    assert counted.kernels["pushing"] == ["place_rows", "sort_segments", "reduce_runs", last]
    assert (operations.copies, operations.launches) == (1, 0)
    # What kernels tell the host is small.
    *_, payload = counted.pinned_buffers
    assert len(counted.pinned_buffers) == 2
    frames = [frame for chunk in chunks for frame in chunk.frames if frame.nbytes]
    assert len(frames) == 2 * len(chunks)
    assert all(np.shares_memory(np.frombuffer(frame, np.uint8), payload.numpy()) for frame in frames)


def test_pulls_have_a_stream_of_their_own_and_no_copy_on_the_host() -> None:
    tensor = sparse(torch.arange(0, 600, 2), torch.randn(300, 5), (600, 5))
    counted, coder = _Counted(), Unchanged(tensor.dtype)
    transfer = prepared(
        StagedSparse(tensor, Sharding(LAYOUT, 2, 0), "auto", CudaConfig(), on_the_device, counted, coder)
    )
    pushing = list(counted.kernels["pushing"])
    counted.pinned_buffers.clear()
    answers = aggregate([transfer], average=False)
    absorb_all(transfer, answers)
    assert_same_bits(transfer.finish(), tensor.coalesce())
    assert counted.kernels == {
        "pushing": pushing,
        "pulling": ["decode_bitmap"] * len(answers) + ["radix_sort", "gather_rows"],
    }
    # What comes back says whether all positions were possible.
    assert len(counted.pinned_buffers) == 1


@pytest.mark.parametrize("compaction", ["sort", "bitmap"])
@pytest.mark.parametrize(
    ("indices", "shape"),
    [([[600]], (600, 5)), ([[-1]], (600, 5)), ([[20], [30]], (20, 30, 5)), ([[0], [30]], (20, 30, 5)),
     ([[1], [-1]], (20, 30, 5))],
)  # fmt: skip
def test_indices_outside_the_tensor_are_refused(
    indices: list[list[int]], shape: tuple[int, ...], compaction: Literal["sort", "bitmap"]
) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor(indices), torch.ones(1, 5), shape, check_invariants=False)
    with pytest.raises(TensorError, match="outside the tensor's shape"):
        prepared(staged(tensor, CudaConfig(compaction=compaction)))


def test_a_dtype_that_atomics_cannot_add_is_refused() -> None:
    tensor = sparse([1], torch.ones(1, 5, dtype=torch.float64), (600, 5))
    with pytest.raises(TensorError, match=r"set cuda\.compaction to sort for other dtypes"):
        staged(tensor, CudaConfig(compaction="bitmap"))


def test_answers_that_are_not_as_announced() -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig()))
    answer = next(answer for answer in aggregate([transfer], average=False) if answer.result.rows)
    for bad in damaged(answer).values():
        with pytest.raises(ProtocolError) as raised:
            transfer.on_answer(bad)
        assert raised.value.reason == "payload"


@pytest.mark.parametrize("positions", [[5, 5], [7, 3], [-1, 4], [3, 10**6]])
def test_positions_that_are_not_possible_are_refused_before_the_result_is_used(positions: list[int]) -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig(), codec="coo"))
    (first, *others) = aggregate([transfer], average=False)
    absorb_all(transfer, others)
    encoded = torch.tensor(positions, dtype=torch.int32).numpy().tobytes()
    result = Result(1, "weight", 3, first.result.chunk, 2, "coo")
    transfer.on_answer(Answer(first.server, result, (memoryview(encoded), memoryview(bytes(24)))))
    with pytest.raises(ProtocolError, match="positions that do not increase"):
        transfer.finish()


def test_a_fault_in_an_answer_is_forgotten_with_it() -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig(), codec="coo"))
    answers = aggregate([transfer], average=False)
    twice_the_same = memoryview(torch.tensor([5, 5], dtype=torch.int32).numpy().tobytes())
    result = Result(1, "weight", 3, answers[0].result.chunk, 2, "coo")
    transfer.on_answer(Answer(answers[0].server, result, (twice_the_same, memoryview(bytes(24)))))
    transfer.restart(encoded_by(transfer))
    absorb_all(transfer, answers)
    assert transfer.finish().indices().tolist() == [[0, 599]]


@pytest.mark.parametrize("shape", [(), (3, 4), (0, 3)])
def test_small_dense(shape: Sequence[int]) -> None:
    tensors = [
        torch.randn(tuple(shape)),
        torch.randn(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape))))),
    ]
    results, _ = synchronize(tensors, lambda tensor: prepared(whole(tensor, ACCELERATOR)), True)
    for result in results:
        assert_same_bits(result, reduce_in_rank_order(tensors, average=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("count", [1, 255, 256, 5000, 70_000])
@pytest.mark.parametrize("servers", [[0], [0, 1], [2, 5, 9]], ids=len)
def test_a_device_sends_what_the_cpu_sends(servers: list[int], count: int, dtype: torch.dtype) -> None:
    sharding = Sharding(make_ranges(count, servers), 2, servers[-1])
    tensor = torch.rand(2 * count).mul(100).to(dtype)[::2]
    encoded = encoded_by(dense_on_a_device(tensor, sharding))
    assert encoded == encoded_by(dense_on_the_cpu(tensor, sharding))
    assert encoded.values == "same"


def granules(
    tensor: Tensor,
    sharding: Sharding,
    accelerator: HostAccelerator,
) -> Transfer:
    coder, pool = Unchanged(tensor.dtype), accelerator.pinned
    return prepared(StagedDense(tensor, sharding, True, coder, accelerator, pool))


@pytest.mark.parametrize("servers", [1, 2, 16])
@pytest.mark.parametrize("count", [70_000, 71_680])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_copies_no_dense_value(dtype: torch.dtype, count: int, servers: int) -> None:
    """One copy comes back, and what is sent is that memory itself. What is pulled goes to the device."""
    layout = make_ranges(count, list(range(servers)))
    tensor, counted = torch.randn(count).to(dtype), _Counted()
    with _Operations(counted) as operations:
        transfer = granules(tensor, Sharding(layout, 2, 0), counted)
    assert (operations.copies, operations.launches) == (1, int(count % DENSE_GRANULE > 0))
    assert operations.streams == {"pushing"}
    (payload,) = counted.pinned_buffers
    assert payload.nbytes == layout.size * dtype.itemsize
    frames = [frame for chunk in encoded_by(transfer).chunks for frame in chunk.frames]
    pinned = payload.view(torch.uint8).numpy()
    assert all(np.shares_memory(np.frombuffer(frame, np.uint8), pinned) for frame in frames)

    answers = aggregate([transfer], average=False)
    with _Operations(counted) as operations:
        absorb_all(transfer, answers)
        result = transfer.finish()
    assert (operations.copies, operations.launches) == (len(answers), 0)
    assert operations.streams == {"pulling"}
    assert len(counted.pinned_buffers) == 1
    assert_same_bits(result, tensor)


@pytest.mark.parametrize("form", ["same", *VALUE_CODECS])
@pytest.mark.parametrize("servers", [0, 1, 2], ids=["whole", "one", "split"])
def test_what_is_pushed_of_a_dense_gradient_is_the_copy_itself(form: ValueForm, servers: int) -> None:
    """Also of a small one, and if the device quantizes it."""
    sharding, count = Sharding(None, 1, 0), 3000
    if servers:
        layout = make_ranges(count, list(range(servers)))
        sharding, count = Sharding(layout, 2, 0), layout.size
    codec, counted = value_codec(form, 1, is_dense=True), _Counted()
    residual = torch.full((count, 1), 0.25)
    coder = Unchanged(torch.float32) if codec is None else Quantizer(codec, residual, POOL.empty)
    tensor, pool = torch.randn(count), counted.pinned
    before = tensor.clone()
    transfer = prepared(StagedDense(tensor, sharding, True, coder, counted, pool))
    (payload,) = counted.pinned_buffers
    assert payload.numel() == coder.size_bytes(count, 1)
    frames = [frame for chunk in encoded_by(transfer).chunks for frame in chunk.frames]
    assert all(np.shares_memory(np.frombuffer(frame, np.uint8), payload.numpy()) for frame in frames)
    absorb_all(transfer, aggregate([transfer], average=False))
    assert_same_bits(tensor, before)
    pushed = tensor if codec is None else tensor + 0.25
    pulled = transfer.finish()
    if codec is None:
        assert_same_bits(pulled, tensor)
    torch.testing.assert_close(pulled, pushed, rtol=0.01, atol=0.05)
    assert len(counted.pinned_buffers) == 1


def test_which_parts_of_a_gradient_there_are_is_read_from_a_copy_on_the_host() -> None:
    """The host must not read memory of a device, nor wait for it."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 70, 5)]
    bucket = Bucket("bucket", parameters, RUN)
    parameters[0].grad, parameters[2].grad = torch.ones(3), torch.ones(5)
    gradient, counted, told = bucket.fused(), _Counted(), list[Tensor | None]()

    class Coder(Quantizer):
        def encode(self, values: Tensor, flags: Tensor | None = None) -> Tensor:
            told.append(flags)
            return super().encode(values, flags)

    residual = torch.full((len(gradient), 1), 0.25)
    coder = Coder(VALUE_CODECS["bfloat16"], residual, POOL.empty, bucket.parts)
    sharding, pool = Sharding(None, 1, 0), counted.pinned
    prepared(StagedDense(gradient, sharding, True, coder, counted, pool))
    flags, _ = counted.pinned_buffers
    assert told == [flags]
    assert flags.tolist() == [1, 0, 1]
    assert (residual[3:73] == 0.25).all(), "of a part that is not there nothing is pushed"
    assert (residual[:3] == 0).all()


def whole(tensor: Tensor, accelerator: HostAccelerator) -> StagedDense:
    coder, pool, sharding = Unchanged(tensor.dtype), accelerator.pinned, Sharding(None, 1, 0)
    return StagedDense(tensor, sharding, True, coder, accelerator, pool)


def test_a_negative_view_is_pushed_with_its_sign() -> None:
    class Asynchronous(HostAccelerator):
        """Copies bytes as they are, as CUDA does."""

        def to_host(self, tensor: Tensor, pool: BufferPool | None = None) -> Tensor:
            return super().to_host(torch._neg_view(tensor) if tensor.is_neg() else tensor, pool)

    tensor = torch._neg_view(torch.tensor([1.0, -2.0]))
    results, _ = synchronize([tensor], lambda each: prepared(whole(each, Asynchronous())), average=False)
    assert results[0].tolist() == [-1.0, 2.0]
    large = torch._neg_view(torch.ones(600))
    sharding = Sharding(make_ranges(600, [0]), 1, 0)
    results, _ = synchronize([large], lambda each: granules(each, sharding, Asynchronous()), average=False)
    assert results[0].tolist() == [-1.0] * 600


def test_a_device_that_hangs_is_an_error() -> None:
    class Hung(HostStream):
        def mark(self) -> Never:
            return Never()

    class Never:
        def query(self) -> bool:
            return False

    hung = HostAccelerator()
    hung.pushing, hung.deadline_seconds = Hung(), 0.05
    transfer = whole(torch.ones(3), hung)
    assert not transfer.prepared()
    with pytest.raises(
        DeadlineError, match=r"cpu did not finish its work within 0.05 s; raise cluster.deadline_seconds"
    ):
        hung.wait_for(hung.pushing.mark())


def test_device_that_fails_fails_its_round_alone() -> None:
    class Full(HostStream):
        def mark(self) -> Failing:
            return Failing()

    class Failing:
        def query(self) -> bool:
            raise RuntimeError("out of memory")  # as torch's OutOfMemoryError is one

    class Submitted(list[Pending]):
        """In place of a channel: what is pushed."""

        failure = None
        submit = list[Pending].append

    full = HostAccelerator()
    full.pushing = Full()
    steps, submitted = Steps(WorkerMetrics(CollectorRegistry()).steps), Submitted()
    queue = SubmitQueue(cast(Channel, submitted), steps, Spans())
    waiting = Waiting(Notifier(), 20.0, Statistics(WorkerMetrics(CollectorRegistry())), Spans())
    progress = steps.begin("weight", 1)
    pending = Pending("weight", Options(), whole(torch.ones(3), full), progress, waiting)
    queue.submit(pending)
    queue.advance(until=0.0)
    assert not submitted
    for _ in range(2):
        with pytest.raises(TensorError, match="a tensor on cpu: out of memory"):
            pending.wait()
        queue.advance(until=0.0)
    assert steps.begin("weight", 1).step == progress.step
    one = WholeTransfer(torch.ones(3), Sharding(None, 1, 0), True, Unchanged(torch.float32))
    another = Pending("bias", Options(), one, steps.begin("bias", 1), waiting)
    queue.submit(another)
    assert submitted == [another]


def test_a_device_without_memory_for_the_copy_is_an_error() -> None:
    class Full(BufferPool):
        def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            raise RuntimeError("out of memory")

    full = HostAccelerator()
    full.pinned = Full(keep_bytes=0)
    with pytest.raises(TensorError, match="a tensor on cpu: out of memory"):
        whole(torch.ones(3), full)


def test_the_result_of_answers_in_any_order_is_coalesced() -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig()))
    absorb_all(transfer, aggregate([transfer], average=False)[::-1])
    finished = transfer.finish()
    assert finished.is_coalesced()
    assert finished.indices().tolist() == [[0, 599]]
