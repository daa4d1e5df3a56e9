"""Range partition of positions: who has how many, and chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zenps.errors import ConfigError
from zenps.partition.ranges import ServerRanges, even_ranges, ranges_by_slot
from zenps.partition.ring import SLOTS, rebalance


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 300), min_size=1, max_size=130), min_size=1, max_size=3),
    st.integers(1, 100_000),
    st.sampled_from([1, 32, 256]),
)
def test_every_server_has_its_share_to_a_granule(
    memberships: list[set[int]], granules: int, granule: int
) -> None:
    owners = None
    for members in memberships:
        owners = rebalance(owners, sorted(members))
    assert owners is not None
    servers = sorted(members)
    ranges = even_ranges(owners, servers, granules, granule)
    assert ranges.servers == tuple(servers)
    assert ranges.size == granules * granule == ranges.server_bounds[-1]
    spans = np.diff(ranges.server_bounds)
    assert not (spans % granule).any()
    shares = np.bincount(owners, minlength=301)[servers] / SLOTS
    assert np.abs(spans / granule - granules * shares).max() < 1
    assert ranges.widest == spans.max()


def test_a_bucket_of_4_mib_is_even_on_64_servers() -> None:
    """By the slots of the ring, one server of 64 had three times the mean of a tensor of 64 KiB."""
    servers = list(range(64))
    for granules in (64, 4096):
        ranges = even_ranges(rebalance(None, servers), servers, granules, 256)
        assert set(np.diff(ranges.server_bounds)) == {granules * 256 // 64}


def test_a_server_without_slots_has_nothing() -> None:
    ranges = even_ranges(rebalance(None, [0, 2]), [0, 1, 2], 100, 256)
    assert np.diff(ranges.server_bounds).tolist() == [50 * 256, 0, 50 * 256]


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 300), min_size=1, max_size=130), st.lists(st.integers(0, 9), min_size=1), st.data()
)
def test_every_server_has_what_its_slots_have(
    members: set[int], lengths: list[int], data: st.DataObject
) -> None:
    servers = sorted(members)
    owners = rebalance(None, sorted(data.draw(st.sets(st.sampled_from(servers), min_size=1))))
    counts = np.resize(lengths, SLOTS)
    bounds = torch.from_numpy(np.append(0, counts.cumsum()))
    ranges = ranges_by_slot(bounds, owners, servers, 256)
    assert ranges.servers == tuple(servers)
    expected = [256 * int(counts[owners == server].sum()) for server in servers]
    assert np.diff(ranges.server_bounds).tolist() == expected
    assert ranges.widest == max(expected)


def test_chunks_are_whole_granules_and_nearly_equal() -> None:
    ranges = ServerRanges([3, 4, 8], 32, [0, 10, 10, 13])
    assert ranges.cuts(4) == [[0, 64, 160, 224, 320], [320] * 5, [320, 320, 352, 384, 416]]
    with pytest.raises(ConfigError, match="chunks"):
        ranges.cuts(0)
