"""Conformance tests of value codecs: rounding, NaN and infinity, and hostile bytes."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zenps.codecs.base import ValueCodec, ValueForm
from zenps.codecs.values import RUN, VALUE_CODECS, _scales, _scales_by_bits, value_codec
from zenps.errors import ProtocolError

NAN, INF = float("nan"), float("inf")
GREATEST = torch.finfo(torch.float32).max
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPES = st.one_of(
    st.sampled_from([(0, 4), (3, 0), (0, 1), (1, 1), (RUN, 1), (RUN + 1, 1), (3 * RUN, 1), (700, 48)]),
    st.tuples(st.integers(0, 200), st.integers(0, 9)),
)

every_codec = pytest.mark.parametrize("codec", VALUE_CODECS.values(), ids=str)
every_step = pytest.mark.parametrize("step", [None, 0, 3, 2**62 - 1])
int8 = VALUE_CODECS["int8"]


def encoded(codec: ValueCodec, values: Tensor, step: int | None = None) -> bytes:
    data = torch.full((codec.size_bytes(*values.shape),), 0xAA, dtype=torch.uint8)
    codec.encode(values, data, step)
    return data.numpy().tobytes()


def decoded(codec: ValueCodec, data: bytes, shape: tuple[int, int]) -> Tensor:
    out = torch.full(shape, 77.0)
    codec.decode(memoryview(data), out)
    return out


def travelled(codec: ValueCodec, values: Tensor, step: int | None = None) -> Tensor:
    rows, columns = values.shape
    return decoded(codec, encoded(codec, values, step), (rows, columns))


def random_values(shape: tuple[int, ...], seed: int) -> Tensor:
    """Values of very different magnitude in different rows."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-40, 15, (shape[0], 1), generator=generator).float())
    return torch.randn(shape, generator=generator) * scales


def runs_of(values: Tensor) -> list[Tensor]:
    """The values that share a scale."""
    return list(values.split(RUN) if values.shape[1] == 1 else values)


def test_the_registry_has_every_codec_of_the_wire() -> None:
    assert ["same", *VALUE_CODECS] == list(get_args(ValueForm))
    assert all(codec.form == form for form, codec in VALUE_CODECS.items())


@every_codec
@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, seed=st.integers(0, 1 << 30), step=st.one_of(st.none(), st.integers(0, 2**62 - 1)))
def test_quantizing_again_gives_the_same_bytes(
    codec: ValueCodec, shape: tuple[int, int], seed: int, step: int | None
) -> None:
    """So a row that only one rank has pushed comes back unchanged, and a NaN as a NaN."""
    data = encoded(codec, random_values(shape, seed))
    assert encoded(codec, decoded(codec, data, shape), step) == data
    # If the greatest value of a run is rounded down, it may need a smaller scale: other bytes, equal values.
    once = travelled(codec, random_values(shape, seed), step)
    assert torch.equal(travelled(codec, once, 5), once)


@every_codec
@settings(deadline=None, max_examples=60)
@given(shape=SHAPES, seed=st.integers(0, 1 << 30))
def test_each_row_is_quantized_by_itself(codec: ValueCodec, shape: tuple[int, int], seed: int) -> None:
    """A row's bytes do not depend on the order, the ring, or the other rows of the push."""
    values = random_values(shape, seed)
    for step in (None, 9):
        whole = travelled(codec, values, step)
        for run, together in zip(runs_of(values), runs_of(whole), strict=True):
            alone = run if shape[1] == 1 else run[None]
            assert torch.equal(travelled(codec, alone, step).view(-1), together.view(-1))


@pytest.mark.parametrize("form", FLOATS)
@every_step
def test_sixteen_bits_are_rounded_as_ieee_754_says(form: ValueForm, step: int | None) -> None:
    special = [0.0, -0.0, NAN, INF, -INF, 65504, 65519, 65520, -1e9, GREATEST, 1e-8, -1e-45, 1 + 2**-11]
    for values in (random_values((500, 7), 1), torch.tensor([special])):
        wanted = values.to(FLOATS[form]).float()
        assert torch.equal(
            travelled(VALUE_CODECS[form], values, step).nan_to_num(7.0, INF, -INF).view(torch.int32),
            wanted.nan_to_num(7.0, INF, -INF).view(torch.int32),
        )


@settings(deadline=None, max_examples=100)
@given(shape=SHAPES, seed=st.integers(0, 1 << 30))
def test_int8_is_rounded_by_half_a_step_at_most(shape: tuple[int, int], seed: int) -> None:
    values = random_values(shape, seed)
    steps = {None: 0.5, 4: 1.0}
    for step, most in steps.items():
        for run, got in zip(runs_of(values), runs_of(travelled(int8, values, step)), strict=True):
            if run.numel():
                # A step is a power of two: at worst the greatest value is just too large for 127 of them.
                greatest = run.abs().max().item()
                scale = 2.0 ** math.ceil(math.log2(greatest / 127))
                assert greatest <= 127 * scale < 2 * greatest * 127 / 63
                assert (got - run).abs().max().item() <= most * scale


def test_int8_is_a_power_of_two_and_small_integers() -> None:
    rows = [
        [127.0, -127.0, 1.0],
        [127.5, 2.0, -4.0],
        [127.25, 2.0, -4.0],
        [0.0, -0.0, 0.0],
        [2**-130, 0.0, 0.0],
    ]
    assert encoded(int8, torch.tensor(rows)) == bytes(
        [
            *(127, 127, 256 - 127, 1),  # 2⁰
            *(128, 64, 1, 256 - 2),  # 2¹: 127.5 is beyond 127
            *(128, 64, 1, 256 - 2),  # 2¹: so is 127.25, although it would be rounded to 127
            *(0, 0, 0, 0),
            *(0, 0, 0, 0),  # 2⁻¹³⁰ is an eighth of the least step, 2⁻¹²⁷
        ]
    )
    column = torch.ones(RUN + 2, 1)
    assert encoded(int8, column) == bytes([121, *[64] * RUN, 121, 64, 64])


@every_step
@pytest.mark.parametrize("special", [NAN, -NAN, INF, -INF])
def test_int8_makes_a_run_with_a_nan_or_infinity_nan(special: float, step: int | None) -> None:
    values = random_values((5, 6), 3)
    values[2, 4] = special
    got = travelled(int8, values, step)
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4]].isfinite().all()
    column = torch.ones(3 * RUN, 1)
    column[RUN + 5] = special
    got = travelled(int8, column, step)
    assert got.isnan().view(3, RUN).all(1).tolist() == [False, True, False]


@every_step
def test_int8_beyond_the_range_becomes_infinite(step: int | None) -> None:
    got = travelled(int8, torch.tensor([[GREATEST, 1.0], [GREATEST / 2, -GREATEST / 2]]), step)
    assert got[0, 0] >= GREATEST * 0.99
    assert got[1].isfinite().all()


def test_int8_has_the_right_mean_over_steps() -> None:
    """Also for values far below a step, which rounding to the nearest would always lose."""
    values = torch.tensor([[1.0, 1e-3, -1e-3, 0.3, -0.7, 1 / 3, 0.0039, 0.0]])
    steps = 4000
    mean = sum(travelled(int8, values, step).double() for step in range(steps)) / steps
    # A step is 1/64; the deviation of one rounding is half of that at most.
    assert (mean - values.double()).abs().max() < 4 * 0.5 / 64 / math.sqrt(steps)
    assert travelled(int8, values)[0, 1] == 0


def test_int8_rounds_other_rows_otherwise() -> None:
    """The mean over many rows of one step is right, too: they are not all rounded up."""
    generator = torch.Generator().manual_seed(5)
    values = torch.rand((4000, 8), generator=generator)
    values[:, 0] = 1.0
    error = (travelled(int8, values, 0) - values) * 64
    assert error.mean(0).abs().max() < 4 * 0.5 / math.sqrt(len(values))
    # Adjacent values of a row are not rounded alike, either.
    correlation = torch.corrcoef(error[:, 1:].T) - torch.eye(7)
    assert correlation.abs().max() < 0.1


@every_codec
@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=300), rows=st.integers(0, 40), columns=st.integers(0, 9))
@example(data=bytes([254, *[127] * 9]), rows=1, columns=9)
def test_any_bytes(codec: ValueCodec, data: bytes, rows: int, columns: int) -> None:
    """Any bytes of the right size are values; any others are refused."""
    if len(data) != codec.size_bytes(rows, columns):
        with pytest.raises(ProtocolError, match=f"payload: {len(data)} bytes of {codec.form} values"):
            decoded(codec, data, (rows, columns))
        data = (data * codec.size_bytes(rows, columns) + bytes(9999))[: codec.size_bytes(rows, columns)]
    odd = memoryview(b"\0" + data)[1:]
    out = torch.empty(rows, columns)
    codec.decode(odd, out)
    assert np.array_equal(out.numpy(), decoded(codec, data, (rows, columns)).numpy(), equal_nan=True)


@every_codec
def test_frames_are_read_only_and_at_odd_addresses(
    codec: ValueCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch warns of the one, and some processors refuse the other."""
    seen = list[Tensor]()
    monkeypatch.setattr(codec, "dequantize", lambda coded, out: seen.append(coded))
    size = codec.size_bytes(3, 5)
    for data in (bytes(size + 1), bytearray(size + 1)):
        for begin in (0, 1):
            codec.decode(memoryview(data)[begin : begin + size], torch.empty(3, 5))
    assert len(seen) == 4
    for coded in seen:
        assert coded.numpy().flags.writeable
        assert codec.form == "int8" or coded.data_ptr() % 2 == 0


def test_single_elements_of_a_sparse_tensor_travel_as_bfloat16_instead_of_int8() -> None:
    assert value_codec("int8", 1, is_dense=False) is VALUE_CODECS["bfloat16"]
    assert value_codec("int8", 1, is_dense=True) is value_codec("int8", 2, is_dense=False) is int8
    assert value_codec("float16", 1, is_dense=False) is VALUE_CODECS["float16"]
    assert value_codec("same", 8, is_dense=False) is None


def test_scales_are_the_same_on_a_device() -> None:
    """There they are made of bits, and on the CPU looked up."""
    exponents = torch.arange(256, dtype=torch.int32)
    bits = _scales_by_bits(exponents).view(torch.int32)
    assert torch.equal(bits, _scales(exponents).view(torch.int32))
