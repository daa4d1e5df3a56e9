"""Drains of servers, from the request of an operator to its answer."""

from __future__ import annotations

import pytest

from tests.scheduler.nodes import (
    DEADLINE_SECONDS,
    confirm,
    lose,
    make_membership,
    only,
    register,
    running,
    sent,
    server,
    slots,
    to,
    worker,
)
from zenps.wire.scheduler_messages import Drain, DrainReply, Heartbeat, Leave, Stop, View

CLIENT = b"admin client"


def test_a_drained_server_leaves_once_the_others_have_its_slots() -> None:
    membership = running()
    view = sent(membership.on_message(CLIENT, Drain(0), 1.0), View)
    assert {peer: view.ring_epoch for peer, view in view.items()} == {server(1): 2}
    assert slots(membership) == {1: 4096}
    assert [n.state for n in membership.status(1.0).nodes if n.role == "server"] == ["leaving", "present"]
    # It does not get the new view. Another admin client waits, too.
    for _ in range(2):
        assert membership.on_message(b"impatient", Drain(0), 1.0) == []
    assert Stop() not in to(membership.on_message(server(0), Heartbeat(1, {}), 1.0), server(0))
    sends = confirm(membership, [server(1)])
    assert sent(sends, Stop) == {server(0): Stop()}
    assert sent(sends, DrainReply) == {CLIENT: DrainReply(""), b"impatient": DrainReply("")}
    assert len(to(sends, b"impatient")) == 1
    assert {*sent(sends, View)} == {worker(0), worker(1)}
    # Stop may be lost with its connection, as the admin client's answer.
    assert Stop() in to(membership.on_message(server(0), Heartbeat(1, {}), 2.0), server(0))
    assert only(membership.on_message(CLIENT, Drain(0), 2.0), CLIENT) == DrainReply("")
    assert membership.on_message(server(0), Leave(), 3.0) == []
    assert (membership.state, membership.epoch) == ("running", 2)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_drained_server_may_leave_early(is_lost: bool) -> None:
    membership = running()
    membership.on_message(CLIENT, Drain(0), 1.0)
    if is_lost:
        lose(membership, server(0))
    else:
        assert membership.on_message(server(0), Leave(), 1.0) == []
    assert membership.epoch == 2
    if membership.state == "confirming":
        assert sent(confirm(membership, [server(1)], now=20.0), DrainReply) == {CLIENT: DrainReply("")}
    assert membership.state == "running"


def test_a_drained_server_stays_when_all_others_are_lost() -> None:
    membership = running()
    membership.on_message(CLIENT, Drain(0), 1.0)
    sends = membership.on_message(server(1), Leave(), 2.0)
    assert sent(sends, DrainReply) == {CLIENT: DrainReply("the other servers are gone; start another first")}
    assert {peer: view.ring_epoch for peer, view in sent(sends, View).items()} == {server(0): 3}
    assert slots(membership)[0] == 4096
    assert {*sent(confirm(membership, [server(0)]), View)} == {worker(0), worker(1)}
    assert membership.state == "running"


@pytest.mark.parametrize("rejoin_seconds", [0.0, 100.0])
def test_a_waiting_client_is_told_that_all_workers_have_left(rejoin_seconds: float) -> None:
    membership = running(rejoin_seconds=rejoin_seconds)
    membership.on_message(CLIENT, Drain(0), 1.0)
    assert sent(membership.on_message(worker(0), Leave(), 2.0), DrainReply) == {}
    error = "all workers have left; the server ends with the others, or once the next workers have come"
    assert sent(membership.on_message(worker(1), Leave(), 3.0), DrainReply) == {CLIENT: DrainReply(error)}
    if rejoin_seconds:
        for number in (0, 1):
            membership.on_message(b"new-%d" % number, register("worker", number, 70 + number), 4.0)
        assert {*sent(confirm(membership, [server(1)], now=4.0), Stop)} == {server(0)}


def test_impossible_drains_are_refused() -> None:
    membership = running(servers=1)

    def error(rank: int, now: float = 1.0) -> str:
        reply = only(membership.on_message(CLIENT, Drain(rank), now), CLIENT)
        assert isinstance(reply, DrainReply)
        return reply.error

    assert error(0) == "server 0 is the only one; start another first"
    assert error(4) == "no server 4 is present; expected one of [0]"
    membership.abort("told to end")
    assert error(0) == "the job is failed; expected running"
    membership = make_membership()
    assert error(0) == "the job is gathering; expected running"


def test_a_waiting_client_is_told_that_the_job_failed() -> None:
    membership = running()
    membership.on_message(CLIENT, Drain(0), 1.0)
    for peer in (worker(0), server(0), server(1)):  # nobody confirms
        membership.on_message(peer, Heartbeat(1, {}), 20.0)
    sends = membership.on_tick(20.0)
    assert sent(sends, DrainReply) == {CLIENT: DrainReply(membership.failure)}
    assert DEADLINE_SECONDS > 20.0
