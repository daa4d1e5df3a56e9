"""Which views and which members a restarted scheduler goes by: another may be there, or a node may lie."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.scheduler.membership.test_recovery import ENOUGH_SECONDS
from tests.scheduler.nodes import LEASE_SECONDS, SETTINGS, confirm, only, register, sent, server, worker
from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.messages import Heartbeat, Refused, Register, View

SECRET = b"the scheduler's secret key"
WORKERS, SERVERS = 4, 2


def scheduler(on_worker_loss: str = "continue", secret: bytes = b"") -> Membership:
    cluster = ClusterConfig(
        workers=WORKERS, servers=SERVERS, lease_seconds=LEASE_SECONDS, on_worker_loss=on_worker_loss
    )
    return Membership("job", cluster, SETTINGS, 0.0, secret)


def registers() -> dict[bytes, Register]:
    """What each node registers with at first."""
    workers = {worker(n): register("worker", n, n) for n in range(WORKERS)}
    return workers | {server(n): register("server", pid=50 + n) for n in range(SERVERS)}


def run(membership: Membership) -> dict[bytes, Register]:
    """A job begins. Returns what each node registers with again."""
    sends = [send for peer, first in registers().items() for send in membership.on_message(peer, first, 0.0)]
    sends += confirm(membership, map(server, range(SERVERS)))
    views = sent(sends, View)
    return {
        peer: msgspec.structs.replace(first, rank=views[peer].rank, view=views[peer])
        for peer, first in registers().items()
    }


def continues(membership: Membership, returning: dict[bytes, Register], here: Sequence[bytes]) -> bool:
    """Only these nodes return. Returns whether the job goes on with them."""
    for peer in here:
        membership.on_message(peer, returning[peer], 0.0)
    for peer in here:
        membership.on_message(peer, Heartbeat(1, {}), ENOUGH_SECONDS - 1)
    sends = membership.on_tick(ENOUGH_SECONDS)
    if membership.state == "failed":
        assert sent(sends, Refused).keys() == set(here)
        assert "another scheduler may have these" in membership.failure
        return False
    assert membership.state in ("confirming", "running")
    return True


@pytest.mark.parametrize(
    ("here", "does"),
    [
        ([worker(0), worker(1), worker(2), server(0)], True),
        ([worker(0), worker(1), server(0), server(1)], True),
        ([worker(0), worker(1), server(0)], False),
        ([worker(3), server(0), server(1)], False),
    ],
    ids=["most workers", "half, and most servers", "half", "few workers"],
)
def test_a_restarted_scheduler_needs_most_of_the_last_view(here: list[bytes], does: bool) -> None:
    assert continues(scheduler(), run(scheduler()), here) == does


@pytest.mark.parametrize("count", range(WORKERS + 1))
@pytest.mark.parametrize("servers", range(SERVERS + 1))
def test_of_two_restarted_schedulers_at_most_one_continues(count: int, servers: int) -> None:
    """Each has a part of the nodes, and neither knows of the other."""
    returning = run(scheduler())
    halves: list[list[bytes]] = [[], []]
    for number in range(WORKERS):
        halves[number >= count].append(worker(number))
    for number in range(SERVERS):
        halves[number >= servers].append(server(number))
    able = [half for half in halves if any(peer.startswith(b"worker") for peer in half)]
    assert sum(continues(scheduler(), returning, half) for half in able) <= 1


@pytest.mark.parametrize("on_worker_loss", ["continue", "fail"])
def test_a_forged_view_of_a_huge_epoch_is_not_the_newest(on_worker_loss: str) -> None:
    """Whoever holds a node's key could else make itself the only server, and end the job for all others."""
    returning = run(scheduler(on_worker_loss, SECRET))
    after = scheduler(on_worker_loss, SECRET)
    genuine = returning[worker(3)].view
    assert genuine is not None
    forged = msgspec.structs.replace(genuine, epoch=1 << 61, servers=genuine.servers[:1])
    for view in (forged, msgspec.structs.replace(forged, seal=b"")):
        false = msgspec.structs.replace(returning[worker(3)], view=view)
        refused = only(after.on_message(worker(3), false, 0.0), worker(3))
        assert isinstance(refused, Refused)
        assert "no scheduler of this job has made the view" in refused.reason
    assert after.state == "gathering"
    for peer, message in returning.items():
        after.on_message(peer, message, 1.0)
    assert (after.state, after.epoch) == ("running", 1)


def test_views_of_another_secret_are_not_genuine() -> None:
    returning = run(scheduler(secret=b"of another job"))
    after = scheduler(secret=SECRET)
    assert isinstance(only(after.on_message(server(0), returning[server(0)], 0.0), server(0)), Refused)
