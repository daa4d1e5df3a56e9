"""What a scheduler does at each registration and each change of members, in jobs of thousands of nodes."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from tests.scheduler.nodes import confirm, make_membership, register, server, worker
from zenps.scheduler.membership.members import Members, Node
from zenps.scheduler.membership.tracker import Membership
from zenps.wire.frames import Decoder, encode
from zenps.wire.scheduler_messages import Leave, Register, ToScheduler, View
from zenps.wire.views import ViewEncoder

WORKERS, SERVERS = 1024, 256
MAX_SECONDS, MAX_BYTES = 0.3, 10_000_000


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """It would look at all objects of this process, most of which are other tests'."""
    gc.disable()
    yield
    gc.enable()


def registrations(workers: int, servers: int) -> dict[bytes, Register]:
    """Servers come first: each worker has to be able to reach all of them."""
    found = {server(n): register("server", pid=n, host=f"10.0.1.{n}") for n in range(servers)}
    return found | {worker(n): register("worker", n, pid=n) for n in range(workers)}


def gathered(workers: int, servers: int) -> Membership:
    membership = make_membership(workers, servers)
    for peer, message in registrations(workers, servers).items():
        membership.on_message(peer, message, 0.0)
    assert membership.state == "confirming"
    return membership


def cost(workers: int, register_all: Callable[[int], Callable[[], object]]) -> float:
    """Of one registration: the best of three, for others use this processor, too."""
    seconds = []
    for _ in range(3):
        run = register_all(workers)
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return min(seconds) / workers


def test_a_registration_costs_the_same_however_many_nodes_there_are() -> None:
    def gather(workers: int) -> Callable[[], object]:
        return lambda: gathered(workers, workers // 4)

    assert cost(1600, gather) < 4 * cost(80, gather)


def test_registrations_do_not_look_at_all_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5120 nodes that took a second of the scheduler's processor."""
    looks = 0
    all_nodes = Members.__iter__

    def counted(members: Members) -> Iterator[Node]:
        nonlocal looks
        looks += 1
        return all_nodes(members)

    monkeypatch.setattr(Members, "__iter__", counted)
    gathered(64, 16)
    assert looks < 16


def returns(workers: int, servers: int) -> dict[bytes, Register]:
    """The registrations at a restarted scheduler."""
    before = gathered(workers, servers)
    confirm(before, [server(number) for number in range(servers)])
    view, nodes = before._job.views.view_for, {node.peer: node for node in before._job.members}
    return {
        peer: structs.replace(message, view=view(nodes[peer]))
        for peer, message in registrations(workers, servers).items()
    }


def test_a_return_to_a_restarted_scheduler_costs_the_same_however_many_nodes_there_are() -> None:
    def recover(workers: int) -> Callable[[], object]:
        servers = workers // 16
        returning = returns(workers, servers)

        def run() -> None:
            membership = make_membership(workers, servers)
            for peer, message in returning.items():
                membership.on_message(peer, message, 0.0)
            assert (membership.state, membership.epoch) == ("running", 1)

        return run

    assert cost(1600, recover) < 4 * cost(80, recover)


def test_a_restarted_scheduler_keeps_the_members_of_one_view() -> None:
    frames = {peer: encode("job", message) for peer, message in returns(128, 32).items()}
    decoder: Decoder[ToScheduler] = Decoder("job", ToScheduler)
    membership = make_membership(128, 32)
    tracemalloc.start()
    try:
        for peer, frame in frames.items():
            membership.on_message(peer, decoder.decode(frame), 0.0)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert membership.state == "running"
    assert kept < 1_000_000, "0.3 MB; with the whole view of each node, 7 MB"


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
        return sum(type(found) is Node for found in gc.get_objects())

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
