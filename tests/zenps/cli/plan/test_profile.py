"""What is said of a tensor, where it is known."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from tests.zenps.owners import owners
from zenps.cli.plan.profile import Growth, profiles
from zenps.errors import UsageError
from zenps.observe.recording import Header, Push
from zenps.partition.ring import SLOTS
from zenps.schemes.costs import predict
from zenps.schemes.registry import scheme_of
from zenps.schemes.traffic import Links
from zenps.worker.backends.choice import ROUNDS, Choice, Table

ROWS = 100_000


def zipf(exponent: float, draws: int) -> np.ndarray:
    weights = 1 / np.arange(1, ROWS + 1) ** exponent
    return 1 - np.exp(-draws * weights / weights.sum())


def links(workers: int, servers: int = 0) -> Links:
    return Links(workers=workers, servers=servers, bytes_per_second=1e9)


def test_growth_is_the_mean_over_all_choices() -> None:
    samples = [{1, 2, 3}, {3, 4}, {3}, {5, 1}]
    items = sorted(set().union(*samples))
    counts = np.array([sum(item in sample for sample in samples) for item in items])
    growth = Growth(counts, 4, 100)
    pairs = [len(a | b) for i, a in enumerate(samples) for b in samples[i + 1 :]]
    assert growth.items(1) == pytest.approx(2.0)
    assert growth.items(2) == pytest.approx(sum(pairs) / 6)
    assert growth.items(4) == pytest.approx(5.0)


@pytest.mark.parametrize("samples", [4, 5, 17, 64])
def test_chances_are_those_of_counting_all_choices(samples: int) -> None:
    growth = Growth(np.array([samples]), samples, 1)
    for chosen in range(samples + 1):
        ways = math.comb(samples, chosen)
        expected = [1 - math.comb(samples - j, chosen) / ways for j in range(samples + 1)]
        assert growth.chances(chosen) == pytest.approx(expected, abs=1e-12)


def test_the_growth_of_a_long_recording_is_found_at_once() -> None:
    samples = 200_000
    begin = time.process_time()
    growth = Growth(np.array([1, samples // 2, samples]), samples, 100)
    assert growth.items(1) == pytest.approx(1.5 + 1 / samples)
    assert growth.items(samples) == pytest.approx(3.0)
    assert time.process_time() - begin < 5.0, "20 ms; by counting, hours"


@pytest.mark.parametrize("overlap", [0.05, 0.25, 0.9])
def test_hot_keys_have_their_overlap_and_densification(made_up: Any, overlap: float) -> None:
    chances = np.zeros(ROWS)
    chances[np.random.default_rng(1).permutation(ROWS)[:8000]] = overlap
    (profile,), _ = profiles(made_up(chances))
    assert profile.density == pytest.approx(0.08 * overlap, rel=0.02)
    assert profile.overlap == pytest.approx(overlap, rel=0.1)
    assert profile.step_overlap == pytest.approx(overlap, rel=0.1)
    for workers in (1, 2, 4, 8, 40, 256, 1024):
        expected = (1 - (1 - overlap) ** workers) / overlap
        tolerance = 0.03 if workers <= 40 else 0.2
        assert profile.densification(workers) == pytest.approx(expected, rel=tolerance), workers


@pytest.mark.parametrize(
    "chances", [zipf(1.0, 4000), zipf(1.3, 4000), zipf(0.8, 400)], ids=["1", "1.3", ".8"]
)
def test_unions_of_zipf_beyond_what_was_recorded(made_up: Any, chances: np.ndarray) -> None:
    (profile,), _ = profiles(made_up(chances))
    for workers, tolerance in ((2, 0.03), (40, 0.03), (80, 0.06), (160, 0.12), (1024, 0.3)):
        expected = (1 - (1 - chances) ** workers).mean()
        assert profile.union(workers) == pytest.approx(expected, rel=tolerance), workers


def test_a_union_is_never_more_than_the_table(made_up: Any) -> None:
    (profile,), _ = profiles(made_up(np.full(1000, 0.3)))
    assert profile.union(1024) == pytest.approx(1.0, abs=0.001)
    unions = [profile.union(workers) for workers in range(1, 200)]
    assert unions == sorted(unions)


def test_skewness_is_that_of_contiguous_ranges(made_up: Any) -> None:
    chances = np.zeros(8192)
    chances[:1024] = 0.5  # all rows are in the first eighth
    (profile,), _ = profiles(made_up(chances))
    assert [profile.skew(parts) for parts in (1, 2, 8)] == [1.0, 2.0, 8.0]
    assert profile.skew(128) == pytest.approx(8, rel=0.1)
    mixed = np.full(8192, 0.01)
    mixed[:1024] = 0.5
    (profile,), _ = profiles(made_up(mixed))
    assert profile.skew(8) == pytest.approx(8 * 512 / (512 + 71.7), rel=0.03)
    # In the union of many, the first range is full, and the others fill.
    in_first, elsewhere = 1024, 7168 * (1 - 0.99**40)
    assert profile.skew(8, workers=40) == pytest.approx(8 * in_first / (in_first + elsewhere), rel=0.03)


def test_thinned_pushes_say_the_same(made_up: Any) -> None:
    chances = np.full(2_000_000, 0.05)
    chances[:200_000] = 0.5
    (profile,), _ = profiles(made_up(chances, steps=4))
    assert profile.density == pytest.approx(0.095, rel=0.01)
    expected = 0.1 * (1 - 0.5**8) + 0.9 * (1 - 0.95**8)
    assert profile.union(8) == pytest.approx(expected, rel=0.01)
    assert profile.skew(10) == pytest.approx(0.5 / 0.095, rel=0.02)
    assert profile.as_tensor(links(8)).blocks is None


def fullest(chances: np.ndarray, parts: int = 3) -> float:
    """How many times its even share the fullest of some ranges has."""
    sums = [part.sum() for part in np.array_split(chances, parts)]
    return float(max(sums) / np.mean(sums))


def test_a_tensor_as_costs_see_it(made_up: Any) -> None:
    chances = zipf(1.0, 2000)
    (profile,), _ = profiles(made_up(chances, columns=64))
    tensor = profile.as_tensor(links(6, servers=3))
    assert (tensor.rows, tensor.columns, tensor.item_bytes) == (ROWS, 64, 4)
    assert tensor.unions == pytest.approx([(1 - (1 - chances) ** n).mean() for n in (2, 4, 6)], rel=0.03)
    assert tensor.union_skew is not None
    assert tensor.skew == profile.skew(3) > tensor.union_skew > 1
    blocks = 1 - np.prod(1 - chances.reshape(-1, 4), axis=1)  # four rows each
    assert tensor.blocks == pytest.approx(blocks.mean(), rel=0.03)
    union = 1 - (1 - blocks) ** 6
    assert tensor.union_blocks == pytest.approx(union.mean(), rel=0.03)
    assert tensor.block_skew == pytest.approx(fullest(blocks), rel=0.03)
    assert tensor.union_block_skew == pytest.approx(fullest(union), rel=0.03)
    assert tensor.union_block_skew is not None
    assert tensor.union_block_skew < tensor.union_skew  # where rows are dense, they share blocks


def test_auto_predicts_the_same_seconds_from_its_counts(made_up: Any) -> None:
    (profile,), _ = profiles(made_up(np.full(ROWS, 0.001), columns=1024))
    network = links(64)
    tensor = profile.as_tensor(network)
    candidates = scheme_of("auto").candidates
    choice = Choice(network, candidates)
    table = Table(tensor.rows, tensor.columns, tensor.item_bytes)
    pushed, union = (round(ROWS * share) for share in (64 * tensor.density, tensor.union))
    *_, change = (choice.note(table, pushed, union) for _ in range(ROUNDS))
    assert change is not None
    planned = [predict(scheme.name, tensor, network).seconds for scheme in candidates]
    assert [change.before_seconds, change.after_seconds] == pytest.approx(planned, rel=1e-3)


@pytest.mark.parametrize("columns", [1, 48, 64, 100, 192, 300, 512, 1000])
def test_blocks_are_those_of_the_flattened_tensor(made_up: Any, columns: int) -> None:
    trace = made_up(np.full(1000, 0.01), columns=columns, steps=2)
    tables = np.zeros((len(trace), 1000, columns), dtype=np.bool_)
    for table, (_, push) in zip(tables, trace, strict=True):
        table[push.row_numbers()] = True
    elements = tables.reshape(len(trace), -1)
    padded = np.pad(elements, [(0, 0), (0, -elements.shape[1] % 256)])
    held = np.asarray(padded.reshape(len(trace), -1, 256).any(axis=2))
    (profile,), _ = profiles(trace)
    tensor = profile.as_tensor(links(2))
    assert tensor.blocks == pytest.approx(held.mean())
    pairs = [(a | b).mean() for i, a in enumerate(held) for b in held[i + 1 :]]
    assert tensor.union_blocks == pytest.approx(np.mean(pairs))
    parts = np.arange(held.shape[1]) * SLOTS // held.shape[1] * 64 // SLOTS
    by_part = np.bincount(parts, held.sum(axis=0), minlength=64)
    assert profile.as_tensor(links(2, servers=64)).block_skew == pytest.approx(by_part.max() / by_part.mean())


def dealt_unevenly(rows: np.ndarray, granule: int, parts: int) -> float:
    """How many times its even share the fullest server has, on average over seeds."""
    granules, counts = np.unique(rows // granule, return_counts=True)
    by_seed = (owners(granules, -(-200_000 // granule), parts, seed) for seed in range(20))
    return float(np.mean([np.bincount(owner, counts).max() for owner in by_seed]) / len(rows) * parts)


@pytest.mark.parametrize(("run", "expected"), [(1, 64), (256, 2)], ids=["apart", "together"])
def test_the_granule_is_the_largest_that_servers_share_evenly(made_up: Any, run: int, expected: int) -> None:
    trace = made_up(np.full(200_000 // run, 0.05), columns=1, steps=2)
    for _, push in trace:
        rows = (push.row_numbers()[:, None] * run + np.arange(run)).ravel()
        push.pushed, push.rows, push.shape = len(rows), rows.astype("<i8").tobytes(), (200_000, 1)
    (profile,), _ = profiles(trace)
    assert profile.granule(4) == expected
    assert dealt_unevenly(rows, expected, 4) < 1.05 < dealt_unevenly(rows, 8 * expected, 4)


def test_a_thinned_trace_says_nothing_of_neighbours(made_up: Any) -> None:
    (apart,), _ = profiles(made_up(np.full(1_000_000, 0.0655), columns=1, steps=2))
    (thinned,), _ = profiles(made_up(np.full(1_000_000, 0.066), columns=1, steps=2))
    assert (apart.granule(4), thinned.granule(4)) == (256, 8)


def test_rows_are_granules_where_they_have_more_than_one_element(made_up: Any) -> None:
    (profile,), _ = profiles(made_up(np.full(1000, 0.1), columns=2))
    assert profile.granule(4) is None
    (profile,), _ = profiles(made_up(np.zeros(1000), columns=1))
    assert profile.granule(4) == 256  # nothing to share


def test_dense_and_rare_tensors(made_up: Any) -> None:
    header = Header(rank=0, workers=1)
    trace = made_up(zipf(1.0, 100), workers=1, steps=8)
    for step in range(8):
        dense = Push(tensor="d", step=step, shape=(10, 20), sparse_dims=0, item_bytes=4, pushed=50)
        trace.append((header, dense))
    trace.append((header, Push(tensor="r", step=0, shape=(3,), sparse_dims=0, item_bytes=4, pushed=3)))
    (table, dense_profile), rare = profiles(trace)
    assert rare == ["r"]
    assert (dense_profile.is_sparse, dense_profile.rows, dense_profile.density) == (False, 200, 0.25)
    assert dense_profile.as_tensor(links(4)).dense_bytes == 800
    assert math.isnan(table.overlap)
    assert table.step_overlap > 0


def test_too_little_is_refused(made_up: Any) -> None:
    with pytest.raises(UsageError, match=r"'table' was pushed 3 time.* at least 4.*--steps"):
        profiles(made_up(zipf(1.0, 100), workers=1, steps=3))
    with pytest.raises(UsageError, match=r"'table' was pushed 2 time"):
        profiles(2 * made_up(zipf(1.0, 100), workers=1, steps=2))
    with pytest.raises(UsageError, match="nothing was pushed"):
        profiles([])
    changed = made_up(zipf(1.0, 100)) + made_up(zipf(1.0, 100)[:50])
    with pytest.raises(UsageError, match="changes its shape"):
        profiles(changed)


def test_empty_gradients_make_no_rows(made_up: Any) -> None:
    (profile,), _ = profiles(made_up(np.zeros(100)))
    assert (profile.density, profile.union(64), profile.densification(64), profile.skew(8)) == (0, 0, 1, 1)
