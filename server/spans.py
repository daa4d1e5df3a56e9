"""What a timeline says about a server's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zenps.wire.messages import Busy, Failure, FromServer, Push, Resend, Result, Resume, Wanted

KINDS: Final[dict[type[FromServer], str]] = {
    Result: "answer",
    Failure: "fail",
    Busy: "refuse",
    Resume: "resume",
    Resend: "ask again",
    Wanted: "ask",
}
"""What sending one to a worker is called."""


def about(message: Push | FromServer) -> dict[str, object]:
    """Which chunk of what it concerns."""
    return {
        "tensor": message.tensor,
        "step": message.step,
        "chunk": message.chunk,
        "epoch": message.ring_epoch,
    }


def size_bytes(frames: Sequence[memoryview]) -> int:
    """Of all frames together."""
    return sum([frame.nbytes for frame in frames])
