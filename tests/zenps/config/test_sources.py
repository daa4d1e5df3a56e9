"""What the settings and the environment together say of this process."""

from __future__ import annotations

import os

import pytest

from zenps.config.sources import allows_two_levels, kernel_threads, load, rank_from_environment
from zenps.errors import ConfigError


def test_a_rank_of_the_environment_has_at_most_ten_digits() -> None:
    assert rank_from_environment({"RANK": "9" * 10}) == 9_999_999_999
    with pytest.raises(ConfigError, match="of at most 10 digits"):
        rank_from_environment({"RANK": "9" * 11})


@pytest.mark.parametrize(
    ("threads", "cores", "local_size", "expected"),
    [(0, 8, None, 8), (0, 8, "2", 4), (0, 8, "3", 2), (0, 2, "8", 1), (5, 2, "8", 5)],
)
def test_the_workers_of_a_host_share_its_cores(
    threads: int, cores: int, local_size: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(cores)})
    config = load(sets=[f"kernels.threads={threads}"], environ={}).config
    assert kernel_threads(config, {} if local_size is None else {"LOCAL_WORLD_SIZE": local_size}) == expected


@pytest.mark.parametrize(
    ("sets", "allows"),
    [
        ([], True),
        (["sync.levels=2"], True),
        (["cluster.on_worker_loss=continue"], False),
        (["sync.scheme=agsparse"], False),
        (["sync.consistency=ds-sync"], False),
    ],
)
def test_two_levels_are_advised_only_where_they_would_not_be_refused(sets: list[str], allows: bool) -> None:
    assert allows_two_levels(load(sets=sets, environ={}).config) == allows
