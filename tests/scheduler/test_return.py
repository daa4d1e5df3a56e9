"""A scheduler that is started anew, or left alone: what it must not conclude from who is there."""

from __future__ import annotations

import numpy as np

from zenps.ring import SLOTS
from zenps.scheduler.membership import Membership, Send
from zenps.settings import ClusterConfig
from zenps.wire.messages import Heartbeat, HeartbeatReply, Leave, Member, Register, View, WhoAreYou

OWNERS = np.zeros(SLOTS, dtype="<u2").tobytes()


def register(role: str, rank: int, left: tuple[int, ...] = ()) -> Register:
    workers = tuple(Member("worker", other, "host", 10 + other, "", "") for other in range(2))
    servers = (Member("server", 0, "host", 20, "tcp://host:1", ""),)
    view = View(5, rank, workers, servers, OWNERS, ring=1, left=left)
    address = "tcp://host:1" if role == "server" else ""
    pid = (10 if role == "worker" else 20) + rank
    return Register(role, rank, "host", pid, address, "", {}, view=view)  # type: ignore[arg-type]


def new_scheduler() -> Membership:
    return Membership("job", ClusterConfig(workers=2, servers=1), {}, now=0.0)


def waves(sends: list[Send]) -> list[int]:
    return [send.message.wave for send in sends if isinstance(send.message, HeartbeatReply)]


def test_a_worker_that_has_left_is_not_missed() -> None:
    scheduler = new_scheduler()
    assert scheduler.on_message(b"s", Heartbeat(5, {}), 0.0) == [Send(b"s", WhoAreYou())]
    scheduler.on_message(b"s", register("server", 0, left=(1,)), 0.0)
    assert scheduler.state == "recovering"
    scheduler.on_message(b"w0", register("worker", 0, left=(1,)), 0.0)
    assert scheduler.state == "running"
    assert scheduler.live("worker") == 1


def test_no_wave_begins_before_all_workers_are_back() -> None:
    scheduler = new_scheduler()
    scheduler.on_message(b"s", register("server", 0), 0.0)
    scheduler.on_message(b"w0", register("worker", 0), 0.0)
    assert waves(scheduler.on_message(b"w0", Heartbeat(5, {}, wave=7), 0.1)) == [0]
    scheduler.on_message(b"w1", register("worker", 1), 0.2)
    scheduler.on_message(b"w1", Heartbeat(5, {}, wave=6), 0.3)
    assert waves(scheduler.on_message(b"w0", Heartbeat(5, {}, wave=7), 0.4)) == [7]


def test_the_last_worker_leaves_when_no_server_is_left() -> None:
    scheduler = Membership("job", ClusterConfig(workers=1, servers=1), {}, now=0.0)
    scheduler.on_message(b"s", Register("server", -1, "host", 1, "tcp://host:1", "", {}), 0.0)
    scheduler.on_message(b"w", Register("worker", -1, "host", 2, "", "", {}), 0.0)
    scheduler.on_message(b"s", Heartbeat(1, {}), 0.1)
    scheduler.on_message(b"s", Leave(), 0.2)
    scheduler.on_message(b"w", Leave(), 0.3)
    assert scheduler.state == "stopped"
