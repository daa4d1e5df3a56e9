"""Conformance tests of sparsifiers: the built-in ones and a plug-in from ``examples/``."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zenps.config.settings import SparsifierConfig
from zenps.errors import ConfigError
from zenps.sparsifiers import Above, Sparsifier, Step, Task, sparsifier_class, sparsifier_names
from zenps.sparsifiers.base import target
from zenps.sparsifiers.topk import MIN_STRIDE

torch.set_num_threads(1)

EXAMPLES = Path(__file__).parents[3] / "examples"
PLUG_IN = "cyclic_topk_sparsifier:CyclicTopK"
ALL = ["dgc", "exdyna", "micro", "randomk", "threshold", "topk", PLUG_IN]
RANKED = ["topk", PLUG_IN]
"""Those that prefer the greatest elements."""


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def make(name: str, size: int, rank: int = 0, world: int = 3, threshold: float = 1.0) -> Sparsifier:
    kind = sparsifier_class(name)
    assert kind is not None
    return kind(Task("layer", size, rank, world, 7, SparsifierConfig(threshold=threshold)))


def indices(sparsifier: Sparsifier, values: Tensor, step: int = 0, density: float = 0.01) -> Tensor:
    selection = sparsifier.select(values, Step(step, density))
    return selection.indices(values) if isinstance(selection, Above) else selection


def drawn(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 2, 31, 1000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_indices_are_unique_and_ascending_and_nothing_changes(
    name: str, size: int, dtype: torch.dtype
) -> None:
    sparsifier, values = make(name, size), drawn(size, dtype=dtype)
    before = values.clone()
    for step in range(4):
        found = indices(sparsifier, values, step)
        assert found.dtype == torch.int64
        assert bool((found[1:] > found[:-1]).all())
        assert not len(found) or (int(found[0]) >= 0 and int(found[-1]) < size)
        assert torch.equal(found, indices(sparsifier, values, step)), "a step may be repeated"
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", ["randomk", "topk", PLUG_IN])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3])
def test_the_density_is_the_wanted_one(name: str, density: float) -> None:
    for size in (5000, 200_000):
        found = indices(make(name, size), drawn(size), density=density)
        assert len(found) == target(size, density) == max(1, round(density * size))


@pytest.mark.parametrize("name", ["randomk", "topk"])
@pytest.mark.parametrize("density", [0.6, 0.7, 0.999999])
def test_a_density_near_one_is_the_wanted_one(name: str, density: float) -> None:
    assert len(indices(make(name, 200_000), drawn(200_000), density=density)) == round(density * 200_000)


def test_topk_is_exact_where_a_sample_misleads() -> None:
    """The elements of a stride are all small, or all great; or all elements are equal."""
    strides = (31, MIN_STRIDE)
    small, great = (torch.stack([drawn(200_000)] * len(strides)) for _ in range(2))
    for stride, few, many in zip(strides, small, great, strict=True):
        few[::stride] *= 1e-6
        many[::stride] += 5
    few_great = torch.zeros(200_000)
    few_great[::MIN_STRIDE] = 5
    equal = torch.ones(200_000), torch.zeros(200_000)
    for values in (*small, *great, few_great, *equal, drawn(200_000) ** 7):
        found = indices(make("topk", len(values)), values)
        expected = values.abs().topk(2000).values.sort().values
        assert torch.equal(values[found].abs().sort().values, expected)


def test_of_equal_magnitudes_topk_selects_the_first() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 3.0]).repeat(50_000)
    assert indices(make("topk", 200_000), values).tolist() == list(range(3, 8000, 4))
    assert indices(make("topk", 200_000), values, density=0.3).tolist() == sorted(
        [*range(3, 200_000, 4), *range(1, 20_000, 4), *range(2, 20_000, 4)]
    )


@given(st.lists(st.floats(width=32), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_topk_selects_none_that_is_smaller_than_one_left_out(values: list[float], density: float) -> None:
    array = torch.tensor(values)
    found = indices(make("topk", len(values)), array, density=density)
    magnitudes = array.abs().nan_to_num(nan=math.inf, posinf=math.inf)
    left_out = np.setdiff1d(np.arange(len(values)), found.numpy())
    assert len(found) == target(len(values), density)
    assert not len(left_out) or magnitudes[found].min() >= magnitudes[left_out].max()


@pytest.mark.parametrize("name", ["threshold", *RANKED])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_selected(name: str, bad: float) -> None:
    values = drawn(1000) / 100
    values[5] = bad
    assert 5 in indices(make(name, 1000, threshold=10.0), values).tolist()


def test_threshold() -> None:
    values = torch.tensor([0.5, -2.0, 1.0, -1.0, 0.99])
    assert indices(make("threshold", 5), values).tolist() == [1, 2, 3]
    assert indices(make("threshold", 5, threshold=9.0), values).tolist() == []
    assert indices(make("threshold", 5, threshold=0.0), values).tolist() == [0, 1, 2, 3, 4]


def test_randomk_is_equal_on_all_ranks_and_another_in_each_step() -> None:
    chosen = [
        [indices(make("randomk", 10_000, rank), drawn(10_000, rank), step) for rank in range(3)]
        for step in range(5)
    ]
    for ranks in chosen:
        assert all(torch.equal(ranks[0], each) for each in ranks)
    assert len({tuple(ranks[0].tolist()) for ranks in chosen}) == 5
    other = Task("another layer", 10_000, 0, 3, 7, SparsifierConfig())
    kind = sparsifier_class("randomk")
    assert kind is not None
    assert not torch.equal(indices(kind(other), drawn(10_000)), chosen[0][0])


@pytest.mark.parametrize("world", [1, 2, 7])
def test_the_example_s_ranges_are_disjoint_and_go_round(world: int) -> None:
    for step in range(world):
        ranks = [
            set(indices(make(PLUG_IN, 700, rank, world), drawn(700, rank), step).tolist())
            for rank in range(world)
        ]
        assert sum(map(len, ranks)) == len(set().union(*ranks))
    turns = [
        indices(make(PLUG_IN, 700, 0, world), torch.ones(700), step, 0.001).tolist()[0]
        for step in range(world)
    ]
    assert len({turn * world // 700 for turn in turns}) == world


def test_above_looks_at_its_range_alone_and_takes_the_greatest() -> None:
    values = torch.tensor([9.0, 1, 2, 3, 4, 5, 9])
    assert Above(2, 1, 6).indices(values).tolist() == [2, 3, 4, 5]
    assert Above(2, 1, 6, most=2).indices(values).tolist() == [4, 5]
    assert Above(2, most=0).indices(values).tolist() == []
    assert Above(0, 7).indices(values).tolist() == []
    for wrong in (Above(0, -1), Above(0, most=-1)):
        with pytest.raises(ValueError, match="expected start and most of 0 or more"):
            wrong.indices(values)


def test_names() -> None:
    assert sparsifier_names() == ["none", "dgc", "exdyna", "micro", "randomk", "threshold", "topk"]
    assert sparsifier_class("none") is None
    for wrong in ("top_k", "nowhere:Here", "zenps.sparsifiers.base:Sparsifier", "zenps.errors:ZenPSError"):
        with pytest.raises(ConfigError, match=r"sync\.sparsifier = "):
            sparsifier_class(wrong)
