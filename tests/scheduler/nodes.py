"""Nodes that talk to a :class:`Membership`, for the tests of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.states import JobState
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import Departed, FromScheduler, Heartbeat, Refused, Register, View

LEASE_SECONDS, RENDEZVOUS_SECONDS, DEADLINE_SECONDS = 10.0, 60.0, 30.0
SETTINGS: dict[str, str | int | float] = {"sync.partition": "balanced", "sync.seed": 7}

Message = TypeVar("Message", bound=msgspec.Struct)


def make_membership(
    workers: int = 2,
    servers: int = 2,
    deadline_seconds: float = DEADLINE_SECONDS,
    now: float = 0.0,
    rejoin_seconds: float = 0.0,
    settings: dict[str, str | int | float] = SETTINGS,
    on_worker_loss: Literal["fail", "continue"] = "fail",
    incarnation: int = 0,
) -> Membership:
    cluster = ClusterConfig(
        workers=workers,
        servers=servers,
        lease_seconds=LEASE_SECONDS,
        rendezvous_seconds=RENDEZVOUS_SECONDS,
        deadline_seconds=deadline_seconds,
        rejoin_seconds=rejoin_seconds,
        on_worker_loss=on_worker_loss,
    )
    return Membership("job", cluster, settings, now, incarnation=incarnation)


def register(
    role: Role,
    rank: int = -1,
    pid: int = 100,
    host: str = "box",
    changed: dict[str, str | int | float] | None = None,
    generation: int = 0,
    restarts: int = 0,
) -> Register:
    address = f"tcp://{host}:{pid}" if role == "server" else ""
    settings = SETTINGS | (changed or {}) if role == "worker" else {}
    return Register(role, rank, host, pid, address, f"{host}:9", settings, generation, restarts)


def worker(number: int) -> bytes:
    return f"worker-{number}".encode()


def server(number: int) -> bytes:
    return f"server-{number}".encode()


EVERYBODY = [worker(0), worker(1), server(0), server(1)]


def to(sends: Sequence[Send], peer: bytes) -> list[FromScheduler]:
    return [send.message for send in sends if send.peer == peer]


def only(sends: Sequence[Send], peer: bytes) -> FromScheduler:
    """Returns the only message that is sent, which is to ``peer``."""
    (send,) = sends
    assert send.peer == peer
    return send.message


def sent(sends: Sequence[Send], kind: type[Message]) -> dict[bytes, Message]:
    """Returns the messages of one kind, by receiver."""
    return {send.peer: send.message for send in sends if isinstance(send.message, kind)}


def gather(
    membership: Membership,
    workers: Iterable[int] = (0, 1),
    servers: int = 2,
    now: float = 0.0,
    generation: int = 0,
    restarts: int = 0,
) -> list[Send]:
    """All nodes register, workers with the ranks that they want. Returns what the last one caused."""
    sends: list[Send] = []
    for number, rank in enumerate(workers):
        assert sends == []
        message = register("worker", rank, pid=number, generation=generation, restarts=restarts)
        sends = membership.on_message(worker(number), message, now)
    for number in range(servers):
        assert sends == []
        sends = membership.on_message(server(number), register("server", pid=50 + number), now)
    return sends


def running(
    workers: int = 2,
    servers: int = 2,
    deadline_seconds: float = DEADLINE_SECONDS,
    restarts: int = 0,
    rejoin_seconds: float = 0.0,
    on_worker_loss: Literal["fail", "continue"] = "fail",
) -> Membership:
    membership = make_membership(
        workers, servers, deadline_seconds, rejoin_seconds=rejoin_seconds, on_worker_loss=on_worker_loss
    )
    gather(membership, range(workers), servers, restarts=restarts)
    confirm(membership, map(server, range(servers)))
    assert membership.state == "running"
    return membership


def state_of(membership: Membership) -> JobState:
    """For a second assertion: after a first one, mypy takes the attribute for a constant."""
    return membership.state


def confirm(membership: Membership, peers: Iterable[bytes], now: float = 0.0) -> list[Send]:
    """These peers report the newest view. Returns what that caused."""
    beat = Heartbeat(membership.epoch, {})
    return [send for peer in peers for send in membership.on_message(peer, beat, now)]


def keep_alive(membership: Membership, now: float, peers: Iterable[bytes]) -> None:
    for peer in peers:
        membership.on_message(peer, Heartbeat(membership.epoch, {}), now)


def lose(membership: Membership, *lost: bytes, now: float = 20.0) -> list[Send]:
    """Only the nodes ``lost`` are silent for longer than a lease. Returns what that caused."""
    for node in members(membership):
        if node not in lost:
            epoch = next(n.epoch for n in membership._job.members if n.peer == node)
            membership.on_message(node, Heartbeat(epoch, {}), now)
    return membership.on_tick(now)


def members(membership: Membership) -> list[bytes]:
    return [node.peer for node in membership._job.members.alive()]


def slots(membership: Membership) -> dict[int, int]:
    """Returns the number of slots of each server that owns any."""
    nodes = membership.status(0.0).nodes
    return {node.rank: node.slots for node in nodes if node.slots}


def assert_failed(
    membership: Membership, sends: Sequence[Send], peers: Iterable[bytes], lost: bool | None = None
) -> None:
    """All of ``peers`` are refused because the job has failed. A departure, if any, is sent before that."""
    assert membership.state == "failed"
    refused = Refused("lost", membership.failure)
    assert sent(sends, Refused) == dict.fromkeys(peers, refused)
    assert all(to(sends, peer)[-1] == refused for peer in peers)
    if lost is not None:
        assert {departed.lost for departed in sent(sends, Departed).values()} == {lost}


def view_of(sends: Sequence[Send]) -> View:
    """Returns one of the views that are sent, which are all of one epoch."""
    views = sent(sends, View)
    assert len({view.epoch for view in views.values()}) == 1
    return next(iter(views.values()))
