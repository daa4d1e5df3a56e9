"""``sync.scheme = "auto"``: tensors change their scheme as they drift, on all ranks in the same step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, attempt, await_file
from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.integration.scraping import parse, scrape
from zenps.schemes.registry import scheme_of
from zenps.schemes.traffic import Links
from zenps.worker.backends.auto import AutoBackend
from zenps.worker.backends.choice import Choice, Table
from zenps.worker.process import PROCESS
from zenps.worker.world import ClusterWorld

CANDIDATES = scheme_of("auto").candidates

WORKERS, SERVERS = 3, 3
ROWS, COLUMNS, PUSHED = 3000, 64, 100
DRIFTED, STEPS = 10, 30
"""From which step on all ranks push the same rows, and the end."""
SETTINGS = {"sync.scheme": "auto", "sync.bandwidth_mbit": 1, "cluster.deadline_seconds": 20}
"""A network as slow that bytes alone count."""


def table(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = rank * PUSHED if step < DRIFTED else 0
    rows = first + torch.randperm(PUSHED, generator=generator)
    values = torch.randn((PUSHED, COLUMNS), generator=generator)
    # A sum of 0.0, which only schemes that keep what was touched return.
    values[rows == 7] = 0.0
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (ROWS, COLUMNS), check_invariants=True)


def changes() -> list[int]:
    """From which steps on the table takes another scheme."""
    choice = Choice(Links(workers=WORKERS, bytes_per_second=125_000, latency_seconds=50e-6), CANDIDATES)
    found = []
    for step in range(STEPS):
        union = PUSHED * WORKERS if step < DRIFTED else PUSHED
        if choice.note(Table(ROWS, COLUMNS, 4), PUSHED * WORKERS, union):
            found.append(step + 1)
    return found


WENT, CAME = 4, 18
"""From which step on the table goes to other workers, and to the servers again."""


class Drift(NamedTuple):
    """What a rank has seen: results by step, and which of them came from other workers."""

    tables: list[Tensor]
    vectors: list[Tensor]
    among_workers: list[bool]
    page: str


def drift(path: Path, wait_at: int = -1) -> Drift:
    """Pushes a table that drifts, and with it another and a vector, in another order on each rank."""
    seen = Drift([], [], [], "")
    for step in range(STEPS):
        before = zps.stats().peer_rounds
        if step == wait_at:
            (path / f"at{zps.rank()}").touch()
            await_file(path / "go")
        own = {"table": table(zps.rank(), step), "vector": torch.full((5,), float(zps.rank() + step))}
        names = sorted(own, reverse=bool(zps.rank() % 2))
        handles = {name: zps.push_pull_async(own[name], name, average=False) for name in names}
        seen.tables.append(handles["table"].wait())
        seen.vectors.append(handles["vector"].wait())
        seen.among_workers.append(zps.stats().peer_rounds > before)
    return seen._replace(page=own_page())


def own_page() -> str:
    """What this worker shows to Prometheus."""
    world = PROCESS.world
    assert isinstance(world, ClusterWorld)
    return scrape(world._session.lease.view.workers[zps.rank()].metrics)


def test_steps_are_those_of_the_choice() -> None:
    assert changes() == [WENT, CAME]


def assert_right(ranks: list[Drift]) -> None:
    for step in range(STEPS):
        expected = reduce_in_rank_order([table(rank, step) for rank in range(WORKERS)], average=False)
        for seen in ranks:
            assert_same_bits(seen.tables[step], expected)
            assert seen.vectors[step].tolist() == [sum(range(WORKERS)) + WORKERS * step] * 5
    for seen in ranks:
        assert seen.among_workers == [WENT <= step < CAME for step in range(STEPS)]


def test_a_tensor_changes_its_scheme_and_no_bit(tmp_path: Path) -> None:
    with Cluster(WORKERS, SERVERS, SETTINGS) as cluster:
        ranks = cluster.run(drift, tmp_path)
        logs = [worker.log for worker in cluster.workers]
    assert_right(ranks)
    rounds = {"agsparse": CAME - WENT, "zenps": STEPS - (CAME - WENT)}
    for seen in ranks:
        samples = parse(seen.page)
        assert {name: samples["zenps_chosen_rounds_total", name] for name in rounds} == rounds
    said = re.findall(r"tensor 'table': (\w+) from now on, not (\w+): [\d.]+ ms predicted, not", logs[0])
    assert said == [("agsparse", "zenps"), ("zenps", "agsparse")]
    assert not any("from now on" in log for log in logs[1:])


@pytest.mark.long
@pytest.mark.parametrize("step", [WENT, CAME])
def test_a_server_is_lost_while_a_tensor_changes(tmp_path: Path, step: int) -> None:
    """The round before the change ends by another ring than it began by."""
    with Cluster(WORKERS, SERVERS, SETTINGS, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(drift, tmp_path, step - 1, rank=rank) for rank in range(WORKERS)]
        for rank in range(WORKERS):
            await_file(tmp_path / f"at{rank}")
        cluster.servers[1].kill()
        (tmp_path / "go").touch()
        ranks = [worker.result() for worker in workers]
    assert_right(ranks)


def disagree() -> object:
    """Rank 0 pushes the table as if it had been through a round that the others have not."""
    zps.push_pull(table(zps.rank(), 0), "table")
    if zps.rank() == 0:
        world = PROCESS.world
        assert isinstance(world, ClusterWorld)
        assert isinstance(world._backend, AutoBackend)
        world._backend._chosen["table"].choice.scheme = scheme_of("agsparse")
    return attempt(zps.push_pull, table(zps.rank(), 1), "table")


def test_ranks_that_chose_differently_would_be_told() -> None:
    with Cluster(WORKERS, SERVERS, SETTINGS) as cluster:
        for error in cluster.run(disagree):
            assert error.kind == "MismatchError"
            assert "rank(s) 1, 2 pushed sparse float32" in error.text
            assert "averaged among workers" in error.text.split("rank(s) 0 ")[1].split("; ")[0]


def push_once() -> tuple[int, Tensor]:
    result = zps.push_pull(table(zps.rank(), 0), "table", average=False)
    return zps.stats().peer_rounds, result


def test_where_workers_may_not_exchange_it_is_zenps() -> None:
    with Cluster(2, 2, SETTINGS | {"cluster.on_worker_loss": "continue"}) as cluster:
        for peer_rounds, result in cluster.run(push_once):
            assert peer_rounds == 0
            expected = reduce_in_rank_order([table(rank, 0) for rank in range(2)], average=False)
            assert_same_bits(result, expected)
        log = cluster.workers[0].log
    assert "sync.scheme = auto: zenps for every tensor, for cluster.on_worker_loss needs servers" in log
