"""Tensors on a GPU: what differs from the CPU's way. What does not is in test_transfer.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.encode.test_transfer import (
    ACCELERATOR,
    Answer,
    aggregate,
    damaged,
    make_layout,
    on_a_device,
    on_the_cpu,
    on_the_device,
    prepared,
    rows_of,
    sparse,
    synchronize,
)
from tests.worker.host_accelerator import HostAccelerator
from zenps.config.settings import CudaConfig
from zenps.errors import DeadlineError, ProtocolError, TensorError
from zenps.wire.messages import Result
from zenps.worker.core.transfer import Sharding, Transfer
from zenps.worker.encode.dense import DENSE_GRANULE, DenseTransfer, WholeTransfer
from zenps.worker.encode.gpu import StagedDense, StagedSparse
from zenps.worker.encode.gpu_queue import Staging

LAYOUT = make_layout("balanced", 600, 1, [0, 1, 2], 0)


def whole_numbers(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Values whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-8, 8, (count, columns), generator=generator).to(dtype)


def staged(tensor: Tensor, settings: CudaConfig, codec: str = "auto") -> StagedSparse:
    return StagedSparse(tensor, Sharding(LAYOUT, 2, 0), codec, settings, on_the_device, ACCELERATOR)


@pytest.mark.parametrize("compaction", ["bitmap", "hash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nnz", [0, 1, 900])
def test_every_compaction_gives_the_same_sums(compaction: str, dtype: torch.dtype, nnz: int) -> None:
    generator = torch.Generator().manual_seed(nnz)
    tensors = [
        sparse(torch.randint(0, 600, (nnz,), generator=generator), whole_numbers(nnz, 5, dtype), (600, 5))
        for _ in range(2)
    ]

    def begin(tensor: Tensor) -> Transfer:
        return prepared(staged(tensor, CudaConfig(compaction=compaction)))  # type: ignore[arg-type]

    results, transfer = synchronize(tensors, begin, average=False)
    for result in results:
        assert_same_bits(result, reduce_in_rank_order(tensors, average=False))
    assert int(transfer.hashed_rows.sum()) == (nnz if compaction == "hash" else 0)


@pytest.mark.parametrize("codec", ["coo", "bitmap", "delta"])
def test_the_bytes_on_the_wire_are_those_of_the_cpu(codec: str) -> None:
    tensor = sparse(torch.arange(0, 600, 7).flip(0), torch.randn(86, 5), (600, 5))
    ours = on_a_device("sort")(tensor, LAYOUT, 2, 0, codec)
    theirs = on_the_cpu(tensor, LAYOUT, 2, 0, codec)
    assert ours.sent == theirs.sent


def test_a_hash_memory_that_overflows_grows_until_no_row_is_lost() -> None:
    tensor = sparse(torch.arange(600), whole_numbers(600, 5, torch.float32), (600, 5))
    settings = CudaConfig(compaction="hash", parallel_factor=0.125, serial_factor=0.01, hash_functions=1)
    (result, _), transfer = synchronize(
        [tensor, tensor], lambda tensor: prepared(staged(tensor, settings)), average=False
    )
    assert_same_bits(result, reduce_in_rank_order([tensor, tensor], average=False))
    overflowed = int(transfer.hashed_rows[3])
    assert overflowed > 0
    # Each attempt counts all rows, however they ended.
    assert int(transfer.hashed_rows.sum()) % 600 == 0


@pytest.mark.parametrize(
    ("indices", "shape"),
    [([[600]], (600, 5)), ([[-1]], (600, 5)), ([[20], [30]], (20, 30, 5)), ([[0], [30]], (20, 30, 5)),
     ([[1], [-1]], (20, 30, 5))],
)  # fmt: skip
def test_indices_outside_the_tensor_are_refused(indices: list[list[int]], shape: tuple[int, ...]) -> None:
    tensor = torch.sparse_coo_tensor(indices, torch.ones(1, 5), shape, check_invariants=False)
    with pytest.raises(TensorError, match="outside the tensor's shape"):
        prepared(staged(tensor, CudaConfig()))


def test_a_dtype_that_atomics_cannot_add_is_refused() -> None:
    tensor = sparse([1], torch.ones(1, 5, dtype=torch.float64), (600, 5))
    with pytest.raises(TensorError, match="use sort_compact"):
        staged(tensor, CudaConfig(compaction="hash"))


def test_answers_that_are_not_as_announced() -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig()))
    answer = next(answer for answer in aggregate([transfer], average=False) if answer[1].rows)
    part = answer[0]
    for result, frames in damaged(answer).values():
        with pytest.raises(ProtocolError) as raised:
            transfer.absorb(part.server, part.chunk, result, frames)
        assert raised.value.reason == "payload"


@pytest.mark.parametrize("positions", [[5, 5], [7, 3], [-1, 4], [3, 10**6]])
def test_positions_that_are_not_possible_are_refused_before_the_result_is_used(positions: list[int]) -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig(), codec="coo"))
    (first, *others) = aggregate([transfer], average=False)
    for part, result, frames in others:
        transfer.absorb(part.server, part.chunk, result, frames)
    encoded = torch.tensor(positions, dtype=torch.int32).numpy().tobytes()
    result = Result(1, "weight", 3, first[0].chunk, 2, "coo")
    transfer.absorb(first[0].server, first[0].chunk, result, (memoryview(encoded), memoryview(bytes(24))))
    with pytest.raises(ProtocolError, match="positions that do not increase"):
        transfer.finish()


def test_a_fault_in_an_answer_is_forgotten_with_it() -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig(), codec="coo"))
    answers = aggregate([transfer], average=False)
    part = answers[0][0]
    twice_the_same = memoryview(torch.tensor([5, 5], dtype=torch.int32).numpy().tobytes())
    result = Result(1, "weight", 3, part.chunk, 2, "coo")
    transfer.absorb(part.server, part.chunk, result, (twice_the_same, memoryview(bytes(24))))
    transfer.restart(transfer.sent)
    for part, result, frames in answers:
        transfer.absorb(part.server, part.chunk, result, frames)
    assert transfer.finish().indices().tolist() == [[0, 599]]


@pytest.mark.parametrize("shape", [(), (3, 4), (5000,), (0, 3)])
def test_dense(shape: Sequence[int]) -> None:
    tensors = [
        torch.randn(tuple(shape)),
        torch.randn(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape))))),
    ]
    layout = make_layout("balanced", tensors[0].numel(), DENSE_GRANULE, [0, 1], 0)

    def make(copy: Tensor) -> Transfer:
        if copy.numel() < 1000:
            return WholeTransfer(copy, Sharding(None, 1, 0), True)
        return DenseTransfer(copy, Sharding(layout, 2, 0), ACCELERATOR.pinned, True)

    results, _ = synchronize(tensors, lambda tensor: prepared(StagedDense(tensor, make, ACCELERATOR)), True)
    for result in results:
        assert_same_bits(result, reduce_in_rank_order(tensors, average=True))


def test_a_device_that_hangs_is_an_error() -> None:
    class Hung(HostAccelerator):
        def mark(self) -> Never:
            return Never()

    class Never:
        def query(self) -> bool:
            return False

    hung = Hung()
    hung.deadline_seconds = 0.05
    transfer = StagedDense(torch.ones(3), lambda copy: WholeTransfer(copy, Sharding(None, 1, 0), True), hung)
    assert not transfer.prepared()
    with pytest.raises(DeadlineError, match=r"cpu did not finish its work within 0.05 s"):
        hung.wait_for(hung.mark())


def test_device_that_fails_fails_its_round_alone() -> None:
    class Full(HostAccelerator):
        def mark(self) -> Failing:
            return Failing()

    class Failing:
        def query(self) -> bool:
            raise RuntimeError("out of memory")  # as torch's OutOfMemoryError is one

    staging, begun, failures = Staging(), [], []
    transfer = StagedDense(
        torch.ones(3), lambda copy: WholeTransfer(copy, Sharding(None, 1, 0), True), Full()
    )
    staging.add(transfer, lambda: begun.append(transfer), failures.append)
    staging.advance(until=0.0)
    (error,) = failures
    assert isinstance(error, TensorError)
    assert "a tensor on cpu: out of memory" in str(error)
    assert not begun
    staging.advance(until=0.0)
    assert len(failures) == 1


def test_the_result_of_answers_in_any_order_is_coalesced() -> None:
    transfer = prepared(staged(rows_of(600), CudaConfig()))
    answers: list[Answer] = aggregate([transfer], average=False)
    for part, result, frames in reversed(answers):
        transfer.absorb(part.server, part.chunk, result, frames)
    finished = transfer.finish()
    assert finished.is_coalesced()
    assert finished.indices().tolist() == [[0, 599]]
