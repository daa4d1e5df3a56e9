"""The memory that a server may need: what limits of containers are made for."""

from __future__ import annotations

from zenps.config.settings import Config
from zenps.config.sizes import SERVER_PROCESS_BYTES, WITH_ALLOWANCE, untaken_bytes
from zenps.server.receive_queue import size_receive_queue


def most_server_bytes(config: Config) -> int:
    """Rounds with the allowance of recovery, unread pushes, and results that workers have not taken.

    What workers of this version push: each row fits into a message.
    """
    queue = size_receive_queue(config)
    rounds_bytes = WITH_ALLOWANCE * queue.rounds_bytes
    return rounds_bytes + queue.unread_bytes + untaken_bytes(config) + SERVER_PROCESS_BYTES
