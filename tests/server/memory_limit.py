"""The memory that a server may need: what limits of containers are made for."""

from __future__ import annotations

from zenps.config.settings import Config
from zenps.server.receive_queue import size_receive_queue
from zenps.server.rounds.admission import WITH_ALLOWANCE

# Python, torch and libzmq, without any worker, have 0.25 GiB; the heap of libzmq's messages has gaps.
PROCESS_BYTES = 512 << 20


def most_server_bytes(config: Config) -> int:
    """Rounds with the allowance of recovery, unread pushes, and results that workers have not taken.

    What workers of this version push: each row fits into a message.
    """
    queue, cluster = size_receive_queue(config), config.cluster
    untaken_bytes = max(cluster.server_budget_bytes, 4 * cluster.max_message_bytes)
    return WITH_ALLOWANCE * queue.rounds_bytes + queue.unread_bytes + untaken_bytes + PROCESS_BYTES
