"""What the scheduler's pure parts have done: messages are sent, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from zenps.wire.messages import FromScheduler

from .members import Node


class Send(Struct, frozen=True):
    """An action: send ``message`` to the node (or admin client) with this routing identity."""

    peer: bytes
    message: FromScheduler


def to_all(nodes: Iterable[Node], message: FromScheduler) -> list[Send]:
    """The same to each."""
    return [Send(node.peer, message) for node in nodes]
