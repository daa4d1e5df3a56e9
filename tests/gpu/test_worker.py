"""The worker on a real GPU: streams, pinned memory, and training."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.encode.test_quantizer import encode, planner_of
from tests.worker.encode.test_transfer import (
    absorb_all,
    aggregate,
    encoded_by,
    make_layout,
    make_ranges,
    sparse,
    synchronize,
)
from zenps.buffers import BufferPool
from zenps.codecs.base import ValueForm
from zenps.codecs.values import RUN, VALUE_CODECS, value_codec
from zenps.config.settings import CudaConfig
from zenps.partition.device_layout import device_layout_on
from zenps.wire.shared_memory.arena import Arena
from zenps.worker.core.request import Options, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.transfer import Sharding, Transfer
from zenps.worker.encode.accelerator import CudaAccelerator
from zenps.worker.encode.dense import DenseTransfer, WholeTransfer
from zenps.worker.encode.gpu import StagedSparse
from zenps.worker.encode.quantizer import Quantizer, Unchanged
from zenps.worker.encode.staged import StagedDense, empty_on
from zenps.worker.training.gradients.buckets import Bucket

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def accelerator() -> CudaAccelerator:
    return CudaAccelerator(torch.device("cuda", 0), DEADLINE_SECONDS)


@pytest.fixture
def _no_device_wide_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def whole_numbers(rows: int, dim: int, nnz: int, seed: int) -> Tensor:
    """A gradient on the CPU whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(nnz, generator=generator) ** 4 * rows).long()
    return sparse(ids, torch.randint(-8, 8, (nnz, dim), generator=generator).float(), (rows, dim))


def prepared(transfer: Transfer, accelerator: CudaAccelerator) -> Transfer:
    for _ in range(3):
        if not transfer.prepared():
            accelerator.wait_for(accelerator.pushing.mark())
    assert transfer.prepared()
    return transfer


@pytest.mark.parametrize("compaction", ["sort", "bitmap"])
def test_rounds_of_many_sizes_reuse_memory_and_stay_right(
    accelerator: CudaAccelerator, compaction: str
) -> None:
    layout = make_layout("balanced", 100_000, 1, [0, 1, 2], 0)
    device_layout = device_layout_on(layout, accelerator.device)
    settings = CudaConfig(compaction=compaction)  # type: ignore[arg-type]

    def begin(tensor: Tensor) -> Transfer:
        sharding, coder = Sharding(layout, 2, 0), Unchanged(tensor.dtype)
        staged = StagedSparse(
            tensor.cuda(), sharding, "auto", settings, lambda _: device_layout, accelerator, coder
        )
        return prepared(staged, accelerator)

    for seed, nnz in enumerate((0, 1, 60_000, 33, 200_000, 5, 120_000, 60_000)):
        tensors = [whole_numbers(100_000, 32, nnz, 2 * seed + rank) for rank in range(2)]
        results, _ = synchronize(tensors, begin, average=False)
        for result in results:
            assert result.is_cuda
            assert_same_bits(result.cpu(), reduce_in_rank_order(tensors, average=False))


@pytest.mark.usefixtures("_no_device_wide_wait")
def test_a_gradient_is_compacted_without_waiting(accelerator: CudaAccelerator) -> None:
    layout = make_layout("balanced", 100_000, 1, [0, 1, 2], 0)
    torch.cuda.set_sync_debug_mode("default")
    device_layout = device_layout_on(layout, accelerator.device)
    tensor = whole_numbers(100_000, 32, 50_000, 1).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    sharding, coder = Sharding(layout, 2, 0), Unchanged(tensor.dtype)
    transfer = StagedSparse(
        tensor, sharding, "auto", CudaConfig(), lambda _: device_layout, accelerator, coder
    )
    prepared(transfer, accelerator)
    assert sum(chunk.rows for chunk in encoded_by(transfer).chunks) > 0


def test_the_callers_stream_goes_first(accelerator: CudaAccelerator) -> None:
    """What is compacted is what the gradient is once all work before it is done."""
    layout = make_layout("balanced", 1000, 1, [0, 1], 0)
    device_layout = device_layout_on(layout, accelerator.device)
    tensor = sparse(torch.arange(1000), torch.full((1000, 4), 3.0), (1000, 4)).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        tensor._values().mul_(2)
        sharding, coder = Sharding(layout, 1, 0), Unchanged(tensor.dtype)
        transfer = StagedSparse(
            tensor, sharding, "coo", CudaConfig(), lambda _: device_layout, accelerator, coder
        )
    prepared(transfer, accelerator)
    for chunk in encoded_by(transfer).chunks:
        assert (torch.frombuffer(bytearray(chunk.frames[1]), dtype=torch.float32) == 6).all()


def test_a_result_does_not_wait_for_gradients_that_came_later(accelerator: CudaAccelerator) -> None:
    layout = make_layout("balanced", 1000, 1, [0, 1], 0)
    device_layout = device_layout_on(layout, accelerator.device)
    tensor = whole_numbers(1000, 4, 500, 1)

    def answered() -> Transfer:
        sharding, coder = Sharding(layout, 1, 0), Unchanged(tensor.dtype)
        transfer = prepared(
            StagedSparse(
                tensor.cuda(), sharding, "auto", CudaConfig(), lambda _: device_layout, accelerator, coder
            ),
            accelerator,
        )
        absorb_all(transfer, aggregate([transfer], average=False))
        return transfer

    answered().finish()  # compiles what a pull needs
    transfer = answered()
    with accelerator.pushing.current():
        torch.cuda._sleep(4_000_000_000)
    busy = accelerator.pushing.mark()
    result = transfer.finish()
    assert not busy.query()
    assert_same_bits(result.cpu(), tensor.coalesce())


def test_what_is_pushed_lies_where_servers_of_this_host_read() -> None:
    accelerator = CudaAccelerator(torch.device("cuda", 0), DEADLINE_SECONDS)
    arena = Arena(1 << 26)
    try:
        pool = accelerator.pinned_in(arena)
        assert pool is not accelerator.pinned, "the driver did not pin it"
        layout = make_layout("balanced", 100_000, 1, [0, 1, 2], 0)
        device_layout = device_layout_on(layout, accelerator.device)

        def begin(tensor: Tensor) -> Transfer:
            sharding, coder, cuda = Sharding(layout, 2, 0), Unchanged(tensor.dtype), CudaConfig()
            staged = StagedSparse(
                tensor.cuda(), sharding, "coo", cuda, lambda _: device_layout, accelerator, coder, pool=pool
            )
            return prepared(staged, accelerator)

        tensors = [whole_numbers(100_000, 32, 60_000, rank) for rank in range(2)]
        results, transfer = synchronize(tensors, begin, average=False)
        for result in results:
            assert_same_bits(result.cpu(), reduce_in_rank_order(tensors, average=False))
        frames = [chunk.frames[1] for chunk in encoded_by(transfer).chunks]
        assert all(arena.find(frame) is not None for frame in frames)
    finally:
        arena.close()


@pytest.mark.parametrize("servers", [[0], [0, 1, 2]], ids=len)
@pytest.mark.parametrize("count", [70_000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense(accelerator: CudaAccelerator, dtype: torch.dtype, count: int, servers: list[int]) -> None:
    layout = make_ranges(count, servers)
    coder = Unchanged(dtype)

    def begin(tensor: Tensor) -> Transfer:
        sharding, there = Sharding(layout, 2, 0), tensor.cuda()
        staged = StagedDense(there, sharding, True, coder, accelerator, accelerator.pinned)
        return prepared(staged, accelerator)

    for _ in range(3):
        tensors = [torch.randn(count).to(dtype) for _ in range(2)]
        results, transfer = synchronize(tensors, begin, average=True)
        for result in results:
            assert result.is_cuda
            assert_same_bits(result.cpu(), reduce_in_rank_order(tensors, average=True))
        on_the_cpu = DenseTransfer(tensors[0], Sharding(layout, 2, 0), BufferPool(0), True, coder)
        assert encoded_by(transfer) == encoded_by(on_the_cpu)


def make_bucket(elements: int) -> Bucket:
    """Of two parameters; only the first has a gradient."""
    first, second = (nn.Parameter(torch.zeros(size)) for size in (elements - elements // 3, elements // 3))
    first.grad = torch.randn(len(first))
    return Bucket("bucket", [first, second], RUN)


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("count", [3000, 70_000, 1 << 20])
@pytest.mark.parametrize("form", VALUE_CODECS)
def test_a_device_rounds_a_dense_gradient_as_the_cpu(
    accelerator: CudaAccelerator, form: ValueForm, count: int, has_parts: bool
) -> None:
    """Bit for bit, with what was rounded off before, and with values that are no numbers."""
    parts = make_bucket(count).parts if has_parts else None
    count = count if parts is None else parts.flags.stop
    layout = make_ranges(count, [0, 1, 2])
    sharding = Sharding(layout, 2, 0) if count > 20_000 else Sharding(None, 1, 0)
    size = layout.size if sharding.layout else count
    codec = VALUE_CODECS[form]
    here, there = torch.zeros(size, 1), torch.zeros(size, 1, device="cuda")
    host = Quantizer(codec, here, BufferPool(0).empty, parts)
    device = Quantizer(codec, there, partial(empty_on, accelerator.device), parts)
    for step in range(3):
        tensor = torch.randn(count) * torch.logspace(-42, 3, count)
        if parts is not None:
            tensor[parts.flags] = torch.tensor([1.0, 0.0 if step == 1 else 1.0])
        if step == 2:
            tensor[5], tensor[700] = float("inf"), float("-inf")
        pool = accelerator.pinned
        staged = StagedDense(tensor.cuda(), sharding, True, device, accelerator, pool)
        transfer = prepared(staged, accelerator)
        on_the_cpu: Transfer
        if sharding.layout:
            on_the_cpu = DenseTransfer(tensor, sharding, BufferPool(0), True, host)
        else:
            on_the_cpu = WholeTransfer(tensor, sharding, True, host)
        assert encoded_by(transfer) == encoded_by(on_the_cpu)
        assert_same_bits(there.cpu(), here)
        answers = aggregate([transfer, on_the_cpu], average=True)
        for each in (transfer, on_the_cpu):
            absorb_all(each, answers)
        assert_same_bits(transfer.finish().cpu(), on_the_cpu.finish())


@pytest.mark.parametrize("form", VALUE_CODECS)
def test_residuals_of_dense_gradients_are_on_the_device(form: ValueForm) -> None:
    planner, residuals = planner_of(form), Residuals()
    options = Options(purpose="gradient", residuals=residuals)
    gradient = torch.randn(70_000)
    on_the_cpu = encode(planner, gradient, "gradient")
    staged = planner.begin(Request(gradient.cuda(), "weight", options), 0)
    while not staged.prepared():
        pass
    assert encoded_by(staged) == on_the_cpu
    residual = residuals.peek("weight")
    assert residual is not None
    assert residual.is_cuda


@pytest.mark.usefixtures("_no_device_wide_wait")
@pytest.mark.parametrize("form", ["same", *VALUE_CODECS])
def test_a_dense_gradient_is_moved_without_waiting(accelerator: CudaAccelerator, form: ValueForm) -> None:
    """No call waits for the device."""
    torch.cuda.set_sync_debug_mode("default")
    bucket = make_bucket(70_000)
    tensor = bucket.fused().cuda()
    layout = make_ranges(len(tensor), [0, 1, 2])
    residual = torch.zeros(layout.size, 1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    codec = value_codec(form, 1, is_dense=True)
    empty = partial(empty_on, accelerator.device)
    coder = Unchanged(tensor.dtype) if codec is None else Quantizer(codec, residual, empty, bucket.parts)
    sharding, pool = Sharding(layout, 2, 0), accelerator.pinned
    transfer = prepared(StagedDense(tensor, sharding, True, coder, accelerator, pool), accelerator)
    absorb_all(transfer, aggregate([transfer], average=False))
    result = transfer.finish()
    torch.cuda.set_sync_debug_mode("default")
    if codec is None:
        assert_same_bits(result.cpu(), tensor.cpu())
    torch.testing.assert_close(result.cpu(), tensor.cpu(), rtol=0.01, atol=0.05)


@pytest.mark.timeout(300)
def test_two_workers_train_on_one_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    launch = [sys.executable, "-m", "zenps.cli", "launch", "--workers", "2", "--servers", "2", "--"]
    script = [sys.executable, str(EXAMPLES / "lstm_lm.py"), "--device", "cuda", "--steps", "60"]
    done = subprocess.run(
        [*launch, *script, "--report", str(report)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = json.loads(report.read_text())["held_out_loss"]
    assert after < 0.8 * before
