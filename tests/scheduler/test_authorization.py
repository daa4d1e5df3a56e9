"""Authorization: which messages the owner of a key may send."""

from __future__ import annotations

import pytest

from tests.scheduler.nodes import register
from zenps.errors import ProtocolError
from zenps.scheduler.authorization import authorize
from zenps.wire.scheduler_messages import (
    Drain,
    Ended,
    Heartbeat,
    Leave,
    Register,
    StatusRequest,
    ToScheduler,
)

OWN = register("worker", 3)


@pytest.mark.parametrize(
    ("message", "owner", "registered"),
    [
        (OWN, "", ""),
        (Drain(0), "", ""),
        (StatusRequest(), "server-0", ""),
        (Drain(0), "operator", ""),
        (Ended("worker", 1, "box"), "operator", ""),
        (OWN, "worker-3", ""),
        (Leave(), "worker-3", "worker-3"),
        (Leave(), "worker-3", ""),
    ],
)
def test_allowed_messages_stay_as_they_are(message: ToScheduler, owner: str, registered: str) -> None:
    assert authorize(message, owner, registered) is message


def test_a_registration_for_any_rank_gets_that_of_the_key() -> None:
    message = authorize(register("worker"), "worker-3", "")
    assert isinstance(message, Register)
    assert message.rank == 3


@pytest.mark.parametrize(
    ("message", "owner", "registered", "reason"),
    [
        (Ended("worker", 1, "box"), "worker-3", "", "end of worker 1 by worker-3; expected operator"),
        (Drain(0), "worker-3", "", "drain of server 0 by worker-3; expected operator"),
        (Leave(), "worker-3", "worker-2", "a message of worker-2 by worker-3"),
        (Leave(), "operator", "", "a node's message by operator; expected a worker or server"),
        (Heartbeat(0, {}), "scheduler", "", "a node's message by scheduler; expected a worker or server"),
        (OWN, "worker-2", "", "registers as worker-3, but its key is that of worker-2"),
        (register("worker"), "server-2", "", "registers as worker, but its key is that of server-2"),
        (OWN, "operator", "", "its key is that of operator"),
    ],
)
def test_messages_for_another_key_are_refused(
    message: ToScheduler, owner: str, registered: str, reason: str
) -> None:
    with pytest.raises(ProtocolError, match=f"^key: .*{reason}$"):
        authorize(message, owner, registered)
