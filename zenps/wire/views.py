"""Views on the wire: encoded once for all nodes of a role, with the rank of each receiver apart.

A view names all members. With 1280 of them it has some 100 KB, and each change of members sends 1280 views,
which differ only in the receiver's rank (docs/scale.md).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from zenps.errors import ProtocolError
from zenps.observe import log

from .frames import MAX_ENVELOPE_BYTES, encode
from .scheduler_messages import SharedView, View

logger = logging.getLogger("zenps.views")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(View)


class ViewEncoder:
    """Encodes views of one job, each for many receivers."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._shared: deque[tuple[View, bytes]] = deque(maxlen=2)
        """The last views with their frames: one for servers and one for workers."""

    def encode(self, view: View) -> tuple[bytes, bytes]:
        """Returns the envelope for the view's receiver, and the frame that follows it."""
        frame = next((frame for known, frame in self._shared if _is_alike(known, view)), b"")
        if not frame:
            frame = _encoder.encode(msgspec.structs.replace(view, rank=0))
            self._shared.append((view, frame))
            if len(frame) > MAX_ENVELOPE_BYTES:  # who receives it closes the connection, and connects again
                members = len(view.workers) + len(view.servers)
                reason = "%d nodes take %d bytes in a view, and no node reads more than %d: nobody gets it; "
                advice = "give hosts shorter names, or run fewer nodes"
                sizes = members, len(frame), MAX_ENVELOPE_BYTES
                log.once(logger, "size", reason + advice, *sizes)
        return encode(self._job, SharedView(view.rank), [memoryview(frame)]), frame


def _is_alike(view: View, other: View) -> bool:
    """Returns whether two views differ only in the rank. If so, their members are the same objects."""
    is_same = view.workers is other.workers and view.servers is other.servers
    return is_same and view.epoch == other.epoch


def decode_view(message: SharedView, frames: Sequence[memoryview]) -> View:
    """Returns the view that follows ``message``, for its receiver.

    Raises:
        ProtocolError: the frame is missing or has no view.
    """
    if len(frames) != 1:
        raise ProtocolError("envelope", f"a view in {len(frames)} frames, expected 1")
    try:
        view = _decoder.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError("envelope", f"{error!s:.200}") from None
    return msgspec.structs.replace(view, rank=message.rank)
