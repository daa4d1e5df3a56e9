"""Connection of all workers: addresses travel over servers; what is said if workers cannot connect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.worker.backends.test_negotiated_rounds import Silent, TwoWorkers
from zenps.config.settings import ClusterConfig, Config
from zenps.errors import PeerLostError
from zenps.observe.metrics import WorkerMetrics
from zenps.wire.scheduler_messages import Member
from zenps.worker.backends.base import Session
from zenps.worker.backends.negotiation import table_with
from zenps.worker.backends.peers import connection
from zenps.worker.backends.peers.connection import connect_workers, why_broken
from zenps.worker.backends.servers import CONTROL, ServerBackend
from zenps.worker.core.pending import Pending
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.transport.peer_group import GroupError

ADDRESS = b"key\0address\0\0"
"""Ends with zeros, as the rows of a table do that are longer."""


class Servers(ServerBackend):
    """Rank 0 tells them twice what rank 1 does."""

    def __init__(self, waiting: Waiting) -> None:
        self.names: list[str] = []
        self._waiting = waiting

    def negotiate(self, table: Tensor, name: str, given: str = "") -> Pending:
        self.names.append(name)
        own = table[1].numpy().tobytes()[2 : 2 + len(ADDRESS)]
        both = table + table_with(len(2 * own).to_bytes(2) + 2 * own, 0, 2, table.shape[1])
        return Pending(name, CONTROL, SuppliedTransfer(both), Progress(0, ended=True), self._waiting)


@pytest.fixture
def servers() -> Servers:
    return Servers(Waiting(Notifier(), 0.1, Statistics(WorkerMetrics(CollectorRegistry())), Spans()))


def session_of(lease: TwoWorkers, host: str = "") -> Session:
    config = Config(cluster=ClusterConfig(scheduler="127.0.0.1:9", host=host))
    metrics = WorkerMetrics(CollectorRegistry())
    return Session(config, lease, Silent(), Statistics(metrics), metrics, Spans())


def connect(servers: Servers, lease: TwoWorkers, host: str = "") -> Any:
    """Connects rank 1 of 2."""
    return connect_workers(session_of(lease, host), servers, "peers")


@pytest.mark.parametrize(("setting", "host"), [("", "127.0.0.1"), ("10.0.0.7", "10.0.0.7")])
def test_all_ranks_get_the_addresses_of_all(
    setting: str, host: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(rank: int, size: int, host: str, allgather: Callable[[bytes], Sequence[bytes]]) -> Any:
        waits.extend(source() for source in lease.wait_sources)
        return rank, size, host, [allgather(ADDRESS), allgather(ADDRESS)]

    lease = TwoWorkers()
    waits: list[tuple[str, float] | None] = []
    monkeypatch.setattr(connection, "GlooGroup", group)
    assert connect(servers, lease, setting) == (1, 2, host, [[2 * ADDRESS, ADDRESS]] * 2)
    assert [wait and wait[0] for wait in waits] == ["connections among workers"]
    assert lease.wait_sources == []
    assert servers.names == ["@peers/addresses/0", "@peers/addresses/1"], "a round of its own each time"


def test_workers_that_do_not_reach_one_another_say_what_to_set(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(*_: object) -> Any:
        raise GroupError(-1, "gloo on 127.0.0.1: refused")

    monkeypatch.setattr(connection, "GlooGroup", group)
    said = r"worker 1 and the others do not reach one another: gloo on 127.0.0.1: refused; set cluster.host"
    with pytest.raises(PeerLostError, match=said):
        connect(servers, TwoWorkers())


@pytest.mark.parametrize(
    ("rank", "named"),
    [
        (2, "worker 2 (host far, pid 7)"),
        (-1, "worker 0 (host box, pid 49), worker 2 (host far, pid 7)"),
    ],
    ids=["told by gloo", "not told"],
)
def test_an_exchange_that_fails_names_who_may_be_missing(
    rank: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here to rank 1 of 3."""
    lease = TwoWorkers()
    workers = (*lease.view.workers, Member("worker", 2, "far", 7, "", ""))
    lease.view = structs.replace(lease.view, workers=workers)
    monkeypatch.setattr(lease, "await_loss", lambda: None)
    error = why_broken(session_of(lease), GroupError(rank, "Connection closed by peer"))
    expected = f"the exchange with {named} has failed: Connection closed by peer; see their logs"
    assert str(error) == expected
