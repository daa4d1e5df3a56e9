"""Permutations π of an index space [0, size): they spread a tensor's rows over the slots.

A permutation replaces Zen's hash function h0 *and* its stored index tables (Zen, OSDI '25, §3.2):
``π(index)`` is the position of a row, ``π⁻¹(position)`` is the row at a position, and no table of the
tensor's size is needed. Every node computes the same permutation from the job's seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zenps.errors import ConfigError
from zenps.kernels.native.positions import FEISTEL_ROUNDS, NativeFeistel, permute

MAX_SIZE = 1 << 62
"""The largest index space: sums of two halves fit in uint32, all products of the rounds in uint64."""

ROUNDS = FEISTEL_ROUNDS
"""Four, the fewest that Luby and Rackoff prove strong ("How to Construct Pseudorandom Permutations from
Pseudorandom Functions", SIAM J. Comput. 17(2), 1988). Measured: more do not balance better."""

_BLOCK = 1 << 14  # indices worked on at once: a few buffers of this length stay in a core's L2
_MASK64 = 0xFFFFFFFFFFFFFFFF


Wide = NDArray[np.uint64]
Half = NDArray[np.uint32]
"""Half of an index. Its arithmetic wraps around, as the hash has it, and eight of them fit in a register."""


class Permutation(Protocol):
    """A bijection on [0, ``size``), equal on every node.

    Both methods take and return int64 tensors of any shape, on the CPU. Values must lie in
    [0, ``size``): the caller has checked them, as :class:`zenps.partition.layout.Layout` does.
    """

    @property
    def size(self) -> int:
        """How many indices it permutes; at least 1."""
        ...

    def forward(self, index: Tensor) -> Tensor:
        """π: the position of each index."""
        ...

    def inverse(self, position: Tensor) -> Tensor:
        """π⁻¹: the index at each position."""
        ...


def _check_size(size: int) -> None:
    if not 1 <= size <= MAX_SIZE:
        raise ConfigError("size", size, f"1 to 2**62 = {MAX_SIZE} indices")


@dataclass(frozen=True)
class Identity:
    """The permutation that maps every index to itself."""

    size: int

    def __post_init__(self) -> None:
        _check_size(self.size)

    def forward(self, index: Tensor) -> Tensor:
        """``index`` itself, not a copy."""
        return index

    def inverse(self, position: Tensor) -> Tensor:
        """``position`` itself, not a copy."""
        return position


class Feistel:
    """A seeded pseudo-random permutation of [0, size): a generalised Feistel cipher.

    An index is written as ``right * a + left`` with left in [0, a) and right in [0, b), where
    a = ⌈√size⌉ and b = ⌈size/a⌉; rounds add a keyed hash of one half to the other, modulo a or b.
    That permutes [0, a·b), which exceeds [0, size) by fewer than a points. A result outside [0, size) is
    permuted again until it falls inside (*cycle walking*).

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, methods 2 and 3
    (https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf). Not for secrets: the hash is
    murmur3's 32-bit finaliser, chosen for speed.

    Args:
        size: how many indices; 1 to 2**62.
        seed: any integer; taken modulo 2**64.

    Attributes:
        size: as given.
        left_size, right_size: a and b.
        keys: one 32-bit key per round. With the sizes, all that a kernel needs to repeat it.

    Raises:
        ConfigError: size out of range.
    """

    def __init__(self, size: int, seed: int) -> None:
        _check_size(size)
        self.size = size
        self.left_size = math.isqrt(size - 1) + 1
        self.right_size = -(-size // self.left_size)
        self.keys = tuple(_splitmix64(seed + number) >> 32 for number in range(1, ROUNDS + 1))
        self._native = NativeFeistel(size, self.left_size, self.right_size, self.keys)

    def __repr__(self) -> str:
        return f"Feistel(size={self.size}, keys={[hex(key) for key in self.keys]})"

    def forward(self, index: Tensor) -> Tensor:
        """π: the position of each index. int64 of any shape, on the CPU, fresh memory."""
        found = permute(self._native, index, inverse=False)
        return self._walk(index, inverse=False) if found is None else found

    def inverse(self, position: Tensor) -> Tensor:
        """π⁻¹: the index at each position. int64 of any shape, on the CPU, fresh memory."""
        found = permute(self._native, position, inverse=True)
        return self._walk(position, inverse=True) if found is None else found

    def _walk(self, values: Tensor, *, inverse: bool) -> Tensor:
        """The cipher of each value, block by block, applied again to the few that fall outside."""
        flat = values.reshape(-1).numpy().view(np.uint64)
        result = np.empty_like(flat)
        for begin in range(0, len(flat), _BLOCK):
            result[begin : begin + _BLOCK] = self._cipher(flat[begin : begin + _BLOCK], inverse=inverse)
        outside = np.flatnonzero(result >= self.size)
        while outside.size:
            walked = self._cipher(result[outside], inverse=inverse)
            result[outside] = walked
            outside = outside[walked >= self.size]
        return torch.from_numpy(result.view(np.int64)).view(values.shape)

    def _cipher(self, values: Wide, *, inverse: bool) -> Wide:
        right, left = self._halves(values)
        rounds = tuple(enumerate(self.keys))
        change = _subtract if inverse else _add
        for number, key in reversed(rounds) if inverse else rounds:
            if number % 2 == 0:
                change(left, _hash(right, key, self.left_size), self.left_size)
            else:
                change(right, _hash(left, key, self.right_size), self.right_size)
        return self._joined(right, left)

    def _halves(self, values: Wide) -> tuple[Half, Half]:
        right = values // np.uint64(self.left_size)
        left = values - right * np.uint64(self.left_size)
        return right.astype(np.uint32), left.astype(np.uint32)

    def _joined(self, right: Half, left: Half) -> Wide:
        joined = right.astype(np.uint64)
        joined *= np.uint64(self.left_size)
        joined += left
        return joined


def _splitmix64(number: int) -> int:
    """Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014."""
    mixed = number * 0x9E3779B97F4A7C15 & _MASK64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK64
    return mixed ^ mixed >> 31


def _hash(half: Half, key: int, size: int) -> Half:
    """A hash of ``half`` in [0, ``size``).

    The steps of murmur3's fmix32 between its first and its last shift; those two have no use here, because
    the key is mixed in first and the range reduction reads the high bits. That reduction is Lemire's multiply
    and shift (https://arxiv.org/abs/1805.10941), with no division.
    """
    hashed = half ^ np.uint32(key)
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> np.uint32(13)
    hashed *= np.uint32(0xC2B2AE35)
    wide = hashed.astype(np.uint64)
    wide *= np.uint64(size)
    wide >>= np.uint64(32)
    return wide.astype(np.uint32)


# Halves are at most 2**31. So the minimum of ``half`` and ``half`` ± ``size`` is the result modulo ``size``:
# the other number has wrapped around, or is too large. A minimum is faster than a comparison and a choice.


def _add(half: Half, hashed: Half, size: int) -> None:
    """half = (half + hashed) mod size, in place."""
    half += hashed
    np.minimum(half, half - np.uint32(size), out=half)


def _subtract(half: Half, hashed: Half, size: int) -> None:
    """half = (half - hashed) mod size, in place."""
    half -= hashed
    np.minimum(half, half + np.uint32(size), out=half)
