from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zenps.wire.messages import Push
from zenps.worker.rounds.states import Outgoing
from zenps.worker.transport.send_queue import Backlog


def push(server: int, tensor: str, priority: int, step: int = 0, chunk: int = 0) -> Outgoing:
    message = Push(1, 0, tensor, step, chunk, 1, "dense", "float32", (4,), 4, 1, 4, "none", False)
    return Outgoing(server, message, (memoryview(b""), memoryview(bytes(16))), priority)


def taken(backlog: Backlog, server: int) -> list[Outgoing]:
    out = []
    while (first := backlog.first(server)) is not None:
        out.append(first)
        backlog.remove_first(server)
    return out


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), max_size=30))
def test_each_server_gets_the_most_important_first_and_of_these_the_oldest(
    added: list[tuple[int, int]],
) -> None:
    backlog = Backlog()
    pushes = [push(server, f"t{age}", priority) for age, (server, priority) in enumerate(added)]
    for out in pushes:
        backlog.add(out)
    assert len(backlog) == len(pushes)
    for server in range(3):
        own = [out for out in pushes if out.server == server]
        assert taken(backlog, server) == sorted(own, key=lambda out: -out.priority)
    assert not backlog


def test_what_comes_between_goes_before_what_still_waits() -> None:
    backlog = Backlog()
    last, middle, first = (push(0, f"layer{index}", -index) for index in (2, 1, 0))
    backlog.add(last)
    backlog.add(middle)
    backlog.remove_first(0)
    backlog.add(first)
    assert taken(backlog, 0) == [first, last]


def test_a_push_that_waits_is_not_sent_twice_for_being_repeated() -> None:
    backlog, out = Backlog(), push(0, "t", 0)
    others = [push(1, "t", 0), push(0, "t", 0, step=1), push(0, "t", 0, chunk=1), push(0, "u", 0)]
    for each in (out, *others, out):
        backlog.add(each)
    assert len(backlog) == 5
    assert len(taken(backlog, 0)) == 4
    backlog.add(out)
    assert taken(backlog, 0) == [out], "once it was sent it may be repeated"


def test_nothing_is_left_of_what_was_cut_for_a_ring_that_has_passed() -> None:
    backlog = Backlog()
    backlog.add(push(0, "t", 0))
    backlog.clear()
    assert not backlog
    assert backlog.first(0) is None
    again = push(0, "t", 0)
    backlog.add(again)
    assert backlog.first(0) is again
