"""Actions of the scheduler's pure parts: messages that the service sends for them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zenps.wire.scheduler_messages import FromScheduler

from .members import Node


class Send(Struct, frozen=True):
    """An action: send ``message`` to the node (or admin client) with this routing identity."""

    peer: bytes
    message: FromScheduler


def to_all(nodes: Iterable[Node], message: FromScheduler) -> list[Send]:
    """Sends the same message to each of ``nodes``."""
    return [Send(node.peer, message) for node in nodes]
