"""Receive queue: how many pushes libzmq may hold unread, and what that takes of the byte budget.

libzmq reads ahead for each worker, while the server sums, and knows no limit in bytes: only one in messages
(``RCVHWM``). So the limit in messages is made from the size of a chunk and the number of workers. What may
lie unread counts against the byte budget, as pushes do that have been read.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from zenps.config.settings import Config
from zenps.wire.sockets import MAX_UNREAD_MESSAGES

logger = logging.getLogger("zenps.server")

# Of the byte budget: what unread pushes may take, and what rounds keep at least.
UNREAD_PART = 4
ROUNDS_PART = 2


class ReceiveQueue(NamedTuple):
    """Limits of a server.

    Attributes:
        max_messages: of one worker, unread.
        unread_bytes: what the unread pushes of all workers may take.
        rounds_bytes: the byte budget without that.
    """

    max_messages: int
    unread_bytes: int
    rounds_bytes: int


def size_receive_queue(config: Config) -> ReceiveQueue:
    """The limits that fit the budget. Warns if the chunks of all workers are too large for it."""
    budget_bytes = config.cluster.server_budget_bytes
    chunks_bytes = config.cluster.workers * config.sync.chunk_bytes
    # One more is on its way: libzmq takes memory for a frame when its first byte comes.
    fitting = budget_bytes // UNREAD_PART // chunks_bytes - 1
    max_messages = min(max(fitting, 1), MAX_UNREAD_MESSAGES)
    unread_bytes = (max_messages + 1) * chunks_bytes
    rounds_bytes = max(budget_bytes - unread_bytes, budget_bytes // ROUNDS_PART)
    if rounds_bytes + unread_bytes > budget_bytes:
        logger.warning(
            "cluster.server_budget_bytes is %d: expected at least %d for %d workers and chunks of up to %d "
            "bytes (sync.chunk_bytes), or this server may need more memory than that",
            budget_bytes,
            ROUNDS_PART * unread_bytes,
            config.cluster.workers,
            config.sync.chunk_bytes,
        )
    return ReceiveQueue(max_messages, unread_bytes, rounds_bytes)
