"""Timeline spans of a server: their names, and the arguments that say which chunk they are about."""

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
    """The arguments that say which chunk of which round a message is about."""
    return {
        "tensor": message.tensor,
        "step": message.step,
        "chunk": message.chunk,
        "epoch": message.ring_epoch,
    }
