"""Serialization of messages: encodes and decodes the envelope frame, with a checksum over all frames.

The envelope is MessagePack: ``[protocol version, job, [tag, field, …], checksum]``. Version and job are
checked before the rest, so that a process of another version or job is refused with that reason. A tag maps
to a type through the closed union that the caller accepts; nothing received is ever looked up by name.

A message with frames has a checksum, which covers the message and its frames. The checksums of TCP and
Ethernet miss damage by faulty memory, or by a device between two connections. It does not protect against
attackers. XXH3 takes a tenth of the time of the copies that each message needs anyway, so it is always on.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from zenps.errors import ProtocolError

PROTOCOL_VERSION = 7

SAME_VERSION = "all nodes need the same version of ZenPS (zenps --version)"

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()

VERSION_ONLY = _encoder.encode((PROTOCOL_VERSION, "", None))
"""The answer to an envelope of another version: its sender refuses it, and says why. None is shorter."""

# A view of 4096 + 1024 members is about 700 KB. Only the status is larger.
MAX_ENVELOPE_BYTES = 1 << 20

# The status of 4096 + 1024 members is about 2 MB.
MAX_STATUS_BYTES = 4 << 20


class CorruptedError(ProtocolError):
    """The checksum of a message is wrong: memory, or a device on the way, has changed it.

    ``message`` is what the envelope seems to say. Use it only to ask the sender to send it again.
    """

    def __init__(self, message: object, detail: str) -> None:
        super().__init__("checksum", detail)
        self.message = message


class _Envelope(msgspec.Struct, array_like=True):
    # Any: each is checked by itself, so that the error names the one that is wrong.
    version: Any
    job: Any
    message: msgspec.Raw
    checksum: Any = None


def encode(job: str, message: msgspec.Struct, frames: Sequence[memoryview] = ()) -> bytes:
    """The envelope frame of ``message``; ``frames`` of single bytes will follow it."""
    if not frames:
        return _encoder.encode((PROTOCOL_VERSION, job, message))
    body = _encoder.encode(message)
    return _encoder.encode((PROTOCOL_VERSION, job, msgspec.Raw(body), checksum_of(body, frames)))


def checksum_of(body: bytes | memoryview, frames: Sequence[memoryview]) -> int:
    """XXH3-64 of each frame, seeded with the hash before: a streaming state costs more than hashing 1 KB."""
    total = xxh3_64_intdigest(body)
    for frame in frames:
        total = xxh3_64_intdigest(frame, total)
    return total


class Decoder(Generic[Message]):
    """Reads the envelopes that one socket accepts."""

    def __init__(
        self, job: str, accepted: UnionType | type[Message], max_bytes: int = MAX_ENVELOPE_BYTES
    ) -> None:
        self._job = job
        self._max_bytes = max_bytes
        self._envelope = msgspec.msgpack.Decoder(_Envelope)
        # msgspec's type stubs do not accept a union.
        accepted_type: Any = accepted
        self._message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(accepted_type)

    def decode(self, frame: bytes | memoryview, frames: Sequence[memoryview] = ()) -> Message:
        """The message in an envelope frame that was followed by ``frames``.

        Raises:
            ProtocolError: it is not an envelope of this version and job with an accepted message.
            CorruptedError: it is, but its checksum does not match.
        """
        size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if size > self._max_bytes:
            raise ProtocolError("envelope", f"{size} bytes, expected at most {self._max_bytes}")
        try:
            envelope = self._envelope.decode(frame)
        # TypeError and RecursionError come from unhashable map keys and hostile nesting.
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise ProtocolError("envelope", f"expected [version, job, message]: {error!s:.200}") from None
        version, body = envelope.version, envelope.message
        if type(version) is not int or version != PROTOCOL_VERSION:
            detail = f"expected {PROTOCOL_VERSION}, got {_show(version)}; {SAME_VERSION}"
            raise ProtocolError("version", detail)
        if envelope.job != self._job:
            raise ProtocolError("job", f"expected {self._job!r}, got {_show(envelope.job)}")
        try:
            message = self._message.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError("envelope", f"{error!s:.200}") from None
        if frames and envelope.checksum != (expected := checksum_of(memoryview(body), frames)):
            sizes = [frame.nbytes for frame in frames]
            got = f"{_show(envelope.checksum)} with frames of {sizes} bytes"
            raise CorruptedError(
                message, f"expected {expected}, got {got}; memory or a device on the way is faulty"
            )
        return message


def _show(value: object) -> str:
    """A received value, in short. A container only by type: ``repr`` of a deep one raises RecursionError."""
    return f"{value!r:.40}" if isinstance(value, str | int) else type(value).__name__
