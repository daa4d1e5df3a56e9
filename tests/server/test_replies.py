"""What a server sends, and whose connection it cuts."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server.replies import ReplySender
from zenps.server.workers import Workers


class Stalled:
    """A send queue of which one peer takes nothing, connections, and memory that nobody shares."""

    def __init__(self, route: bytes) -> None:
        self.route = route
        self.was_cut: list[int] = []

    def look(self) -> dict[bytes, str]:
        return {self.route: "it has taken nothing"}

    def forget(self, _: bytes) -> None:
        """There is nothing to forget."""

    def cut(self, descriptor: int) -> None:
        self.was_cut.append(descriptor)


def test_a_worker_that_is_dropped_takes_nobody_along_who_has_its_former_descriptor() -> None:
    stalled: Any = Stalled(b"worker-0-secret")
    counters = ServerMetrics(CollectorRegistry())
    replies = ReplySender("job", "host:1", stalled, stalled, stalled, Workers(), counters, OFF)
    replies.heard_on[5] = b"worker-0"
    replies.heard_on[6] = b"worker-0"  # it has connected again
    replies.heard_on[5] = b"worker-1"
    replies.drop_stalled()
    assert stalled.was_cut == [6]
    assert replies.heard_on == {5: b"worker-1"}
