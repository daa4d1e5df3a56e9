"""Types of message fields, with their bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from zenps.observe.lateness import MAX_RANKS

Role = Literal["worker", "server"]
Dtype = Literal["float16", "bfloat16", "float32", "float64", "int64", "uint8"]
FailureKind = Literal["mismatch", "deadline", "lost", "size"]
Kind = Literal["dense", "sparse", "blocks"]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
LAST_BARRIER = (1 << 62) - 1
"""The number of the barrier before workers leave. It is not counted, because a worker may reach it early."""
Incarnation = Count
"""The random number that each process of a scheduler draws; 0 if it is not known."""
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
MAX_NAME = 1024
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=16384)]
Host = Annotated[str, Meta(max_length=255)]
Address = Annotated[str, Meta(max_length=300)]
"""``host:port``, of a server's data socket with ``tcp://`` before it; empty if there is none."""
# A row is moved as one NumPy item, which holds less than 2 GiB; so does a frame.
MAX_COLUMNS = (1 << 28) - 1
MAX_DIMENSIONS = 64
SEAL_BYTES = 32
MAX_WAIT = 1200  # characters of what a worker waits for
MAX_FRAGMENTS = 1 << 15
MAX_RESULT_FRAGMENTS = 1 << 12  # half of what a server's send queue takes, because they are sent at once
Fragment = Annotated[int, Meta(ge=0, lt=MAX_FRAGMENTS)]
"""Which fragment of a chunk a message is, in order of position."""
Fragments = Annotated[int, Meta(ge=1, le=MAX_FRAGMENTS)]
"""The number of messages in which a sender's rows of a chunk travel."""
Load = Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=32)]
"""Numbers that a node reports with each heartbeat, for ``zenps status``."""
Late = Annotated[dict[Rank, float], Meta(max_length=MAX_RANKS)]
"""Seconds that others have waited, by the rank that they waited for."""
Shared = tuple[Count, Count]
"""Values that travel in no frame: their offset in the sender's shared memory, and their size in bytes."""
