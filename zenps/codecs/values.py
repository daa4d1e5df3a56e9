"""Quantization of float32 values: to 16-bit floats, or to int8 with a scale for each run.

Sums are float32 all the same: a server dequantizes what it receives, and quantizes the sum once.
"""

from __future__ import annotations

from typing import Final, get_args

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ProtocolError

from .base import ValueCodec, ValueForm

RUN: Final = 64
"""Elements of a tensor of one column that share a scale: one byte in 65 is a scale."""

_BLOCK_ELEMENTS = 1 << 18  # coded at a time, so that intermediate tensors take a few MiB


class _Quantization(ValueCodec):
    """Receives bytes for any device."""

    def decode(self, data: memoryview, out: Tensor) -> None:
        rows, columns = out.shape
        if data.nbytes != self.size_bytes(rows, columns):
            got = f"{data.nbytes} bytes of {self.form} values"
            raise ProtocolError("payload", f"{got} for {rows} × {columns}")
        if not data.nbytes:
            return
        received = np.frombuffer(data, np.uint8)
        # Frames lie at odd addresses, and torch warns of read-only memory even if it is only read.
        is_copied = not received.flags.writeable or (out.is_cpu and self.form != "int8")
        coded = torch.from_numpy(received.copy() if is_copied else received)
        self.dequantize(coded.to(out.device, non_blocking=True), out)


class _Float(_Quantization):
    """Rounds to the nearest, ties to even, as IEEE 754 defines; values beyond the range become infinite.

    The error is at most one part in 2¹¹ (float16, from 6·10⁻⁵ to 65504) or 2⁸ (bfloat16, in float32's
    range) of a sum. Batches differ by more than that, so the nearest is good enough and ``step`` is ignored.
    """

    _dtype: torch.dtype

    def size_bytes(self, rows: int, columns: int) -> int:
        return 2 * rows * columns

    def encode(self, values: Tensor, out: Tensor, step: int | None = None) -> None:
        out.view(self._dtype).view(values.shape).copy_(values)

    def dequantize(self, coded: Tensor, out: Tensor) -> None:
        out.copy_(coded.view(self._dtype).view(out.shape))


class Float16(_Float):
    """11 significant bits, up to 65504. Averages below 3·10⁻⁸ become 0, in each step anew."""

    form = "float16"
    _dtype = torch.float16


class BFloat16(_Float):
    """8 significant bits, in the range of float32."""

    form = "bfloat16"
    _dtype = torch.bfloat16


class Int8(_Quantization):
    """A run is one byte e and an int8 for each value: value = int8 × 2^(e - 127), or NaN if e = 255.

    The scale is the E8M0 of OCP's microscaling formats (https://www.opencompute.org/documents/
    ocp-microscaling-formats-mx-v1-0-spec-final-pdf): a power of two, so that dequantizing is exact, and
    quantizing the result again gives the same bytes. It is the least scale with which no value of the run
    is beyond ±127. A row is a run; in a table of one column :data:`RUN` rows are, and fewer at the end.
    """

    form = "int8"

    def size_bytes(self, rows: int, columns: int) -> int:
        return rows - (-rows // RUN) if columns == 1 else rows * (1 + columns)

    def encode(self, values: Tensor, out: Tensor, step: int | None = None) -> None:
        for runs, coded in _runs(values, out):
            salts = None if step is None else _salts(step, runs.shape[1])
            for block in _blocks(runs):
                _encode_runs(runs[block], coded[block], salts)

    def dequantize(self, coded: Tensor, out: Tensor) -> None:
        for runs, codes in _runs(out, coded):
            for block in _blocks(runs):
                scales = _scales(codes[block, 0].int())
                torch.mul(codes[block, 1:].view(torch.int8), scales[:, None], out=runs[block])


VALUE_CODECS: Final[dict[ValueForm, ValueCodec]] = {
    codec.form: codec for codec in (Float16(), BFloat16(), Int8())
}
assert ("same", *VALUE_CODECS) == get_args(ValueForm)

_SCALES = torch.from_numpy(np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)))
_INFINITY = 0x7F800000
_MIXING = 0x9E3779B1 - (1 << 32)  # 2³² ÷ the golden ratio, as an int32


def value_codec(form: ValueForm, columns: int, *, is_dense: bool) -> ValueCodec | None:
    """The codec of gradients under ``sync.values = form``; None if they travel unchanged.

    In a sparse push of single elements, adjacent elements are unrelated, and differ with the rank and the
    ring. A shared scale would not fit them, and an int8 with a scale of its own takes two bytes: bfloat16
    is used instead.
    """
    if form == "int8" and columns == 1 and not is_dense:
        form = "bfloat16"
    return VALUE_CODECS.get(form)


def _scales(exponents: Tensor) -> Tensor:
    """Returns 2^(e - 127) for int32 exponents e from 0 to 254, and NaN for 255: float32."""
    return _SCALES.index_select(0, exponents) if exponents.is_cpu else _scales_by_bits(exponents)


def _scales_by_bits(exponents: Tensor) -> Tensor:
    bits = (exponents << 23).masked_fill_(exponents == 0, 0x00400000)  # 2^-127 is subnormal
    return bits.masked_fill_(exponents == 255, 0x7FC00000).view(torch.float32)


def _runs(values: Tensor, coded: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Runs ``[n, w]`` with their codes ``[n, 1 + w]``; for one column whole runs, then a shorter one."""
    rows, columns = values.shape
    if columns != 1:
        return [(values, coded.view(rows, 1 + columns))]
    whole = rows // RUN
    elements, split = values.view(-1), whole * (RUN + 1)
    runs = [(elements[: whole * RUN].view(whole, RUN), coded[:split].view(whole, RUN + 1))]
    if rows % RUN:
        runs.append((elements[None, whole * RUN :], coded[None, split:]))
    return runs


def _blocks(runs: Tensor) -> list[slice]:
    if not runs.is_cpu:
        return [slice(0, len(runs))]
    count = max(_BLOCK_ELEMENTS // max(runs.shape[1], 1), 1)
    return [slice(begin, begin + count) for begin in range(0, len(runs), count)]


def _encode_runs(runs: Tensor, out: Tensor, salts: Tensor | None) -> None:
    if not runs.numel():
        out.zero_()
        return
    # torch, because NumPy takes eight times as long for the maximum of short rows.
    greatest = torch.maximum(runs.amax(1), runs.amin(1).neg_())
    bits = greatest.view(torch.int32) & 0x7FFFFFFF
    # 2⁶ × scale has the exponent of the greatest value, or the next one where that is beyond 127/64 × 2⁶.
    exponents = (bits + 0x1FFFF >> 23).sub_(6).clamp_(min=0)
    is_number = bits < _INFINITY
    scaled = runs * _scales(254 - exponents)[:, None]
    exponents.masked_fill_(~is_number, 255)
    if not runs.is_cpu or not is_number.all():  # the host does not wait for a device to say so
        scaled.masked_fill_(~is_number[:, None], 0)
    if salts is None:
        scaled.round_()
    else:
        scaled.add_(_dither(runs, salts)).floor_()
    out[:, 0] = exponents
    out[:, 1:].view(torch.int8).copy_(scaled)


def _dither(runs: Tensor, salts: Tensor) -> Tensor:
    """Dither, evenly distributed in (0, 1): added before rounding down, it makes the mean of rounding right.

    It depends on the run's own values and the step only. Positions would serve, too, but they change with the
    ring: a sum that is computed again after the loss of a server would have other bits.
    """
    mixed = runs.view(torch.int32).sum(1, dtype=torch.int32).mul_(_MIXING)
    mixed ^= mixed >> 15
    dither = mixed[:, None] * salts
    dither >>= 16
    dither &= 0xFFFF
    dither |= 1  # never 0, and as far from 1
    return dither.to(torch.float32).mul_(2**-16)


def _salts(step: int, width: int) -> Tensor:
    """An odd number for each element of a run, other numbers in each step (mixed as in SplitMix64)."""
    mixed = np.arange(width, dtype=np.uint64)
    mixed += np.uint64(step * 0x9E3779B97F4A7C15 % (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint32).view(np.int32) | 1)
