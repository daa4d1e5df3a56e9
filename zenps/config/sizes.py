"""Sizes that follow from a server's byte budget: of chunks and messages, and of the server's memory."""

from __future__ import annotations

from typing import Final

from .settings import GIB, Config

UNREAD_MESSAGES: Final = 2
"""How many unread messages of each worker a server's budget must have room for."""

MAX_UNREAD_PART: Final = 2
"""Unread messages may take at most one part in this many of a server's budget."""

MESSAGE_CHUNKS: Final = 2
"""A push larger than so many chunks travels in several messages."""

WITH_ALLOWANCE: Final = 2
"""The byte budget of a server and the allowance of recovery rounds together, in budgets."""

UNTAKEN_MESSAGES: Final = 4
"""How many of the largest messages a server may have queued for workers, whatever its budget is."""

SERVER_PROCESS_BYTES: Final = GIB // 2
"""Python, torch and libzmq, without any worker, have 0.25 GiB; the heap of libzmq's messages has gaps."""


def chunk_bytes(config: Config) -> int:
    """Returns ``sync.chunk_bytes``, or what a server's budget allows for each worker if that is less.

    A power of two, so that it stays the same if there are a few workers more or less.
    """
    max_bytes = config.cluster.server_budget_bytes // least_budget_bytes(config.cluster.workers, 1)
    return min(config.sync.chunk_bytes, 1 << max_bytes.bit_length() >> 1)


def least_budget_bytes(workers: int, chunk_bytes: int) -> int:
    """Returns the least budget with which the chunks of this many workers may have ``chunk_bytes``."""
    return MAX_UNREAD_PART * UNREAD_MESSAGES * MESSAGE_CHUNKS * workers * chunk_bytes


def message_bytes(config: Config) -> int:
    """Returns what the rows of one push may take.

    Half of ``cluster.max_message_bytes`` leaves room for bitmaps and envelopes. Chunks are cut by the rows
    that are expected; the size of :data:`MESSAGE_CHUNKS` chunks leaves room for more rows.
    """
    return min(config.cluster.max_message_bytes // 2, MESSAGE_CHUNKS * chunk_bytes(config))


def untaken_bytes(config: Config) -> int:
    """Returns how much a server may hold of results that workers have not taken."""
    cluster = config.cluster
    return max(cluster.server_budget_bytes, UNTAKEN_MESSAGES * cluster.max_message_bytes)


def server_bytes(config: Config) -> int:
    """Returns the memory that a server may take while ranks push about as much as in the step before.

    Rounds open by that, or by their first push, and then take whatever others push: in a first step, or if a
    rank suddenly pushes more than all did before, memory follows what the ranks push.
    """
    rounds_bytes = WITH_ALLOWANCE * config.cluster.server_budget_bytes
    return rounds_bytes + untaken_bytes(config) + SERVER_PROCESS_BYTES
