from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from zenps.wire.messages import Push
from zenps.worker.rounds.states import Outgoing
from zenps.worker.transport.send_queue import SendQueue


def push(
    server: int, tensor: str, priority: int, step: int = 0, chunk: int = 0, fragment: int = 0
) -> Outgoing:
    message = Push(1, 0, tensor, step, chunk, 1, "dense", "float32", (4,), 4, 1, 4, "none", False)
    message = structs.replace(message, fragment=fragment, fragments=2)
    return Outgoing(server, message, (memoryview(bytes(16)),), priority)


def taken(send_queue: SendQueue, server: int) -> list[Outgoing]:
    out = []
    while (first := send_queue.first(server)) is not None:
        out.append(first)
        send_queue.remove_first(server)
    return out


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), max_size=30))
def test_each_server_gets_the_most_important_first_and_of_these_the_oldest(
    added: list[tuple[int, int]],
) -> None:
    send_queue = SendQueue()
    pushes = [push(server, f"t{age}", priority) for age, (server, priority) in enumerate(added)]
    for out in pushes:
        send_queue.add(out)
    assert len(send_queue) == len(pushes)
    for server in range(3):
        own = [out for out in pushes if out.server == server]
        assert taken(send_queue, server) == sorted(own, key=lambda out: -out.priority)
    assert not send_queue


def test_what_comes_between_goes_before_what_still_waits() -> None:
    send_queue = SendQueue()
    last, middle, first = (push(0, f"layer{index}", -index) for index in (2, 1, 0))
    send_queue.add(last)
    send_queue.add(middle)
    send_queue.remove_first(0)
    send_queue.add(first)
    assert taken(send_queue, 0) == [first, last]


def test_a_push_that_waits_is_not_sent_twice_for_being_repeated() -> None:
    send_queue, out = SendQueue(), push(0, "t", 0)
    others = [push(1, "t", 0), push(0, "t", 0, step=1), push(0, "t", 0, chunk=1), push(0, "u", 0)]
    others.append(push(0, "t", 0, fragment=1))
    for each in (out, *others, out):
        send_queue.add(each)
    assert len(send_queue) == 6
    assert len(taken(send_queue, 0)) == 5
    send_queue.add(out)
    assert taken(send_queue, 0) == [out], "once it was sent it may be repeated"


def test_nothing_is_left_of_what_was_sharded_for_a_ring_that_has_passed() -> None:
    send_queue = SendQueue()
    send_queue.add(push(0, "t", 0))
    send_queue.clear()
    assert not send_queue
    assert send_queue.first(0) is None
    again = push(0, "t", 0)
    send_queue.add(again)
    assert send_queue.first(0) is again
