"""Receive queue: how many pushes libzmq may hold unread, and their part of the byte budget.

libzmq reads ahead for each worker while the server sums. It has no limit in bytes, only one in messages
(``RCVHWM``), which is computed here from the largest message and the number of workers. With many workers,
messages are smaller (:mod:`zenps.config.sizes`). Unread pushes count against the byte budget like those that
have been read.
"""

from __future__ import annotations

from typing import NamedTuple

from zenps.config.settings import Config
from zenps.config.sizes import MAX_UNREAD_PART, message_bytes
from zenps.wire.sockets import MAX_UNREAD_MESSAGES

# Unread pushes may take one part in this many of the byte budget, or two messages of each worker if these are
# larger.
UNREAD_PART = 4


class ReceiveQueue(NamedTuple):
    """Limits of a server.

    Attributes:
        max_messages: how many messages of one worker may lie unread.
        unread_bytes: the part of the byte budget for the unread pushes of all workers.
        rounds_bytes: the rest of the byte budget, for rounds.
    """

    max_messages: int
    unread_bytes: int
    rounds_bytes: int


def size_receive_queue(config: Config) -> ReceiveQueue:
    """The limits that fit the budget."""
    budget_bytes = config.cluster.server_budget_bytes
    messages_bytes = config.cluster.workers * message_bytes(config)
    # One more is on its way: libzmq takes memory for a frame when its first byte comes.
    fitting = budget_bytes // UNREAD_PART // messages_bytes - 1
    max_messages = min(max(fitting, 1), MAX_UNREAD_MESSAGES)
    unread_bytes = (max_messages + 1) * messages_bytes
    assert unread_bytes <= budget_bytes // MAX_UNREAD_PART, (
        "the size of chunks allows two messages of each worker"
    )
    return ReceiveQueue(max_messages, unread_bytes, budget_bytes - unread_bytes)
