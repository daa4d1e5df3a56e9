"""A server that is alive, but cannot be reached."""

from __future__ import annotations

import pytest

from zenps.config.settings import ClusterConfig
from zenps.errors import PeerLostError
from zenps.wire.scheduler_messages import Member
from zenps.worker.transport.connectivity import Connectivity

LEASE_SECONDS, RENDEZVOUS_SECONDS = 10.0, 60.0
SERVER = Member("server", 1, "box", 7, "tcp://10.0.0.1:1", "")


class Network:
    """Counts who was tried, and says why it cannot be reached."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.tried: list[str] = []

    def why(self, address: str) -> str:
        self.tried.append(address)
        return self.reason


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network("No route to host")
    monkeypatch.setattr("zenps.worker.transport.connectivity.why_unreachable", made.why)
    return made


def make_connectivity() -> Connectivity:
    cluster = ClusterConfig(lease_seconds=LEASE_SECONDS, rendezvous_seconds=RENDEZVOUS_SECONDS)
    connectivity = Connectivity(cluster)
    connectivity.on_connect(SERVER, 0.0)
    return connectivity


def test_a_server_that_has_answered_is_never_tried(network: Network) -> None:
    connectivity = make_connectivity()
    assert connectivity.check(LEASE_SECONDS / 2) is None
    connectivity.on_answer(1)
    assert connectivity.check(1e6) is None
    assert network.tried == []


def test_one_that_cannot_be_reached_is_warned_of_and_then_an_error(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    connectivity = make_connectivity()
    for now in range(1, 70):
        assert connectivity.check(now) is None
    assert len(network.tried) == len(caplog.records) == 6, "once in a lease"
    error = connectivity.check(LEASE_SECONDS + RENDEZVOUS_SECONDS)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(
        "server 1 (host box, pid 7) cannot be reached at tcp://10.0.0.1:1 from here (No route to host): set "
        "cluster.host there"
    )
    assert caplog.records[0].message == str(error)


def test_one_call_tries_one_server(network: Network) -> None:
    """Each may take a second, in which no answer is received."""
    connectivity = make_connectivity()
    for rank in (2, 3):
        connectivity.on_connect(Member("server", rank, "box", 7, f"tcp://10.0.0.1:{rank}", ""), 0.0)
    for tried in (1, 2, 3, 3):
        assert connectivity.check(LEASE_SECONDS) is None
        assert len(network.tried) == len(set(network.tried)) == tried


def test_one_that_can_be_reached_after_all_has_its_time_again(network: Network) -> None:
    connectivity = make_connectivity()
    assert connectivity.check(LEASE_SECONDS) is None
    network.reason = ""
    assert connectivity.check(1000.0) is None
    network.reason = "Connection refused"
    assert connectivity.check(2000.0) is None
    assert connectivity.check(2000.0 + RENDEZVOUS_SECONDS - 1) is None
    assert connectivity.check(2000.0 + 2 * RENDEZVOUS_SECONDS) is not None


def test_one_whose_handshakes_fail_is_warned_of_and_then_an_error(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reached, but has not the key that is listed here."""
    network.reason = ""
    connectivity = make_connectivity()
    for now in range(1, 70):
        connectivity.on_failed_handshake(1, now)
        assert connectivity.check(now) is None
    assert len(caplog.records) == 6, "once in a lease"
    error = connectivity.check(LEASE_SECONDS + RENDEZVOUS_SECONDS)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(
        "server 1 (host box, pid 7) is reached at tcp://10.0.0.1:1 from here, but its handshakes fail, as if"
    )


def test_a_handshake_that_failed_once_is_no_error(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    """As of a server that was killed meanwhile, or was busy."""
    network.reason = ""
    connectivity = make_connectivity()
    connectivity.on_failed_handshake(1, LEASE_SECONDS - 1)
    for now in range(10, 1000):
        assert connectivity.check(now) is None
    assert len(caplog.records) == 1


def test_failed_handshakes_of_a_server_that_has_answered_do_not_count(network: Network) -> None:
    network.reason = ""
    connectivity = make_connectivity()
    connectivity.on_answer(1)
    connectivity.on_failed_handshake(1, 1.0)
    assert connectivity.check(1e6) is None
    assert not connectivity.silent
