"""Codecs on the device: they encode to the bytes of zenps.codecs, and decode and refuse the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.launcher import SIZES, HostLauncher, RecordingLauncher
from zenps.codecs.bitmap import Bitmap
from zenps.codecs.coo import Coo
from zenps.errors import ProtocolError, TensorError
from zenps.kernels.gpu.bitmap_codec import (
    BitmapChunk,
    decode_bitmap,
    decode_coo,
    encode_bitmaps,
    encode_coo,
    place_bitmaps,
)
from zenps.kernels.gpu.place import DeviceLayout
from zenps.partition.device_layout import device_layout_on
from zenps.partition.layout import Layout
from zenps.partition.ring import rebalance
from zenps.partition.strategies import strategy
from zenps.partition.strategies.base import KeySpace

SPANS = [1, 7, 8, 31, 32, 33, 97, 256, 1025, 65_535, 65_536, 65_537, 200_003]
DTYPES = [torch.int32, torch.int64]


def layout_of(rows: int, granule: int = 1, name: str = "balanced") -> Layout:
    partition = strategy(name).partition(KeySpace("weight", -(-rows // granule), 7))
    return Layout(rows, granule, partition, rebalance(None, [0, 1]), [0, 1], 0)


def placed(rows: int, granule: int = 1, name: str = "balanced") -> tuple[Layout, DeviceLayout]:
    layout = layout_of(rows, granule, name)
    return layout, device_layout_on(layout, torch.device("cpu"))


def draw(span: int, density: float, seed: int = 0) -> Tensor:
    """Strictly increasing positions in [0, span)."""
    present = torch.rand(span, generator=torch.Generator().manual_seed(seed)) < density
    return present.nonzero().squeeze(1)


def packed(positions: Tensor, span: int) -> Tensor:
    return torch.from_numpy(Bitmap().encode(positions.numpy(), span))


def encode_bitmap(
    launcher: HostLauncher, positions: Tensor, begin: int, end: int, start: int, span: int
) -> Tensor:
    """The bitmap of one chunk."""
    (bitmap,) = encode_all(launcher, positions, [BitmapChunk(begin, end, start, span)])
    return bitmap


def encode_all(launcher: HostLauncher, positions: Tensor, chunks: Sequence[BitmapChunk]) -> list[Tensor]:
    places, size = place_bitmaps(chunks)
    bitmaps = encode_bitmaps(launcher, positions, chunks, torch.empty(size, dtype=torch.uint8))
    return [bitmaps[place] for place in places]


def test_the_bitmaps_of_all_chunks_come_from_one_launch(launcher: HostLauncher) -> None:
    """Chunks of many sizes, none and several tiles among them, as the shards of several servers are."""
    recorded = RecordingLauncher(launcher.seed)
    spans = [70_000, 0, 5, 64, 0, 131_072, 33]
    chunks, inside, begin, start = [], [], 0, 17
    for number, span in enumerate(spans):
        drawn = draw(span, 0.1, number)
        chunks.append(BitmapChunk(begin, begin + len(drawn), start, span))
        inside.append(drawn)
        begin, start = begin + len(drawn), start + span
    positions = torch.cat([each + chunk.start for each, chunk in zip(inside, chunks, strict=True)])
    bitmaps = encode_all(recorded, positions.int(), chunks)
    assert recorded.launched == ["encode_bitmaps<int32>"]
    for bitmap, drawn, span in zip(bitmaps, inside, spans, strict=True):
        assert torch.equal(bitmap, packed(drawn, span))
    assert encode_all(launcher, positions, []) == []


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("span", [0, *SPANS])
def test_bitmaps_have_the_codecs_bytes(launcher: HostLauncher, span: int, density: float) -> None:
    """The slice of a chunk among positions of others before and behind it."""
    start, inside = 1000, draw(span, density)
    positions = torch.cat(
        [torch.arange(900, 950), inside + start, torch.arange(start + span, start + span + 70)]
    )
    expected = packed(inside, span)
    for dtype in DTYPES:
        given_positions = launcher.guarded(positions.to(dtype))
        got = encode_bitmap(launcher, given_positions, 50, 50 + len(inside), start, span)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("span", SPANS)
def test_bitmaps_become_rows(launcher: HostLauncher, span: int, density: float) -> None:
    start = 1500
    layout, device_layout = placed(start + span + 500)
    positions = draw(span, density)
    data = launcher.guarded(packed(positions, span))
    rows, error = decode_bitmap(launcher, device_layout, data, len(positions), start, span)
    assert not int(error)
    assert torch.equal(rows, layout.rows(positions + start))


@pytest.mark.parametrize("size", [size for size in SIZES if size > 1025])
def test_many_positions(launcher: HostLauncher, size: int) -> None:
    """A tile lists its bits in several rounds, and other tiles wait for it."""
    layout, device_layout = placed(5 * size)
    positions = torch.cat([torch.arange(size), size + draw(3 * size, 0.02)])
    data = encode_bitmap(launcher, positions, 0, len(positions), 0, 5 * size)
    assert torch.equal(data, packed(positions, 5 * size))
    rows, error = decode_bitmap(launcher, device_layout, data, len(positions), 0, 5 * size)
    assert not int(error)
    assert torch.equal(rows, layout.rows(positions))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 3000),
    granule=st.sampled_from([1, 32]),
    name=st.sampled_from(["balanced", "parallel", "centralized"]),
    density=st.floats(0, 1),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 1 << 30),
)
def test_round_trips(
    rows: int, granule: int, name: str, density: float, ends: tuple[float, float], seed: int
) -> None:
    launcher = HostLauncher(seed=seed, resident=1 + seed % 5)
    layout, device_layout = placed(rows, granule, name)
    present = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < density
    positions, _ = layout.positions(present.nonzero().squeeze(1)).sort()
    start, stop = sorted(int(end * layout.size) for end in ends)
    begin, end = np.searchsorted(positions.numpy(), [start, stop]).tolist()
    expected = layout.rows(positions[begin:end])

    data = encode_bitmap(launcher, positions, begin, end, start, stop - start)
    got, error = decode_bitmap(launcher, device_layout, data, end - begin, start, stop - start)
    assert not int(error)
    assert torch.equal(got, expected)

    starts = torch.tensor([0, start, stop])
    relative = encode_coo(launcher, positions, starts, torch.empty_like(positions, dtype=torch.int32))
    got, error = decode_coo(launcher, device_layout, relative[begin:end], start, stop - start)
    assert not int(error)
    assert torch.equal(got, expected)


@settings(deadline=None, max_examples=60)
@given(
    data=st.binary(min_size=13, max_size=13),
    span=st.integers(97, 104),
    announced=st.integers(0, 97),
    seed=st.integers(0, 1 << 30),
)
def test_hostile_bitmaps_are_refused_where_the_codec_refuses_them(
    data: bytes, span: int, announced: int, seed: int
) -> None:
    launcher = HostLauncher(seed=seed)
    layout, device_layout = placed(400)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").sum()
    for rows in (announced, min(int(bits), span)):
        got, error = decode_bitmap(
            launcher, device_layout, torch.tensor(list(data), dtype=torch.uint8), rows, 90, span
        )
        try:
            positions = Bitmap().decode(memoryview(data), rows, span)
        except ProtocolError:
            assert int(error) == 1
        else:
            assert not int(error)
            assert torch.equal(got, layout.rows(torch.from_numpy(positions) + 90))


@pytest.mark.parametrize("rows", [0, 1, 65_535, 65_537, 70_000])
def test_a_wrong_number_of_rows_is_reported(
    launcher: HostLauncher, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile full of bits, another empty. Nothing is written beyond the rows that were announced."""
    _, device_layout = placed(70_000)
    data = packed(torch.arange(65_536), 70_000)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: launcher.guarded(empty(*shape, **kind)))
    _, error = decode_bitmap(launcher, device_layout, data, rows, 0, 70_000)
    assert int(error) == 1


def test_positions_without_a_row_are_reported() -> None:
    """33 rows in granules of 32: 31 positions of the last granule have no row."""
    launcher = HostLauncher()
    _, device_layout = placed(33, 32, "parallel")
    _, error = decode_bitmap(launcher, device_layout, packed(torch.tensor([32]), 64), 1, 0, 64)
    assert not int(error)
    _, error = decode_bitmap(launcher, device_layout, packed(torch.tensor([33]), 64), 1, 0, 64)
    assert int(error) == 1
    rows, error = decode_coo(launcher, device_layout, torch.tensor([32, 33]), 0, 64)
    assert int(error) == 1
    assert rows.tolist() == [32, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_coo_has_the_codecs_bytes(launcher: HostLauncher, size: int, dtype: torch.dtype) -> None:
    """Several chunks, two of them empty."""
    layout, device_layout = placed(8 * size)
    positions = draw(8 * size, 0.5)
    cuts = torch.tensor([0, size, size, 3 * size, 3 * size, 8 * size])
    for positions_dtype in DTYPES:
        relative = launcher.guarded(torch.empty_like(positions, dtype=dtype))
        encode_coo(launcher, positions.to(positions_dtype), cuts[:-1], relative)
        for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            begin, end = np.searchsorted(positions.numpy(), [start, stop]).tolist()
            expected = Coo().encode(positions[begin:end].numpy() - start, stop - start)
            part = relative[begin:end].clone()
            assert part.int().view(torch.uint8).tolist() == expected.tolist() if len(part) else True
            rows, error = decode_coo(launcher, device_layout, part, start, stop - start)
            assert not int(error)
            assert torch.equal(rows, layout.rows(positions[begin:end]))


@pytest.mark.parametrize("span", [100, 2**31 + 5])
def test_hostile_coo_is_refused_where_the_codec_refuses_it(span: int) -> None:
    launcher = HostLauncher()
    dtype = torch.int32 if span <= 2**31 else torch.int64
    limits = torch.iinfo(dtype)
    _, device_layout = placed(2 * span)
    for positions in [
        [0, 1, 99],
        [99],
        [span - 1],
        [],
        [-1, 5],
        [3, 3],
        [5, 4],
        [0, span],
        [limits.min, limits.max],
        [limits.max, limits.min],
        [0, limits.max],
        [limits.min],
    ]:
        relative = torch.tensor(positions, dtype=dtype)
        _, error = decode_coo(launcher, device_layout, relative, span, span)
        data = memoryview(relative.numpy().tobytes())
        try:
            Coo().decode(data, len(positions), span)
        except ProtocolError:
            assert int(error) == 1, positions
        else:
            assert not int(error), positions


def test_impossible_arguments_are_refused_at_once() -> None:
    launcher, (_, device_layout) = HostLauncher(), placed(100)
    data = torch.zeros(13, dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="13 bytes for a span of 96"):
        decode_bitmap(launcher, device_layout, data, 5, 0, 96)
    with pytest.raises(ProtocolError, match="101 rows for a span of 100"):
        decode_bitmap(launcher, device_layout, data, 101, 0, 100)
    with pytest.raises(ProtocolError, match="3 rows for a span of 2"):
        decode_coo(launcher, device_layout, torch.arange(3), 0, 2)
    with pytest.raises(TensorError, match="expected a multiple of 16"):
        decode_bitmap(launcher, device_layout, torch.zeros(14, dtype=torch.uint8)[1:], 0, 0, 100)
    with pytest.raises(TensorError, match="positions of dtype"):
        encode_bitmap(launcher, torch.zeros(3), 0, 3, 0, 100)
    with pytest.raises(TensorError, match="relative positions of dtype"):
        decode_coo(launcher, device_layout, torch.zeros(3), 0, 100)
