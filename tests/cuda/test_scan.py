"""Prefix sums of ``cuda/scan.cuh``, of a block and over tiles, and the stages of ``cuda/stages.cuh``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda.host.build import SAMPLES
from tests.cuda.host.launcher import HostLauncher

THREADS = 64
LAUNCHERS = [HostLauncher(seed=seed, folder=SAMPLES) for seed in range(4)]

every_schedule = pytest.mark.parametrize("launcher", LAUNCHERS, ids="seed{0.seed}".format)


@every_schedule
@pytest.mark.parametrize("times", [1, 3])
def test_block_sums(launcher: HostLauncher, times: int) -> None:
    numbers = torch.arange(3 * THREADS) * 7 % 11
    sums, totals = torch.zeros_like(numbers), torch.zeros_like(numbers)
    launcher.launch("scans", "sum_blocks", 3, THREADS, [numbers, times, sums, totals])
    blocks = torch.stack([numbers.view(3, THREADS) + turn for turn in range(times)])
    assert torch.equal(sums, (blocks.cumsum(2) - blocks).sum(0).flatten())
    assert torch.equal(totals, blocks.sum(2).sum(0).repeat_interleave(THREADS))


@every_schedule
@pytest.mark.parametrize(("blocks", "tiles"), [(1, 5), (3, 20), (9, 4)])
def test_each_tile_is_taken_once_by_a_whole_block(launcher: HostLauncher, blocks: int, tiles: int) -> None:
    state = torch.zeros(1 + tiles, dtype=torch.int64)
    takers = torch.zeros(tiles, dtype=torch.int64)
    launcher.launch("scans", "take_tiles", blocks, THREADS, [state, tiles, takers])
    assert takers.tolist() == [THREADS] * tiles


@settings(deadline=None, max_examples=30)
@given(numbers=st.lists(st.integers(0, 2**30), min_size=1, max_size=80), launcher=st.sampled_from(LAUNCHERS))
def test_sums_over_tiles(numbers: list[int], launcher: HostLauncher) -> None:
    tiles = torch.tensor(numbers)
    states = torch.zeros(2, 1 + len(tiles), dtype=torch.int64)
    before = torch.full((len(tiles), THREADS, 2), -1)
    launcher.launch("scans", "scan_tiles", len(tiles), THREADS, [states, tiles, before])
    expected = torch.stack([tiles.cumsum(0) - tiles] * 2, dim=1) * torch.tensor([1, 2])
    assert torch.equal(before, expected.unsqueeze(1).expand_as(before))


@every_schedule
@pytest.mark.parametrize("blocks", [1, 2, 5, 8])
@pytest.mark.parametrize(("tiles", "stage_count"), [(1, 4), (5, 1), (5, 4), (12, 3)])
def test_a_stage_reads_what_the_one_before_has_written(
    launcher: HostLauncher, tiles: int, stage_count: int, blocks: int
) -> None:
    """By fewer blocks than tiles, and by more."""
    stages = torch.zeros(2, dtype=torch.int64)
    totals, takers = torch.zeros(2, stage_count, tiles, dtype=torch.int64)
    args = (stages, tiles, stage_count, totals, takers)
    launcher.launch("staged", "add_stages", blocks, THREADS, args)
    assert takers.flatten().tolist() == [THREADS] * (stage_count * tiles)
    expected = [1]
    for _ in range(stage_count - 1):
        expected.append(1 + tiles * expected[-1])
    assert torch.equal(totals, torch.tensor(expected)[:, None].expand(-1, tiles))
