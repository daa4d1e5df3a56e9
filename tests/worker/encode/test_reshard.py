"""What was pushed under one ring, cut again for another, is what a first cut for that would have been."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.encode.test_transfer import (
    ACCELERATOR,
    DENSE_SHAPES,
    KERNELS,
    PARTITIONS,
    POOL,
    SPARSE_SHAPES,
    SUMMED,
    Answer,
    MakeSparse,
    aggregate,
    any_sparse,
    any_values,
    on_a_device,
    on_the_cpu,
    prepared,
    rows_of,
)
from zenps.config.settings import Config, SyncConfig
from zenps.partition.layout import LayoutCache
from zenps.partition.ring import rebalance
from zenps.partition.strategies import strategy
from zenps.worker.core.transfer import Sharding, Transfer, table_shape
from zenps.worker.encode.dense import DENSE_GRANULE, DenseTransfer, WholeTransfer
from zenps.worker.encode.gpu import StagedDense
from zenps.worker.encode.planner import SPLIT_FROM_BYTES, Transfers
from zenps.worker.encode.reshard import reshard
from zenps.worker.encode.sparse import SparseTransfer

SERVERS = [[0], [0, 1], [2, 5, 9], [1, 2, 3, 4, 5, 6, 7]]
RINGS = st.lists(
    st.tuples(
        st.sampled_from(SERVERS),
        st.integers(0, 3),  # the ring before it, which leaves its traces
        st.integers(1, 4),  # chunks
        st.sampled_from([0, 1 << 20]),  # bytes for tables
        st.integers(0, 6),  # home
    ),
    min_size=2,
    max_size=3,
)
Ring = tuple[list[int], int, int, int, int]


def make_cut(partition: str, rows: int, granule: int, ring: Ring) -> Sharding:
    servers, before, chunks, table_bytes, home = ring
    owners = rebalance(rebalance(None, SERVERS[before]), servers)
    cache = LayoutCache(strategy(partition), 7, owners, servers, table_bytes)
    return Sharding(cache.get("weight", max(rows, 1), granule), chunks, servers[home % len(servers)])


def check_all(cuts: Sequence[Sharding], codec: str, begin: Callable[[Sharding], Transfer]) -> None:
    """From each ring to the next, what is cut again is what is cut freshly."""
    sent = begin(cuts[0]).sent
    for cut in cuts[1:]:
        sent = reshard(sent, cut, codec)
        assert sent == begin(cut).sent


@settings(deadline=None, max_examples=200)
@given(
    shape=st.sampled_from(SPARSE_SHAPES),
    nnz=st.sampled_from([0, 1, 5, 40, 2000]),
    dtype=st.sampled_from(SUMMED),
    partition=st.sampled_from(PARTITIONS),
    rings=RINGS,
    codec=st.sampled_from(["auto", "coo", "bitmap", "delta"]),
    granule=st.sampled_from([1, 32]),
    seed=st.integers(0, 1 << 30),
)
def test_sparse(
    shape: tuple[tuple[int, ...], tuple[int, ...]],
    nnz: int,
    dtype: torch.dtype,
    partition: str,
    rings: list[Ring],
    codec: str,
    granule: int,
    seed: int,
) -> None:
    tensor = any_sparse(*shape, nnz, dtype, torch.Generator().manual_seed(seed))
    rows, columns = table_shape(tensor)
    # A bitmap of 10¹² bits is no test of anything.
    codec = "auto" if rows > 10**6 else codec
    cuts = [make_cut(partition, rows, granule if columns == 1 else 1, ring) for ring in rings]
    check_all(cuts, codec, lambda cut: SparseTransfer(tensor, cut, codec, KERNELS, expected_rows=9))


@settings(deadline=None, max_examples=100)
@given(
    shape=st.sampled_from([*DENSE_SHAPES, (70_000,)]),
    contributes=st.booleans(),
    dtype=st.sampled_from([*SUMMED, torch.uint8]),
    partition=st.sampled_from(PARTITIONS),
    rings=RINGS,
    seed=st.integers(0, 1 << 30),
)
def test_dense(
    shape: tuple[int, ...],
    contributes: bool,
    dtype: torch.dtype,
    partition: str,
    rings: list[Ring],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = any_values(shape, torch.int64, generator).to(dtype)
    cuts = [make_cut(partition, tensor.numel(), DENSE_GRANULE, ring) for ring in rings]
    check_all(cuts, "auto", lambda cut: DenseTransfer(tensor, cut, POOL, contributes))


@pytest.mark.parametrize("contributes", [True, False])
@pytest.mark.parametrize("shape", [(), (3, 4), (0,)])
def test_whole(shape: tuple[int, ...], contributes: bool) -> None:
    tensor = torch.randn(shape)
    cuts = [Sharding(None, 1, home) for home in (3, 0, 5)]
    check_all(cuts, "auto", lambda cut: WholeTransfer(tensor, cut, contributes))


def test_the_home_of_the_new_ring_is_pushed_even_if_it_has_nothing() -> None:
    cuts = [make_cut("centralized", 50, 1, ([0, 1, 2], 1, 1, 0, home)) for home in (0, 1, 2)]
    sent = on_the_cpu(rows_of(50), cuts[0].layout, 1, 0, "auto").sent  # type: ignore[arg-type]
    for cut in cuts:
        parts = reshard(sent, cut, "auto").parts
        assert (cut.home, 0) in {(part.server, part.chunk) for part in parts}


# ── under the present ring ──────────────────────────────────────────────────────────────────────

TENSORS = {
    "sparse": rows_of(5000),
    "dense": torch.randn(2 * SPLIT_FROM_BYTES),
    "whole": torch.randn(20),
}
every_kind = pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)


epochs = itertools.count(1)


def set_ring(transfers: Transfers, servers: Sequence[int]) -> None:
    transfers.set_ring(next(epochs), rebalance(None, servers), servers)


def make_transfers(servers: Sequence[int]) -> Transfers:
    transfers = Transfers(Config(sync=SyncConfig(chunk_bytes=64 * 1024)))
    set_ring(transfers, servers)
    return transfers


@every_kind
def test_what_was_cut_by_the_present_ring_is_not_cut_again(tensor: Tensor) -> None:
    transfers = make_transfers([0, 1])
    sent = transfers.begin(tensor, "weight", 0, True).sent
    assert transfers.reshard("weight", sent) is sent


@every_kind
def test_a_new_ring_cuts_again_as_it_begins(tensor: Tensor) -> None:
    """Chunks, too, are counted as they would be at first: by the rows that were expected then."""
    transfers, chunks = make_transfers([0, 1]), set()
    expected_rows = 40_000
    sent = transfers.begin(tensor, "weight", expected_rows, True).sent
    for servers in ([1, 2, 3], [3], [3, 4, 5, 6, 7]):
        set_ring(transfers, servers)
        sent = transfers.reshard("weight", sent)
        assert sent == transfers.begin(tensor, "weight", expected_rows, True).sent
        assert {part.server for part in sent.parts} <= set(servers)
        chunks.add(sent.cut.chunks)
    assert len(chunks) > 1 or sent.cut.layout is None


def test_a_tensor_keeps_its_ring_while_the_next_is_set() -> None:
    """Two rings' owners and servers never meet in one cut."""
    transfers, stop = make_transfers([0, 1]), threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for servers in ([2, 3], [0, 1]):
                set_ring(transfers, servers)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for step in range(200):
            cut = transfers.begin(rows_of(600), f"weight {step}", 0, True).sent.cut
            assert cut.layout is not None
            assert cut.home in cut.layout.servers
    finally:
        stop.set()
        thread.join(timeout=20)


def test_what_was_sent_keeps_neither_tensor_nor_result() -> None:
    tensor = torch.arange(40_000.0)
    cut = make_cut("centralized", 40_000, DENSE_GRANULE, ([0, 1], 0, 1, 0, 0))
    transfer = DenseTransfer(tensor, cut, POOL, True)
    frames = [np.frombuffer(part.frames[1], np.uint8) for part in transfer.sent.parts]
    for other in (tensor, transfer.finish()):
        assert not any(np.shares_memory(frame, other.numpy()) for frame in frames)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────

COUNT = 5000
OLD, NEW = ([0, 1, 2], 0, 2, 0, 2), ([0, 1], 2, 3, 0, 0)


def a_cut(granule: int, ring: Ring) -> Sharding:
    return make_cut("balanced", COUNT, granule, ring)


def begin_staged(make: Callable[[Tensor], Transfer]) -> Callable[[Tensor], Transfer]:
    return lambda tensor: prepared(StagedDense(tensor, make, ACCELERATOR))


def begin_dense(contributes: bool) -> Callable[[Tensor], Transfer]:
    return lambda tensor: DenseTransfer(tensor, a_cut(DENSE_GRANULE, OLD), POOL, contributes)


def begin_whole(contributes: bool) -> Callable[[Tensor], Transfer]:
    return lambda tensor: WholeTransfer(tensor, Sharding(None, 1, 2), contributes)


def begin_sparse(make: MakeSparse) -> Callable[[Tensor], Transfer]:
    cut = a_cut(1, OLD)
    layout = cut.layout
    assert layout is not None
    return lambda tensor: make(tensor, layout, cut.chunks, cut.home, "auto")


SPARSE, DENSE, WHOLE = a_cut(1, NEW), a_cut(DENSE_GRANULE, NEW), Sharding(None, 1, 0)
TRANSFERS: dict[str, tuple[Callable[[Tensor], Transfer], Sharding, bool]] = {
    "sparse": (begin_sparse(on_the_cpu), SPARSE, True),
    "sparse, staged": (begin_sparse(on_a_device("sort")), SPARSE, True),
    "dense": (begin_dense(True), DENSE, True),
    "dense, without contribution": (begin_dense(False), DENSE, False),
    "dense, staged": (begin_staged(begin_dense(True)), DENSE, True),
    "whole": (begin_whole(True), WHOLE, True),
    "whole, without contribution": (begin_whole(False), WHOLE, False),
    "whole, staged": (begin_staged(begin_whole(True)), WHOLE, True),
}


def absorb_all(transfer: Transfer, answers: Sequence[Answer]) -> None:
    for part, result, frames in answers:
        transfer.absorb(part.server, part.chunk, result, frames)


@pytest.mark.parametrize(("begin", "cut", "contributes"), TRANSFERS.values(), ids=TRANSFERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_restart_forgets_the_answers_of_the_old_ring(
    begin: Callable[[Tensor], Transfer], cut: Sharding, contributes: bool, share: float
) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(COUNT, generator=generator) for _ in range(2)]
    wrong = torch.randn(COUNT, generator=generator)
    if cut is SPARSE:
        tensors = [any_sparse((COUNT,), (3,), 400, torch.float32, generator) for _ in range(2)]
        wrong = torch.randn(COUNT, 3, generator=generator).to_sparse(1)
    transfers = [begin(tensor) for tensor in tensors]
    # What the old ring answers is wrong, so that it would be seen in the result.
    if not contributes:
        begin = begin_dense(True) if cut is DENSE else begin_whole(True)
    answers = aggregate([begin(wrong)], average=False)
    for transfer in transfers:
        absorb_all(transfer, answers[: math.ceil(share * len(answers))])
        sent = reshard(transfer.sent, cut, "auto")
        transfer.restart(sent)
        assert transfer.sent is sent
    expected = reduce_in_rank_order(tensors if contributes else [wrong * 2], average=False)
    root = [] if contributes else [begin(wrong * 2)]
    for transfer in root:
        transfer.restart(reshard(transfer.sent, cut, "auto"))
    answers = aggregate([*root, *transfers], average=False)
    for transfer in transfers:
        absorb_all(transfer, answers)
        assert_same_bits(transfer.finish(), expected)


@pytest.mark.parametrize("tensor", [TENSORS["sparse"], TENSORS["dense"]], ids=["sparse", "dense"])
def test_a_new_ring_reaches_what_is_on_a_device(tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = make_transfers([0, 1])
    on_the_host = transfers.begin(tensor, "weight", 0, True)
    monkeypatch.setattr(transfers, "_accelerator", lambda _: ACCELERATOR)
    transfer = transfers.begin(tensor, "weight", 0, True)
    assert not transfer.prepared()
    assert prepared(transfer).sent == on_the_host.sent
    absorb_all(transfer, aggregate([transfer], average=False)[:1])
    set_ring(transfers, [1, 2, 3])
    transfer.restart(transfers.reshard("weight", transfer.sent))
    absorb_all(transfer, aggregate([transfer], average=False))
    assert_same_bits(transfer.finish(), tensor.coalesce() if tensor.is_sparse else tensor)
