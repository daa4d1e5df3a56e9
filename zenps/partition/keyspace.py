"""Permutations π of an index space [0, size): they spread a tensor's rows over the slots.

A permutation replaces Zen's hash function h0 *and* its stored index tables (Zen, OSDI '25, §3.2):
``π(index)`` is the position of a row, ``π⁻¹(position)`` is the row at a position, and no table of the
tensor's size is needed. Every node computes the same permutation from the job's seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zenps.errors import ConfigError

MAX_SIZE = 1 << 62
"""The largest index space: its two halves, and all products of the rounds, fit in int64."""

ROUNDS = 4
"""The fewest that Luby and Rackoff prove strong ("How to Construct Pseudorandom Permutations from
Pseudorandom Functions", SIAM J. Comput. 17(2), 1988). Measured: more do not balance better."""

_BLOCK = 1 << 15  # indices worked on at once: four int64 buffers of this length stay in a core's L2
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class Permutation(Protocol):
    """A bijection on [0, ``size``), equal on every node.

    Both methods take and return int64 tensors of any shape, on any device. Values must lie in
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
    That permutes [0, a·b), which has fewer than a points too many; one that lands outside
    [0, size) is sent round again until it falls inside (*cycle walking*).

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

    def __repr__(self) -> str:
        return f"Feistel(size={self.size}, keys={[hex(key) for key in self.keys]})"

    def forward(self, index: Tensor) -> Tensor:
        """π: the position of each index. int64 of any shape and device, fresh memory."""
        return self._walk(index, self._encipher)

    def inverse(self, position: Tensor) -> Tensor:
        """π⁻¹: the index at each position. int64 of any shape and device, fresh memory."""
        return self._walk(position, self._decipher)

    def _walk(self, values: Tensor, cipher: Callable[[Tensor], Tensor]) -> Tensor:
        """``cipher`` of each value, block by block, applied again to the few that fall outside."""
        flat = values.reshape(-1)
        result = torch.empty_like(flat)
        for source, target in zip(torch.split(flat, _BLOCK), torch.split(result, _BLOCK), strict=True):
            target.copy_(cipher(source))
        outside = (result >= self.size).nonzero().squeeze(1)
        while outside.numel():
            walked = cipher(result[outside])
            result[outside] = walked
            outside = outside[walked >= self.size]
        return result.view(values.shape)

    def _encipher(self, values: Tensor) -> Tensor:
        right, left, scratch, hashed = self._halves(values)
        for number, key in enumerate(self.keys):
            if number % 2 == 0:
                _add_hash(left, right, key, self.left_size, hashed, scratch)
            else:
                _add_hash(right, left, key, self.right_size, hashed, scratch)
        return right.mul_(self.left_size).add_(left)

    def _decipher(self, values: Tensor) -> Tensor:
        right, left, scratch, hashed = self._halves(values)
        for number, key in reversed(tuple(enumerate(self.keys))):
            if number % 2 == 0:
                _subtract_hash(left, right, key, self.left_size, hashed, scratch)
            else:
                _subtract_hash(right, left, key, self.right_size, hashed, scratch)
        return right.mul_(self.left_size).add_(left)

    def _halves(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(right, left, two buffers of the same shape)."""
        right = torch.div(values, self.left_size, rounding_mode="floor")
        left = torch.sub(values, right, alpha=self.left_size)
        return right, left, torch.empty_like(right), torch.empty_like(right)


def _splitmix64(number: int) -> int:
    """Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014."""
    mixed = number * 0x9E3779B97F4A7C15 & _MASK64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK64
    return mixed ^ mixed >> 31


def _hash(half: Tensor, key: int, size: int, hashed: Tensor, scratch: Tensor) -> None:
    """Writes a hash of ``half`` in [0, ``size``) into ``hashed``: uint32 arithmetic, kept in int64.

    The steps of murmur3's fmix32 between its first and its last shift; those two are idle here,
    for the key is mixed in first and the range reduction reads the high bits. That reduction is
    Lemire's multiply and shift (https://arxiv.org/abs/1805.10941), with no division.
    """
    torch.bitwise_xor(half, key, out=hashed)
    hashed.mul_(0x85EBCA6B).bitwise_and_(_MASK32)
    torch.bitwise_right_shift(hashed, 13, out=scratch)
    hashed.bitwise_xor_(scratch).mul_(0xC2B2AE35).bitwise_and_(_MASK32)
    hashed.mul_(size).bitwise_right_shift_(32)


def _add_hash(half: Tensor, other: Tensor, key: int, size: int, hashed: Tensor, scratch: Tensor) -> None:
    """half = (half + hash(other)) mod size, in place."""
    _hash(other, key, size, hashed, scratch)
    half.add_(hashed).sub_(size)
    _add_where_negative(half, size, scratch)


def _subtract_hash(half: Tensor, other: Tensor, key: int, size: int, hashed: Tensor, scratch: Tensor) -> None:
    """half = (half - hash(other)) mod size, in place."""
    _hash(other, key, size, hashed, scratch)
    half.sub_(hashed)
    _add_where_negative(half, size, scratch)


def _add_where_negative(half: Tensor, size: int, scratch: Tensor) -> None:
    """Brings values of [-size, size) into [0, size); by the sign bit, 1.5 times as fast as ``where``."""
    torch.bitwise_right_shift(half, 63, out=scratch)
    half.add_(scratch.bitwise_and_(size))
