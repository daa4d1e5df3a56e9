"""Sizes that the planner chooses, memory of its transfers, and what it keeps on devices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from tests.cuda.host.launcher import RecordingLauncher
from tests.integration.reference import assert_same_bits
from tests.worker.encode.test_quantizer import begin, every_form, planner_of
from tests.worker.encode.test_reshard import view_of
from tests.worker.encode.test_transfer import (
    ACCELERATOR,
    absorb_all,
    aggregate,
    encoded_by,
    make_layout,
    prepared,
    rows_of,
    sparse,
)
from tests.worker.host_accelerator import HostAccelerator
from zenps.codecs.base import ValueForm
from zenps.config.settings import ClusterConfig, Config, CudaConfig, SyncConfig
from zenps.errors import TensorError
from zenps.schemes.registry import scheme_of
from zenps.wire.shared_memory.arena import Arena
from zenps.worker.core.request import Options, Request
from zenps.worker.encode.accelerator import DeviceLayouts
from zenps.worker.encode.planner import Planner
from zenps.worker.encode.sharder import Sharder


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(keep_bytes=1 << 26)
    yield made
    made.close()


def on_a_device(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setattr(planner._accelerators, "of", lambda _: ACCELERATOR)
    return planner


def test_a_broadcast_leaves_nothing_in_the_pool() -> None:
    planner = planner_of("same")
    for purpose in ("broadcast", "value"):
        for count in (70_000, 200_000):
            begin(planner, torch.ones(count), purpose)
        kept_bytes = planner._pool.kept_bytes
        assert (kept_bytes > 0) == (purpose == "value"), (purpose, kept_bytes)


@pytest.mark.parametrize(
    ("sync", "setting"),
    [
        (SyncConfig(scheme="zen"), "sync.scheme = zen"),
        (SyncConfig(codec="bitmap"), "sync.codec = bitmap"),
        (SyncConfig(codec="dense"), "sync.codec = dense"),
    ],
    ids=str,
)
def test_a_table_too_large_for_a_bit_of_each_position_is_refused(sync: SyncConfig, setting: str) -> None:
    """A push of two rows took memory and time for all positions, until its deadline."""
    sharder = Sharder(Config(sync=sync), scheme_of(sync.scheme).wire, view_of([0, 1]))
    sharder.ring.shard_sparse("table", 1 << 33, 1, torch.float32, 0)
    with pytest.raises(TensorError, match=f"tensor 'table': a table of {(1 << 33) + 1} .* with {setting}, "):
        sharder.ring.shard_sparse("table", (1 << 33) + 1, 1, torch.float32, 0)


def test_a_message_of_blocks_is_no_larger_than_two_chunks() -> None:
    """The page on encoding has the rule: every implementation has to make the same streams."""
    for chunk_bytes, workers, columns in ((64 << 10, 1, 127), (8 << 20, 1, 256), (8 << 20, 4096, 254)):
        config = Config(
            sync=SyncConfig(scheme="omnireduce", chunk_bytes=chunk_bytes),
            cluster=ClusterConfig(workers=workers),
        )
        planner = Planner(config, scheme_of("omnireduce"), sharder=None)  # type: ignore[arg-type]
        plan = planner._plan(Request(torch.empty(10**7, device="meta"), "weight"))
        assert plan is not None
        assert plan.columns == columns


@pytest.mark.parametrize("count", [70_000, 71_680])
def test_a_device_copies_dense_values_to_where_servers_of_this_host_read(
    count: int, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, tensor = on_a_device(planner_of("same"), monkeypatch), torch.randn(count)
    request = Request(tensor, "weight")
    frames = [chunk.frames[0] for chunk in encoded_by(prepared(planner.begin(request, 0, arena))).chunks]
    assert len(frames) == 2
    assert all(arena.find(frame) is not None for frame in frames)
    broadcast = Request(tensor, "weight", Options(purpose="broadcast"))
    frames = [chunk.frames[0] for chunk in encoded_by(prepared(planner.begin(broadcast, 0, arena))).chunks]
    assert all(arena.find(frame) is None for frame in frames)


@every_form
@pytest.mark.parametrize("count", [3000, 70_000], ids=["whole", "split"])
def test_a_device_rounds_as_the_cpu(form: ValueForm, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(count) * torch.linspace(0.01, 9, count)
    planner = planner_of(form)
    on_the_host = begin(planner, gradient, "gradient")
    before = gradient.clone()
    staged = prepared(begin(on_a_device(planner, monkeypatch), gradient, "gradient"))
    assert_same_bits(gradient, before)
    assert encoded_by(staged) == encoded_by(on_the_host)
    assert encoded_by(staged).values == form
    answers = aggregate([on_the_host, staged], average=True)
    for transfer in (on_the_host, staged):
        absorb_all(transfer, answers)
    assert_same_bits(staged.finish(), on_the_host.finish())


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_rows_are_compacted_to_where_servers_of_this_host_read(
    where: str, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_of("same")
    if where == "device":
        on_a_device(planner, monkeypatch)
    tensor = sparse(torch.arange(5000).repeat(2), torch.ones(10_000, 64), (70_000, 64))
    chunks = encoded_by(prepared(planner.begin(Request(tensor, "weight"), 0, arena))).chunks
    assert sum(chunk.rows for chunk in chunks) == 5000
    assert all(arena.find(chunk.frames[1]) is not None for chunk in chunks)


@pytest.mark.parametrize(
    ("compaction", "kernel"), [("sort", "sort_segments<int32>"), ("bitmap", "mark_positions<int32>")]
)
def test_a_device_compacts_as_the_settings_say(
    compaction: Literal["sort", "bitmap"], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, scheme = Config(cuda=CudaConfig(compaction=compaction)), scheme_of("zenps")
    planner = Planner(config, scheme, Sharder(config, scheme.wire, view_of([0, 1])))
    accelerator, launcher = HostAccelerator(), RecordingLauncher()
    accelerator.launcher = launcher
    monkeypatch.setattr(planner._accelerators, "of", lambda _: accelerator)
    prepared(planner.begin(Request(rows_of(600), "weight"), 0))
    assert kernel in launcher.launched


def test_what_a_device_reads_of_a_layout_lives_as_long_as_that() -> None:
    made = DeviceLayouts()
    layout = make_layout("parallel", 70_000, 1, [0, 1], 0)
    assert made.of(ACCELERATOR, layout) is made.of(ACCELERATOR, layout)
    there = weakref.ref(made.of(ACCELERATOR, layout).tensors[0])
    del layout
    gc.collect()
    assert there() is None
