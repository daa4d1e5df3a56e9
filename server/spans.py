"""Timeline spans of a server: their names, and the arguments that identify their chunk."""

from __future__ import annotations

from typing import Final

from zenps.wire.messages import Busy, Failure, FromServer, Push, Resend, Result, Resume, Wanted

SEND_SPANS: Final[dict[type[FromServer], str]] = {
    Result: "answer",
    Failure: "fail",
    Busy: "refuse",
    Resume: "resume",
    Resend: "ask again",
    Wanted: "ask",
}
"""The name of the span in which a message is sent to a worker."""


def chunk_args(message: Push | FromServer) -> dict[str, object]:
    """The arguments that identify the chunk and round of a message."""
    return {
        "tensor": message.tensor,
        "step": message.step,
        "chunk": message.chunk,
        "epoch": message.ring_epoch,
    }
