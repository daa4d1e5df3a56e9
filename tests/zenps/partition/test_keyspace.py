"""Permutations: bijections of any size, equal on every machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zenps.errors import ConfigError
from zenps.partition.keyspace import MAX_SIZE, Feistel, Identity, Permutation

torch.set_num_threads(1)

HUGE = 10**12


def assert_bijection(permutation: Permutation) -> None:
    index = torch.arange(permutation.size)
    position = permutation.forward(index)
    assert torch.equal(position.sort().values, index)
    assert torch.equal(permutation.inverse(position), index)


def by_hand(size: int, keys: tuple[int, ...], index: int) -> int:
    """The cipher again, in plain Python integers: what a kernel in another language must compute."""
    left_size = next(root for root in range(1, size + 1) if root * root >= size)
    right_size = (size + left_size - 1) // left_size
    halves, sizes = [index % left_size, index // left_size], [left_size, right_size]
    for number, key in enumerate(keys):
        changed, other = number % 2, 1 - number % 2
        mixed = (halves[other] ^ key) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
        halves[changed] = (halves[changed] + (mixed * sizes[changed] >> 32)) % sizes[changed]
    result = halves[0] + halves[1] * left_size
    return result if result < size else by_hand(size, keys, result)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 + 17])
def test_every_small_size_is_permuted(seed: int) -> None:
    for size in range(1, 400):
        assert_bijection(Feistel(size, seed))


@pytest.mark.parametrize("size", [4095, 4096, 4097, 2**16, 32768 * 3 + 1, 999_983, 1_000_000])
def test_chosen_sizes_are_permuted(size: int) -> None:
    assert_bijection(Feistel(size, 7))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 1_000_000), st.integers(0, 2**64 - 1))
def test_any_size_is_permuted(size: int, seed: int) -> None:
    assert_bijection(Feistel(size, seed))


@pytest.mark.parametrize("size", [HUGE, HUGE + 1, 2**31 - 1, 2**31, 2**61 + 3, MAX_SIZE - 1, MAX_SIZE])
def test_points_of_a_huge_space(size: int) -> None:
    permutation = Feistel(size, 5)
    drawn = torch.randint(0, size, (200_000,), generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([0, 1, size // 2, size - 2, size - 1])
    index = torch.cat([edges, drawn])
    position = permutation.forward(index)
    assert int(position.min()) >= 0
    assert int(position.max()) < size
    assert torch.equal(permutation.inverse(position), index)


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(1, 10**7), st.integers(0, 2**64 - 1))
def test_equals_the_cipher_in_plain_integers(data: st.DataObject, size: int, seed: int) -> None:
    permutation = Feistel(size, seed)
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    expected = [by_hand(size, permutation.keys, each) for each in index]
    assert permutation.forward(torch.tensor(index)).tolist() == expected


GOLDEN_KEYS = ["0x7dc930b", "0x12c015a9", "0xcc06c316", "0xecee6563"]
GOLDEN_SMALL = [2, 7, 4, 1, 5, 0, 9, 8, 3, 6]
GOLDEN_HUGE = [262182040886, 733104131402, 630510329835, 619526636005]


def test_golden_values() -> None:
    """Any change here makes nodes of two versions disagree about every row."""
    assert [hex(key) for key in Feistel(1, 42).keys] == GOLDEN_KEYS
    assert Feistel(10, 42).forward(torch.arange(10)).tolist() == GOLDEN_SMALL
    assert Feistel(HUGE, 42).forward(torch.tensor([0, 1, 2, HUGE - 1])).tolist() == GOLDEN_HUGE


def test_another_process_computes_the_same() -> None:
    program = (
        "import torch; from zenps.partition.keyspace import Feistel;"
        "print(Feistel(1_000_003, 99).forward(torch.arange(1000)).tolist())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "2"}
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert printed.strip() == str(Feistel(1_000_003, 99).forward(torch.arange(1000)).tolist())


def test_seeds_differ() -> None:
    index = torch.arange(10_000)
    first, second = (Feistel(10_000, seed).forward(index) for seed in (1, 2))
    assert int((first == second).sum()) < 20


def test_shape_is_kept_and_input_untouched() -> None:
    permutation = Feistel(100, 3)
    index = torch.arange(60).view(3, 20)
    assert torch.equal(permutation.forward(index), permutation.forward(index.flatten()).view(3, 20))
    assert torch.equal(index, torch.arange(60).view(3, 20))
    assert permutation.forward(torch.tensor(7)).shape == ()
    assert permutation.forward(index[:, ::3]).tolist() == permutation.forward(index)[:, ::3].tolist()
    assert permutation.inverse(torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_identity() -> None:
    assert_bijection(Identity(1000))
    assert Identity(10).forward(torch.tensor([3, 9])).tolist() == [3, 9]


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_size_out_of_range(size: int) -> None:
    with pytest.raises(ConfigError, match="size"):
        Feistel(size, 0)
    with pytest.raises(ConfigError, match="size"):
        Identity(size)
