"""Messages ⇄ envelope frames.

The envelope is MessagePack: ``[protocol version, job, [tag, field, …]]``. Version and job are
looked at before the rest, so that a stranger is refused for what it is. A tag maps to a type
through the closed union that the caller accepts; nothing received is ever looked up by name.
"""

from __future__ import annotations

from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec

from zenps.errors import ProtocolError

__all__ = ["MAX_ENVELOPE_BYTES", "PROTOCOL_VERSION", "Decoder", "encode"]

PROTOCOL_VERSION = 1

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()

# A view of 4096 + 1024 members is about 700 KB; nothing else comes near.
MAX_ENVELOPE_BYTES = 1 << 20


def encode(job: str, message: msgspec.Struct) -> bytes:
    """The envelope frame of ``message``."""
    return _encoder.encode((PROTOCOL_VERSION, job, message))


class Decoder(Generic[Message]):
    """Reads the envelopes that one socket accepts."""

    def __init__(self, job: str, accepted: UnionType | type[Message]) -> None:
        self._job = job
        self._envelope = msgspec.msgpack.Decoder(tuple[Any, Any, msgspec.Raw])
        # msgspec's stubs have no form for a union.
        accepted_type: Any = accepted
        self._message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(accepted_type)

    def decode(self, frame: bytes | memoryview) -> Message:
        """The message in an envelope frame.

        Raises:
            ProtocolError: it is not an envelope of this version and job with an accepted message.
        """
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if size > MAX_ENVELOPE_BYTES:
            raise ProtocolError("envelope", f"{size} bytes, at most {MAX_ENVELOPE_BYTES} are allowed")
        try:
            version, job, body = self._envelope.decode(frame)
        # TypeError and RecursionError come from unhashable map keys and hostile nesting.
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise ProtocolError("envelope", f"expected [version, job, message]: {error!s:.200}") from None
        if type(version) is not int or version != PROTOCOL_VERSION:
            raise ProtocolError("version", f"expected {PROTOCOL_VERSION}, got {_show(version)}")
        if job != self._job:
            raise ProtocolError("job", f"expected {self._job!r}, got {_show(job)}")
        try:
            return self._message.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError("envelope", f"{error!s:.200}") from None


def _show(value: object) -> str:
    """A received value, briefly. A container by its type: ``repr`` of a deep one ends in RecursionError."""
    return f"{value!r:.40}" if isinstance(value, str | int) else type(value).__name__
