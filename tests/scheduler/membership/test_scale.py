"""What a scheduler does at each registration and each change of members, in jobs of thousands of nodes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from tests.scheduler.nodes import confirm, make_membership, register, server, worker
from zenps.scheduler.membership.members import Node
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.scheduler_messages import Leave, View
from zenps.wire.views import ViewEncoder

WORKERS, SERVERS = 1024, 256
MAX_SECONDS, MAX_BYTES = 0.3, 10_000_000


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """It would look at all objects of this process, most of which are other tests'."""
    gc.disable()
    yield
    gc.enable()


def gathered(workers: int, servers: int) -> Membership:
    """Servers come first: each worker has to be able to reach all of them."""
    membership = make_membership(workers, servers)
    for number in range(servers):
        membership.on_message(server(number), register("server", pid=number, host=f"10.0.1.{number}"), 0.0)
    for number in range(workers):
        membership.on_message(worker(number), register("worker", pid=number), 0.0)
    assert membership.state == "confirming"
    return membership


def test_a_registration_costs_the_same_however_many_nodes_there_are() -> None:
    def cost(workers: int) -> float:
        """Of one registration: the best of three, for others use this processor, too."""
        seconds = []
        for _ in range(3):
            begin = time.process_time()
            gathered(workers, workers // 4)
            seconds.append(time.process_time() - begin)
        return min(seconds) / workers

    assert cost(800) < 4 * cost(40)


def test_a_change_of_members_encodes_one_view_for_all_nodes_of_a_role() -> None:
    membership = gathered(WORKERS, SERVERS)
    servers = [server(number) for number in range(SERVERS)]
    confirm(membership, servers)
    encoder = ViewEncoder("job")
    begin = time.process_time()
    sends = membership.on_message(servers[-1], Leave(), 1.0)
    sends += confirm(membership, servers[:-1], 1.0)
    messages = [encoder.encode(send.message) for send in sends if isinstance(send.message, View)]
    seconds = time.process_time() - begin
    assert len(messages) == WORKERS + SERVERS - 1
    frames = {id(frame): frame for _, frame in messages}.values()
    assert sum(map(len, [*frames, *(envelope for envelope, _ in messages)])) < MAX_BYTES
    assert seconds < MAX_SECONDS, "0.06 s, where nothing else disturbs it"


def test_servers_that_others_have_replaced_take_no_memory() -> None:
    def count() -> int:
        gc.collect()
        return sum(isinstance(found, Node) for found in gc.get_objects())

    before = count()
    membership = gathered(2, 1)
    confirm(membership, [server(0)])
    for number in range(1, 20):
        membership.on_message(server(number), register("server", pid=number), 1.0)
        confirm(membership, [server(number - 1), server(number)], 1.0)
        membership.on_message(server(number - 1), Leave(), 1.0)
        confirm(membership, [server(number)], 1.0)
    known = membership.status(1.0).nodes
    assert len(known) == 2 + 2  # the present one, and the one before it
    assert count() == before + len(known)
