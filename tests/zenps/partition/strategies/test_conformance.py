"""Conformance tests of partition strategies: the built-in ones and a plug-in from ``examples/``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zenps.errors import ConfigError
from zenps.partition.keyspace import Identity
from zenps.partition.ring import SLOTS
from zenps.partition.strategies import (
    KeySpace,
    Partition,
    PartitionStrategy,
    even_bounds,
    strategy,
    strategy_names,
)

torch.set_num_threads(1)

EXAMPLES = Path(__file__).parents[4] / "examples"
PLUG_IN = "hot_rows_partition:HotRows"
ALL = ["balanced", "centralized", "parallel", PLUG_IN]
HUGE = 10**12


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(params=ALL)
def any_strategy(request: pytest.FixtureRequest, examples_on_path: None) -> PartitionStrategy:
    return strategy(request.param)


def slots_of(partition: Partition, keys: Tensor) -> Tensor:
    return torch.searchsorted(partition.bounds, partition.permutation.forward(keys), right=True) - 1


@pytest.mark.parametrize("granules", [1, 2, 3, 100, 4095, 4096, 4097, 65_535, 65_536, 1_000_000])
def test_permutation_is_a_bijection(any_strategy: PartitionStrategy, granules: int) -> None:
    partition = any_strategy.partition(KeySpace("t", granules, 3))
    keys = torch.arange(granules)
    positions = partition.permutation.forward(keys)
    assert partition.permutation.size == granules
    assert torch.equal(positions.sort().values, keys)
    assert torch.equal(partition.permutation.inverse(positions), keys)


@pytest.mark.parametrize("granules", [1, 2, 4095, 4096, 4097, 1_000_000, HUGE, 2**62])
def test_bounds_cover_all_positions(any_strategy: PartitionStrategy, granules: int) -> None:
    bounds = any_strategy.partition(KeySpace("t", granules, 3)).bounds
    assert bounds.shape == (SLOTS + 1,)
    assert bounds.dtype == torch.int64
    assert (int(bounds[0]), int(bounds[-1])) == (0, granules)
    assert bool((bounds.diff() >= 0).all())


def test_points_of_a_huge_space(any_strategy: PartitionStrategy) -> None:
    permutation = any_strategy.partition(KeySpace("t", HUGE, 3)).permutation
    generator = torch.Generator().manual_seed(1)
    keys = torch.cat([torch.randint(0, HUGE, (50_000,), generator=generator), torch.tensor([0, HUGE - 1])])
    positions = permutation.forward(keys)
    assert int(positions.min()) >= 0
    assert int(positions.max()) < HUGE
    assert torch.equal(permutation.inverse(positions), keys)


@pytest.mark.parametrize("granules", [10, 100_000, HUGE])
def test_depends_on_the_space_alone(any_strategy: PartitionStrategy, granules: int) -> None:
    keys = torch.arange(min(granules, 10_000))
    first, again, other_name = (
        any_strategy.partition(KeySpace(name, granules, 3)) for name in ("t", "t", "another")
    )
    assert torch.equal(slots_of(first, keys), slots_of(again, keys))
    if not any_strategy.per_tensor:
        assert torch.equal(slots_of(first, keys), slots_of(other_name, keys))
        assert torch.equal(first.permutation.forward(keys), other_name.permutation.forward(keys))


def test_another_process_agrees() -> None:
    program = (
        "import torch; from zenps.partition.strategies import KeySpace, strategy\n"
        f"for name in {ALL}:\n"
        "    partition = strategy(name).partition(KeySpace('t', 99_999, 3))\n"
        "    positions = partition.permutation.forward(torch.arange(500))\n"
        "    print(positions.tolist(), partition.bounds[::100].tolist())"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": "321",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    expected = []
    for name in ALL:
        partition = strategy(name).partition(KeySpace("t", 99_999, 3))
        positions, bounds = partition.permutation.forward(torch.arange(500)), partition.bounds[::100]
        expected.append(f"{positions.tolist()} {bounds.tolist()}")
    assert printed.splitlines() == expected


@pytest.mark.parametrize("granules", [1, 5, 4095, 4096, 4097, 12_345])
def test_even_bounds_are_those_of_the_slot_formula(granules: int) -> None:
    positions = torch.arange(granules)
    slots = torch.searchsorted(even_bounds(granules), positions, right=True) - 1
    assert torch.equal(slots, positions * SLOTS // granules)


def test_centralized_puts_tensors_into_different_slots() -> None:
    partitions = [strategy("centralized").partition(KeySpace(f"layer{n}", 1000, 3)) for n in range(50)]
    used = [set(slots_of(partition, torch.arange(1000)).tolist()) for partition in partitions]
    assert all(len(slots) == 1 for slots in used)
    assert len(set.union(*used)) > 45


def test_hot_rows_deals_the_first_rows_round_robin() -> None:
    partition = strategy(PLUG_IN).partition(KeySpace("t", 1_000_000, 3))
    slots = slots_of(partition, torch.arange(1_000_000))
    assert torch.equal(slots[: 15 * SLOTS], torch.arange(15 * SLOTS) % SLOTS)
    assert bool((slots[15 * SLOTS :].diff() >= 0).all())
    assert int(slots.bincount(minlength=SLOTS).max()) <= -(-1_000_000 // SLOTS) + 1


def test_invalid_bounds_are_refused() -> None:
    good = even_bounds(100)
    falling = good.clone()
    falling[7] = 99
    for bounds, message in [
        (good[:-1], "4096"),
        (good.int(), "int32"),
        (good + 1, "first and last"),
        (even_bounds(99), "first and last"),
        (falling, "after bound 7"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Partition(Identity(100), bounds)


def install_entry_point(site: Path, line: str) -> None:
    """Writes the metadata of an installed package that declares ``line`` in the group ``zenps.partition``."""
    information = site / "their_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[zenps.partition]\n{line}\n")


def test_entry_point_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_entry_point(tmp_path, f"theirs = {PLUG_IN}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert strategy("theirs").name == "hot-rows"
    assert strategy_names() == ["balanced", "centralized", "parallel", "theirs"]


def test_built_in_name_is_not_taken_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_entry_point(tmp_path, f"balanced = {PLUG_IN}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert strategy("balanced").name == "balanced"


def test_dotted_path_with_a_dot_for_the_class() -> None:
    assert strategy(PLUG_IN.replace(":", ".")).name == "hot-rows"


def test_built_in_names() -> None:
    assert {"balanced", "centralized", "parallel"} <= set(strategy_names())
    for name in ("balanced", "centralized", "parallel"):
        assert strategy(name).name == name


@pytest.mark.parametrize(
    "name", ["", "balancd", ":", "a:", ":b", "..x", "no_such_module:Class", "hot_rows_partition:NoSuchClass"]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"balanced, centralized, parallel.*zenps\.partition.*module:Class"):
        strategy(name)


@pytest.mark.parametrize(
    "name", ["hot_rows_partition:DealHotRows", "math:pi", "zenps.partition.strategies:PartitionStrategy"]
)
def test_objects_that_are_not_a_strategy(name: str) -> None:
    with pytest.raises(ConfigError, match="concrete subclass of PartitionStrategy"):
        strategy(name)


def test_entry_point_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_entry_point(tmp_path, "broken = no_such_module:Class")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing it failed"):
        strategy("broken")
