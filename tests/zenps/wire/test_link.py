"""A node's side of the rendezvous, against a socket that plays the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import zmq

from zenps.errors import DeadlineError, MismatchError, PeerLostError, UsageError, ZenPSError
from zenps.settings import ClusterConfig
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.link import SchedulerLink, new_register
from zenps.wire.messages import Departed, FromScheduler, Member, Refused, Register, Stop, ToScheduler, View
from zenps.wire.sockets import bind_router, context

MEMBER = Member("server", 1, "box", 7, "tcp://box:1", "")
VIEW = View(1, 0, (), (MEMBER,), bytes(8192))
DEPARTED = Departed(MEMBER, True, "server 1 is lost")
WAIT_MS = 20_000


@contextmanager
def scheduler_that_answers(answers: Sequence[bytes]) -> Iterator[SchedulerLink]:
    """A link to a scheduler that answers the first message, which must be a registration."""
    with context() as ctx:
        router, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        received: list[ToScheduler] = []

        def play() -> None:
            if router.poll(WAIT_MS):
                peer, envelope = router.recv_multipart()
                received.append(Decoder("job", ToScheduler).decode(envelope))
                for answer in answers:
                    router.send_multipart([peer, answer])

        thread = threading.Thread(target=play)
        thread.start()
        cluster = ClusterConfig(scheduler=address, job="job", rendezvous_seconds=20.0)
        try:
            yield SchedulerLink(ctx, cluster, "worker")
        finally:
            thread.join(WAIT_MS / 1000)
        assert not thread.is_alive()
        assert [type(message) for message in received] == [Register]


def registration() -> Register:
    return new_register("worker", None, "", "", {})


def messages(*wanted: FromScheduler) -> list[bytes]:
    return [encode("job", message) for message in wanted]


def test_what_follows_the_view_is_not_lost() -> None:
    with scheduler_that_answers(
        [b"garbage", encode("other job", Stop()), *messages(VIEW, DEPARTED, Stop())]
    ) as link:
        assert link.join(registration()) == VIEW
        following: list[FromScheduler] = []
        while len(following) < 2:
            assert link.socket.poll(WAIT_MS, zmq.POLLIN)
            following += link.receive()
        assert following == [DEPARTED, Stop()]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Refused("mismatch", "why"), MismatchError),
        (Refused("deadline", "why"), DeadlineError),
        (Refused("usage", "why"), UsageError),
        (Refused("lost", "why"), PeerLostError),
        (Departed(MEMBER, True, "why"), PeerLostError),
    ],
)
def test_a_rendezvous_that_fails(message: FromScheduler, error: type[ZenPSError]) -> None:
    with scheduler_that_answers(messages(message)) as link, pytest.raises(error, match=r"^why$"):
        link.join(registration())


def test_a_scheduler_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.wire.link.PATIENCE_SECONDS", 0.1)
    with context() as ctx:
        cluster = ClusterConfig(scheduler="127.0.0.1:9", job="job", rendezvous_seconds=0.1)
        link = SchedulerLink(ctx, cluster, "worker")
        with pytest.raises(
            DeadlineError, match=r"no answer from the scheduler at 127.0.0.1:9 within 0.1 s; is it running"
        ):
            link.join(registration())
        link.socket.close(linger=0)
