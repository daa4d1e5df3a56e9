"""Conformance tests of position codecs, with valid and with hostile bytes."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zenps.codecs.base import Codec, CodecName, Positions
from zenps.codecs.registry import CODECS, WORTHWHILE, choose
from zenps.errors import ProtocolError

LARGEST_ENCODING_BYTES = 1 << 16
SPANS = st.one_of(
    st.integers(0, 70),
    st.integers(0, 3000),
    st.sampled_from([2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**62]),
)

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=str)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[Positions, int]:
    """Some positions, strictly increasing, and the span that they lie in; often its first and last."""
    span = draw(SPANS)
    if not span:
        return np.empty(0, dtype=np.int64), 0
    anywhere = st.one_of(st.sampled_from([0, span - 1]), st.integers(0, span - 1))
    return np.array(sorted(draw(st.sets(anywhere, max_size=60))), dtype=np.int64), span


def check_decodes_or_refuses(codec: Codec, data: bytes, rows: int, span: int) -> None:
    """The bytes are either refused, or the only encoding of the decoded positions."""
    try:
        positions = codec.decode(memoryview(data), rows, span)
    except ProtocolError:
        return
    assert positions.dtype == np.int64
    assert positions.shape == (rows,)
    numbers = positions.tolist()
    assert numbers == sorted(set(numbers))
    assert not numbers or (numbers[0] >= 0 and numbers[-1] < span)
    assert codec.encode(positions, span).tobytes() == data


@every_codec
@settings(deadline=None, max_examples=150)
@given(chunk=chunks())
@example(chunk=(np.append(32 * np.arange(129), [32 * 335, 32 * 335 + 1]), 32 * 336))  # longest in 130 blocks
def test_round_trip(codec: Codec, chunk: tuple[Positions, int]) -> None:
    positions, span = chunk
    size = codec.max_bytes(len(positions), span)
    if size > LARGEST_ENCODING_BYTES:
        return
    data = codec.encode(positions, span)
    assert data.dtype == np.uint8
    assert len(data) <= size
    assert len(data) == size or codec.name in ("delta", "blocks")
    decoded = codec.decode(data.data, len(positions), span)
    assert decoded.dtype == np.int64
    assert np.array_equal(decoded, positions)
    decoded += 1  # the worker shifts them in place
    assert np.array_equal(codec.decode(data.data, len(positions), span), positions)


@every_codec
@pytest.mark.parametrize("span", [0, 1, 7, 8, 9, 1000])
def test_none_and_all(codec: Codec, span: int) -> None:
    for positions in (np.arange(0), np.arange(span)):
        data = codec.encode(positions, span)
        assert np.array_equal(codec.decode(data.data, len(positions), span), positions)


@every_codec
@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=64), rows=st.integers(0, 1 << 62), span=SPANS)
def test_any_bytes(codec: Codec, data: bytes, rows: int, span: int) -> None:
    check_decodes_or_refuses(codec, data, rows, span)


@every_codec
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_bytes_of_the_right_size(codec: Codec, data: st.DataObject) -> None:
    span = data.draw(SPANS)
    rows = data.draw(st.integers(0, min(span, 12)))
    size = codec.max_bytes(rows, span)
    if size <= LARGEST_ENCODING_BYTES:
        check_decodes_or_refuses(codec, data.draw(st.binary(min_size=size, max_size=size)), rows, span)


@every_codec
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_encodings(codec: Codec, data: st.DataObject) -> None:
    positions, span = data.draw(chunks())
    rows = len(positions)
    if codec.max_bytes(rows, span) > LARGEST_ENCODING_BYTES:
        return
    encoded = bytearray(codec.encode(positions, span).tobytes())
    match data.draw(st.sampled_from(["flip", "cut", "grow", "rows", "span", "swap"])):
        case "flip" if encoded:
            encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut" if encoded:
            encoded.pop()
        case "grow":
            encoded.append(data.draw(st.integers(0, 255)))
        case "rows":
            rows = max(rows + data.draw(st.integers(-1, 1)), 0)
        case "span":
            span = max(span + data.draw(st.integers(-9, 9)), 0)
        case "swap":
            half = len(encoded) // 2
            encoded[:half], encoded[half:] = encoded[half:], encoded[:half]
    check_decodes_or_refuses(codec, bytes(encoded), rows, span)


WRAPPING = [0, 2**63 - 1, -2, 5]
"""Its differences are positive, modulo 2⁶⁴."""


@pytest.mark.parametrize(
    ("positions", "span"),
    [
        ([-1, 3], 10),
        ([3, 10], 10),
        ([3, 3], 10),
        ([4, 3], 10),
        ([0, 2**31 - 1, -(2**31) + 1, 5], 10),
        ([-1, 3], 2**40),
        ([3, 2**40], 2**40),
        (WRAPPING, 2**40),
    ],
)
def test_coo_refuses_what_does_not_increase_within_the_span(positions: list[int], span: int) -> None:
    data = np.array(positions, dtype="<i4" if span <= 2**31 else "<i8").tobytes()
    with pytest.raises(ProtocolError, match="payload: coo: positions do not increase"):
        CODECS["coo"].decode(memoryview(data), len(positions), span)


def test_coo_is_little_endian_and_takes_the_smallest_dtype() -> None:
    coo = CODECS["coo"]
    last = np.array([2**31 - 1])
    assert coo.encode(last, 2**31).tobytes() == b"\xff\xff\xff\x7f"
    assert coo.encode(last, 2**31 + 1).tobytes() == b"\xff\xff\xff\x7f\0\0\0\0"


def test_bitmap_is_least_significant_bit_first_with_unused_bits_zero() -> None:
    bitmap = CODECS["bitmap"]
    assert bitmap.encode(np.array([0, 3, 9]), 10).tobytes() == bytes([0b1001, 0b10])
    for byte, rows in ((0b100, 1), (0b101, 2)):
        with pytest.raises(ProtocolError, match=r"payload: bitmap: \d bits set"):
            bitmap.decode(memoryview(bytes([0, byte])), rows, 10)


def test_the_registry_has_every_codec_of_the_wire() -> None:
    assert list(CODECS) == list(get_args(CodecName)) == [codec.name for codec in CODECS.values()]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_auto_is_the_smallest(rows: int, span: int) -> None:
    rows = min(rows, span)
    chosen = choose("auto", rows, span, 0)
    sizes = {name: codec.max_bytes(rows, span) for name, codec in CODECS.items()}
    least = min(sizes.values())
    assert sizes[chosen.name] == least or least == sizes["delta"] >= (1 - WORTHWHILE) * sizes[chosen.name]
    for name in CODECS:
        assert choose(name, rows, span, 0).name == name


def test_auto_with_wide_rows_changes_at_one_row_in_32() -> None:
    assert choose("auto", 10, 321, 256).name == "coo"
    assert choose("auto", 11, 319, 256).name == "bitmap"


def test_auto_with_short_rows_is_delta_up_to_one_row_in_three() -> None:
    density = [1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.4, 0.6]
    chosen = [choose("auto", int(share * 10**6), 10**6, 4).name for share in density]
    assert chosen == ["delta"] * 4 + ["bitmap"] * 3


@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5])
def test_delta_is_within_a_tenth_of_the_entropy(density: float) -> None:
    span = 10**6
    positions = np.flatnonzero(np.random.default_rng(0).random(span) < density)
    share = len(positions) / span
    entropy_bytes = -span * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    assert entropy_bytes < CODECS["delta"].encode(positions, span).nbytes + 4 < 1.1 * entropy_bytes


def test_delta_splits_gaps_and_writes_their_high_parts_in_unary() -> None:
    delta = CODECS["delta"]
    # 2·70 - 7 = 133 times 481 over 7000 is 9, of 4 bits: 3 are split off. Gaps 0, 9, 7, 19, 0, 0, 1.
    positions = np.array([0, 10, 18, 38, 39, 40, 42])
    low = 0b000 | 0b001 << 3 | 0b111 << 6 | 0b011 << 9 | 0b001 << 18
    high = 0b1 | 0b10 << 1 | 0b1 << 3 | 0b100 << 4 | 0b111 << 7
    assert delta.encode(positions, 70).tobytes() == low.to_bytes(3, "little") + high.to_bytes(2, "little")


@pytest.mark.parametrize("rows", range(1, 20))
@pytest.mark.parametrize("bit", range(50, 62))
def test_delta_of_gaps_wider_than_a_word_holds_from_any_bit_on(rows: int, bit: int) -> None:
    positions, span = np.append(np.arange(rows - 1), rows + (1 << bit)), 1 << 62
    data = CODECS["delta"].encode(positions, span)
    assert np.array_equal(CODECS["delta"].decode(data.data, rows, span), positions)
