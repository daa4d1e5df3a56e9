"""Resharding: what is pushed again under another ring is what a first push under that would be."""

from __future__ import annotations

import itertools
import math
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
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
    MakeDense,
    MakeSparse,
    absorb_all,
    aggregate,
    any_sparse,
    any_values,
    dense_on_a_device,
    dense_on_the_cpu,
    encoded_by,
    on_a_device,
    on_the_cpu,
    prepared,
    rows_of,
)
from zenps.config.settings import ClusterConfig, Config, SyncConfig
from zenps.config.sizes import message_bytes
from zenps.errors import ConfigError, TensorError
from zenps.partition.keyspace import Identity
from zenps.partition.layout import LayoutCache
from zenps.partition.ranges import even_ranges
from zenps.partition.ring import SLOTS, rebalance
from zenps.partition.strategies import KeySpace, Partition, PartitionStrategy, even_bounds, strategy
from zenps.schemes.registry import scheme_of
from zenps.wire.scheduler_messages import Member, View
from zenps.wire.tensors import POSITION_BYTES
from zenps.worker.core.request import Request, table_shape
from zenps.worker.core.transfer import EncodedTensor, Sharding, Transfer
from zenps.worker.encode.dense import DENSE_GRANULE, DenseTransfer, WholeTransfer
from zenps.worker.encode.planner import Planner
from zenps.worker.encode.quantizer import Unchanged
from zenps.worker.encode.reshard import reshard
from zenps.worker.encode.sharder import SPLIT_FROM_BYTES, Sharder
from zenps.worker.encode.sparse import SparseTransfer
from zenps.worker.encode.staged import StagedDense

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


def make_sharding(partition: str, rows: int, granule: int, ring: Ring) -> Sharding:
    servers, before, chunks, table_bytes, home = ring
    owners = rebalance(rebalance(None, SERVERS[before]), servers)
    cache = LayoutCache(7, owners, servers, table_bytes)
    layout = cache.get(strategy(partition), "weight", max(rows, 1), granule)
    return Sharding(layout, chunks, servers[home % len(servers)])


def shard_dense(count: int, ring: Ring) -> Sharding:
    servers, before, chunks, _, home = ring
    owners = rebalance(rebalance(None, SERVERS[before]), servers)
    ranges = even_ranges(owners, servers, max(-(-count // DENSE_GRANULE), 1), DENSE_GRANULE)
    return Sharding(ranges, chunks, servers[home % len(servers)])


def check_all(shardings: Sequence[Sharding], codec: str, begin: Callable[[Sharding], Transfer]) -> None:
    """From each ring to the next, what is resharded is what is sharded freshly."""
    encoded = encoded_by(begin(shardings[0]))
    for sharding in shardings[1:]:
        encoded = reshard(encoded, sharding, codec)
        assert encoded == encoded_by(begin(sharding))


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
    shardings = [make_sharding(partition, rows, granule if columns == 1 else 1, ring) for ring in rings]
    coder = Unchanged(dtype)
    check_all(shardings, codec, lambda each: SparseTransfer(tensor, each, codec, KERNELS, coder, 9))


@settings(deadline=None, max_examples=100)
@given(
    shape=st.sampled_from([*DENSE_SHAPES, (70_000,)]),
    contributes=st.booleans(),
    dtype=st.sampled_from([*SUMMED, torch.uint8]),
    rings=RINGS,
    seed=st.integers(0, 1 << 30),
)
def test_dense(
    shape: tuple[int, ...],
    contributes: bool,
    dtype: torch.dtype,
    rings: list[Ring],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = any_values(shape, torch.int64, generator).to(dtype)
    shardings = [shard_dense(tensor.numel(), ring) for ring in rings]
    check_all(
        shardings, "auto", lambda each: DenseTransfer(tensor, each, POOL, contributes, Unchanged(dtype))
    )


@pytest.mark.parametrize("contributes", [True, False])
@pytest.mark.parametrize("shape", [(), (3, 4), (0,)])
def test_whole(shape: tuple[int, ...], contributes: bool) -> None:
    tensor = torch.randn(shape)
    shardings = [Sharding(None, 1, home) for home in (3, 0, 5)]
    coder = Unchanged(tensor.dtype)
    check_all(shardings, "auto", lambda each: WholeTransfer(tensor, each, contributes, coder))


def test_the_home_of_the_new_ring_is_pushed_even_if_it_has_nothing() -> None:
    rings = [([0, 1, 2], 1, 1, 0, home) for home in (0, 1, 2)]
    shardings = [make_sharding("centralized", 50, 1, ring) for ring in rings]
    encoded = encoded_by(on_the_cpu(rows_of(50), shardings[0].row_layout, 1, 0, "auto"))
    for sharding in shardings:
        chunks = reshard(encoded, sharding, "auto").chunks
        assert (sharding.home, 0) in {(chunk.server, chunk.chunk) for chunk in chunks}


# ── under the present ring ──────────────────────────────────────────────────────────────────────

TENSORS = {
    "sparse": rows_of(5000),
    "dense": torch.randn(2 * SPLIT_FROM_BYTES),
    "whole": torch.randn(20),
}
every_kind = pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)


epochs = itertools.count(1)


def view_of(servers: Sequence[int]) -> View:
    """The first, or the next, ring: each has an epoch of its own."""
    members = tuple(Member("server", rank, "box", 50 + rank, f"tcp://box:{1 + rank}", "") for rank in servers)
    epoch, owners = next(epochs), rebalance(None, servers)
    return View(epoch, 0, (), members, owners.astype("<u2").tobytes(), epoch)


def make_planner(servers: Sequence[int], scheme: str = "zenps") -> tuple[Planner, Sharder]:
    config = Config(sync=SyncConfig(scheme=scheme, chunk_bytes=64 * 1024))
    sharder = Sharder(config, scheme_of(scheme).wire, view_of(servers))
    return Planner(config, scheme_of(scheme), sharder), sharder


def encode(planner: Planner, tensor: Tensor, expected_rows: int = 0, name: str = "weight") -> EncodedTensor:
    return encoded_by(planner.begin(Request(tensor, name), expected_rows))


@every_kind
def test_what_was_sharded_by_the_present_ring_is_not_resharded(tensor: Tensor) -> None:
    planner, sharder = make_planner([0, 1])
    encoded = encode(planner, tensor)
    assert sharder.reshard("weight", encoded) is encoded


def test_a_view_of_the_same_ring_changes_nothing() -> None:
    """As when a worker is lost."""
    config, wire, view = Config(), scheme_of("zenps").wire, view_of([0, 1])
    sharder = Sharder(config, wire, view)
    before = sharder.ring.shard_sparse("weight", 5000, 3, torch.float32, 0)
    sharder.follow(structs.replace(view, epoch=next(epochs)))
    assert sharder.ring.shard_sparse("weight", 5000, 3, torch.float32, 0) == before
    sharder.follow(view_of([0, 1]))
    assert sharder.ring.shard_sparse("weight", 5000, 3, torch.float32, 0) != before


@every_kind
def test_a_new_ring_shards_what_has_begun_as_it_shards_what_begins(tensor: Tensor) -> None:
    """Chunks, too, are counted as they would be at first: by the rows that were expected then."""
    (planner, sharder), counts = make_planner([0, 1]), set()
    expected_rows = 40_000
    encoded = encode(planner, tensor, expected_rows)
    for servers in ([1, 2, 3], [3], [3, 4, 5, 6, 7]):
        sharder.follow(view_of(servers))
        encoded = sharder.reshard("weight", encoded)
        assert encoded == encode(planner, tensor, expected_rows)
        assert {chunk.server for chunk in encoded.chunks} <= set(servers)
        counts.add(encoded.sharding.chunks)
    assert len(counts) > 1 or encoded.sharding.layout is None


def test_a_new_ring_cuts_other_fragments() -> None:
    """Rows that fit into a message on two servers need several on one, and the other way round."""
    config, wire = Config(cluster=ClusterConfig(max_message_bytes=64 << 10)), scheme_of("zenps").wire
    sharder = Sharder(config, wire, view_of([0, 1]))
    planner = Planner(config, scheme_of("zenps"), sharder)
    rows = torch.randperm(20_000, generator=torch.Generator().manual_seed(5))[:5000].unsqueeze(0)
    tensor = torch.sparse_coo_tensor(rows, torch.randn(5000, 3), (20_000, 3), check_invariants=True)
    encoded, most = encode(planner, tensor), []
    for servers in ([0, 1], [3], [3, 4, 5, 6, 7]):
        sharder.follow(view_of(servers))
        encoded = sharder.reshard("weight", encoded)
        assert encoded == encode(planner, tensor)
        assert encoded.answers == len(servers)
        most.append(max(chunk.fragments for chunk in encoded.chunks))
        assert all(frame.nbytes <= 32 << 10 for chunk in encoded.chunks for frame in chunk.frames)
    assert most[1] > most[0] > most[2] == 1


@every_kind
@pytest.mark.parametrize("scheme", ["zenps", "sparse-ps", "zen"])
def test_no_message_of_many_workers_is_larger_than_servers_plan_for(scheme: str, tensor: Tensor) -> None:
    """Nothing is expected yet, so all rows are in one chunk; and some schemes cut none."""
    config = Config(cluster=ClusterConfig(workers=32, server_budget_bytes=1 << 20))
    assert message_bytes(config) == 8 << 10
    sharder = Sharder(config, scheme_of(scheme).wire, view_of([0, 1]))
    encoded = encode(Planner(config, scheme_of(scheme), sharder), tensor)
    for chunk in encoded.chunks:
        # Dense chunks end at granules.
        assert sum(frame.nbytes for frame in chunk.frames) <= message_bytes(config) + 4 * DENSE_GRANULE


# ── dense tensors by a strategy ─────────────────────────────────────────────────────────────────


class ByName(PartitionStrategy):
    """A user's own, which divides every tensor alike."""

    name: ClassVar[str] = "by-name"
    per_tensor: ClassVar[bool] = True

    def partition(self, space: KeySpace) -> Partition:
        assert space.name == "weight"
        return Partition(Identity(space.granules), even_bounds(space.granules))


class TooSmall(ByName):
    """Leaves a granule out."""

    def partition(self, space: KeySpace) -> Partition:
        return Partition(Identity(space.granules - 1), even_bounds(space.granules - 1))


def dense_sharder(partition: type[PartitionStrategy] | str, servers: Sequence[int]) -> Sharder:
    name = partition if isinstance(partition, str) else f"{__name__}:{partition.__name__}"
    return Sharder(Config(sync=SyncConfig(partition=name)), scheme_of("zenps").wire, view_of(servers))


def test_a_strategy_that_reads_names_spreads_dense_tensors() -> None:
    """Each went whole to one server, as by ``centralized``."""
    sharder = dense_sharder(ByName, range(4))
    sharding = sharder.ring.shard_dense("weight", 1 << 20, torch.float32)
    assert sharding.layout is not None
    assert sharding.layout.widest <= (1 << 18) + DENSE_GRANULE
    assert sharder.ring.shard_dense("weight", 1 << 20, torch.float32) == sharding


@pytest.mark.parametrize("name", ["weight", "bias", "a", "b"])
def test_by_centralized_a_dense_tensor_is_whole_on_its_home(name: str) -> None:
    sharding = dense_sharder("centralized", [2, 5, 9]).ring.shard_dense(name, 1 << 20, torch.float32)
    assert {server for server, _ in sharding.ranges()} == {sharding.home}


def test_a_strategy_that_leaves_granules_of_a_dense_tensor_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.partition.*permutation of 4095.*one of 4096 granules"):
        dense_sharder(TooSmall, [0, 1]).ring.shard_dense("weight", 1 << 20, torch.float32)


# ── sizes and order ─────────────────────────────────────────────────────────────────────────────


def sharding_of(sync: SyncConfig, columns: int = 1, expected_rows: int = 0) -> Sharding:
    """Of 100,000 rows of float32 over three servers, whose messages have at most 64 KiB."""
    config = Config(sync=sync, cluster=ClusterConfig(max_message_bytes=64 << 10))
    sharder = Sharder(config, scheme_of(sync.scheme).wire, view_of([0, 1, 2]))
    return sharder.ring.shard_sparse("weight", 100_000, columns, torch.float32, expected_rows)


@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(codec="bitmap"),
        SyncConfig(codec="bitmap", partition="centralized"),
        SyncConfig(scheme="zen"),
    ],
    ids=["setting", "one server", "scheme"],
)
def test_spans_are_bounded_where_bytes_grow_with_them(sync: SyncConfig) -> None:
    spans = [each.span for each in sharding_of(sync).ranges().values()]
    assert sum(spans) >= 100_000
    assert 16 << 10 < max(spans) * POSITION_BYTES <= 32 << 10


def test_elsewhere_chunks_are_cut_by_what_is_expected_if_at_all() -> None:
    sync = SyncConfig(chunk_bytes=64 << 10)
    assert [sharding_of(sync, 1, rows).chunks for rows in (0, 100_000)] == [1, 7]
    assert sharding_of(structs.replace(sync, scheme="sparse-ps"), 1, 100_000).chunks == 1


def test_messages_have_the_rows_that_fit_and_at_least_one() -> None:
    sharding = sharding_of(SyncConfig(), columns=3)
    row_bytes = 3 * 4 + POSITION_BYTES
    assert (sharding.message_rows, sharding.max_rows) == ((32 << 10) // row_bytes, (64 << 10) // row_bytes)
    config = Config(cluster=ClusterConfig(workers=32, server_budget_bytes=1 << 20))
    ring = Sharder(config, scheme_of("zenps").wire, view_of([0, 1])).ring
    assert message_bytes(config) < 3000 * 4
    assert ring.shard_sparse("weight", 100, 3000, torch.float32, 0).message_rows == 1


def test_streams_lie_at_equal_distances_as_the_page_on_encoding_has_it() -> None:
    config = Config(sync=SyncConfig(scheme="omnireduce", seed=7))
    ring = Sharder(config, scheme_of("omnireduce").wire, view_of([0, 1, 2])).ring
    first = zlib.crc32(b"7/weight") % SLOTS
    slots = [sharding.slot for sharding in ring.shard_streams("weight", 3)]
    assert slots == [(first + stream * SLOTS // 3) % SLOTS for stream in range(3)]


def test_only_single_elements_stay_together() -> None:
    for scheme, columns, granule in (("zenps", 1, 32), ("zenps", 2, 1), ("zen", 1, 1)):
        layout = sharding_of(SyncConfig(scheme=scheme), columns).layout
        assert layout is not None
        assert layout.granule == granule


def test_ranges_of_servers_are_contiguous_where_the_scheme_says_so() -> None:
    for sync in (SyncConfig(partition="parallel"), SyncConfig(scheme="sparse-ps")):
        layout = sharding_of(sync).row_layout
        in_order = bool((layout.positions(torch.arange(layout.rows_total)).diff() == 1).all())
        assert in_order == (sync.scheme == "sparse-ps")


def test_rows_larger_than_messages_are_refused() -> None:
    most = (32 << 10) // 4 - 2
    sharding_of(SyncConfig(), most)
    with pytest.raises(
        TensorError, match=r"1 row\(s\) of 8191 torch.float32.* expected at most 32768, half of"
    ):
        sharding_of(SyncConfig(), most + 1)


def test_a_new_ring_has_the_codec_of_the_scheme() -> None:
    planner, sharder = make_planner([0, 1], "sparse-ps")
    rows = torch.sparse_coo_tensor(torch.arange(5000)[None], torch.ones(5000, 1), check_invariants=True)
    encoded = encode(planner, rows)
    sharder.follow(view_of([2, 3, 4]))
    assert {chunk.codec for chunk in sharder.reshard("weight", encoded).chunks} == {"coo"}


def test_streams_of_a_new_ring_lie_where_they_would_at_first() -> None:
    planner, sharder = make_planner([0, 1], "omnireduce")
    tensor = torch.ones(1_000_000)
    begun = planner.begin(Request(tensor, "weight"), 0).begin()
    assert {encoded.sharding.home for encoded in begun} == {0, 1}
    assert all(sharder.reshard("weight", encoded) is encoded for encoded in begun)
    sharder.follow(view_of([2, 3, 4]))
    assert [sharder.reshard("weight", encoded) for encoded in begun] == list(
        planner.begin(Request(tensor, "weight"), 0).begin()
    )


def test_a_tensor_keeps_its_ring_while_the_next_one_comes() -> None:
    """The owners of one ring and the servers of another never meet in one sharding."""
    (planner, sharder), stop = make_planner([0, 1]), threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for servers in ([2, 3], [0, 1]):
                sharder.follow(view_of(servers))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for step in range(200):
            sharding = encode(planner, rows_of(600), name=f"weight {step}").sharding
            assert sharding.layout is not None
            assert sharding.home in sharding.layout.servers
    finally:
        stop.set()
        thread.join(timeout=20)


def test_what_is_pushed_keeps_neither_tensor_nor_result() -> None:
    tensor = torch.arange(40_000.0)
    sharding = shard_dense(40_000, ([0, 1], 0, 1, 0, 0))
    transfer = DenseTransfer(tensor, sharding, POOL, True, Unchanged(tensor.dtype))
    frames = [np.frombuffer(chunk.frames[0], np.uint8) for chunk in transfer.encoded.chunks]
    for other in (tensor, transfer.finish()):
        assert not any(np.shares_memory(frame, other.numpy()) for frame in frames)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────

COUNT = 5000
OLD, NEW = ([0, 1, 2], 0, 2, 0, 2), ([0, 1], 2, 3, 0, 0)


def a_sharding(ring: Ring) -> Sharding:
    return make_sharding("balanced", COUNT, 1, ring)


def begin_staged(tensor: Tensor) -> Transfer:
    coder, sharding, pool = Unchanged(tensor.dtype), Sharding(None, 1, 2), ACCELERATOR.pinned
    return prepared(StagedDense(tensor, sharding, True, coder, ACCELERATOR, pool))


def begin_dense(contributes: bool, make: MakeDense = dense_on_the_cpu) -> Callable[[Tensor], Transfer]:
    return lambda tensor: make(tensor, shard_dense(COUNT, OLD), contributes)


def begin_whole(contributes: bool) -> Callable[[Tensor], Transfer]:
    return lambda tensor: WholeTransfer(tensor, Sharding(None, 1, 2), contributes, Unchanged(tensor.dtype))


def begin_sparse(make: MakeSparse) -> Callable[[Tensor], Transfer]:
    sharding = a_sharding(OLD)
    return lambda tensor: make(tensor, sharding.row_layout, sharding.chunks, sharding.home, "auto")


SPARSE, DENSE, WHOLE = a_sharding(NEW), shard_dense(COUNT, NEW), Sharding(None, 1, 0)
TRANSFERS: dict[str, tuple[Callable[[Tensor], Transfer], Sharding, bool]] = {
    "sparse": (begin_sparse(on_the_cpu), SPARSE, True),
    "sparse, staged": (begin_sparse(on_a_device("sort")), SPARSE, True),
    "dense": (begin_dense(True), DENSE, True),
    "dense, without contribution": (begin_dense(False), DENSE, False),
    "dense, staged": (begin_dense(True, dense_on_a_device), DENSE, True),
    "dense, staged, without contribution": (begin_dense(False, dense_on_a_device), DENSE, False),
    "whole": (begin_whole(True), WHOLE, True),
    "whole, without contribution": (begin_whole(False), WHOLE, False),
    "whole, staged": (begin_staged, WHOLE, True),
}


@pytest.mark.parametrize(("begin", "sharding", "contributes"), TRANSFERS.values(), ids=TRANSFERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_restart_forgets_the_answers_of_the_old_ring(
    begin: Callable[[Tensor], Transfer], sharding: Sharding, contributes: bool, share: float
) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(COUNT, generator=generator) for _ in range(2)]
    wrong = torch.randn(COUNT, generator=generator)
    if sharding is SPARSE:
        tensors = [any_sparse((COUNT,), (3,), 400, torch.float32, generator) for _ in range(2)]
        wrong = torch.randn(COUNT, 3, generator=generator).to_sparse(1)
    transfers = [begin(tensor) for tensor in tensors]
    # What the old ring answers is wrong, so that it would be seen in the result.
    if not contributes:
        begin = begin_dense(True) if sharding is DENSE else begin_whole(True)
    answers = aggregate([begin(wrong)], average=False)
    for transfer in transfers:
        absorb_all(transfer, answers[: math.ceil(share * len(answers))])
        encoded = reshard(encoded_by(transfer), sharding, "auto")
        transfer.restart(encoded)
        assert encoded_by(transfer) is encoded
    expected = reduce_in_rank_order(tensors if contributes else [wrong * 2], average=False)
    root = [] if contributes else [begin(wrong * 2)]
    for transfer in root:
        transfer.restart(reshard(encoded_by(transfer), sharding, "auto"))
    answers = aggregate([*root, *transfers], average=False)
    for transfer in transfers:
        absorb_all(transfer, answers)
        assert_same_bits(transfer.finish(), expected)


@pytest.mark.parametrize("tensor", [TENSORS["sparse"], TENSORS["dense"]], ids=["sparse", "dense"])
def test_a_new_ring_reaches_what_is_on_a_device(tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, sharder = make_planner([0, 1])
    on_the_host = encode(planner, tensor)
    monkeypatch.setattr(planner._accelerators, "of", lambda _: ACCELERATOR)
    transfer = planner.begin(Request(tensor, "weight"), 0)
    assert not transfer.prepared()
    assert encoded_by(prepared(transfer)) == on_the_host
    absorb_all(transfer, aggregate([transfer], average=False)[:1])
    sharder.follow(view_of([1, 2, 3]))
    transfer.restart(sharder.reshard("weight", encoded_by(transfer)))
    absorb_all(transfer, aggregate([transfer], average=False))
    assert_same_bits(transfer.finish(), tensor.coalesce() if tensor.is_sparse else tensor)
