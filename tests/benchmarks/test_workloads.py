"""The benchmark's gradients have the published density, overlap and skew."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import WORKLOADS, Character, Workload, characterise

SMALLER = 1 / 16

PUBLISHED_DENSITY = {"lstm": 0.0113, "deepfm": 0.0280, "nmt": 0.0247, "opt": 0.05}


@pytest.fixture(params=WORKLOADS)
def workload(request: pytest.FixtureRequest) -> Workload:
    return WORKLOADS[request.param].resized(SMALLER)


@pytest.fixture
def character(workload: Workload) -> Character:
    return characterise(workload)


def test_density_is_as_published(workload: Workload, character: Character) -> None:
    assert character.density == pytest.approx(PUBLISHED_DENSITY[workload.name], rel=0.05)


def test_the_first_of_8_ranges_has_most(character: Character) -> None:
    assert character.skew[8] > 0.6 * 8


def test_the_union_of_workers_rows_is_less_skewed(character: Character) -> None:
    for workers, skew in character.union_skew.items():
        assert 1 < skew < 1.02 * character.skew[workers]
    # Hot rows are the same for all of them, the others are not.
    assert character.union_skew[16] < 0.95 * character.skew[16]


def test_rows_overlap_in_part(character: Character) -> None:
    growth = [character.densification(workers) for workers in (2, 4, 8, 16)]
    assert growth == sorted(growth)
    assert 1.2 < growth[0] < 2
    assert 2 < growth[-1] < 8
    # Of equal sets, two have twice the rows less those that they share.
    assert growth[0] == pytest.approx(2 - character.overlap, abs=0.05)


def test_published_figures_of_single_models() -> None:
    assert characterise(WORKLOADS["lstm"]).skew[128] > 70
    assert characterise(WORKLOADS["deepfm"]).densification(8) == pytest.approx(5.2 / 2.8, rel=0.02)
    assert characterise(WORKLOADS["opt"].resized(SMALLER)).blocks > 0.3


def test_gradients_depend_on_rank_and_step_alone(workload: Workload) -> None:
    gradient = workload.gradient(3, 5)
    assert gradient.shape == workload.shape
    assert gradient.dtype == torch.float32
    torch.rand(7)
    again = workload.resized(1.0).gradient(3, 5)
    assert torch.equal(gradient._indices(), again._indices())
    assert torch.equal(gradient._values(), again._values())
    for other in (workload.gradient(4, 5), workload.gradient(3, 6)):
        assert not torch.equal(gradient._values()[:100], other._values()[:100])
        assert not torch.equal(gradient._indices()[:, :100], other._indices()[:, :100])


def test_embedding_gradients_have_duplicates() -> None:
    ids = WORKLOADS["lstm"].ids(0, 0)
    assert len(ids.unique()) < 0.8 * len(ids)


def test_sizes_keep_the_character(workload: Workload, character: Character) -> None:
    twice = characterise(workload.resized(2.0))
    assert twice.rows == 2 * workload.rows
    assert twice.density == pytest.approx(character.density, rel=0.05)
    assert twice.densification(16) == pytest.approx(character.densification(16), rel=0.05)
