"""Messages between workers and servers, by direction. ``docs/protocol.md`` describes them in prose.

A message is the first frame of several; tensor bytes are frames of their own. Fields are sent as an array in
the order written here: a new field goes last, with a default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from zenps.codecs.base import CodecName, ValueForm
from zenps.schemes.base import PullCodec

from .fields import (
    MAX_COLUMNS,
    MAX_DIMENSIONS,
    Count,
    Dtype,
    FailureKind,
    Fragment,
    Fragments,
    Kind,
    Name,
    Rank,
    Shared,
    Text,
)

# ── worker → server ─────────────────────────────────────────────────────────────────────────────


class Push(Struct, frozen=True, array_like=True, tag="push"):
    """One rank's contribution to one chunk of one round, and the request for its result.

    Frames: envelope, positions (by ``codec``, relative to the chunk), values ``[rows, columns]``. The
    positions frame is missing for a dense chunk, and ``rows`` is ``span``, or 0 from a rank that takes part
    without contributing. The positions frame of blocks also says which come next (:mod:`zenps.wire.blocks`).
    """

    ring_epoch: Count
    """The epoch of the ring by which the tensor was sharded."""
    rank: Rank
    tensor: Name
    step: Count
    chunk: Count
    chunks: Annotated[int, Meta(ge=1, lt=1 << 32)]
    """How many chunks the worker divides each server's shard into."""
    kind: Kind
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
    """The shape of the whole tensor; the same on all ranks."""
    span: Count
    """The number of positions in this chunk."""
    columns: Annotated[int, Meta(ge=0, le=MAX_COLUMNS)]
    rows: Count
    codec: CodecName | Literal["none"]
    average: bool
    again: bool = False
    """True if the round began under an older ring: ranks that have ended it must push it again."""
    answer: PullCodec = "auto"
    """How the positions of the result should be encoded."""
    values: ValueForm = "same"
    """The form of the values, here and in the result. Unless it is ``same``, ``dtype`` is float32."""
    stands_for: Annotated[tuple[Rank, ...], Meta(max_length=1024)] = ()
    """Other ranks of the sender's host whose contributions are in this one. They push nothing."""
    shared: Shared | None = None
    fragment: Fragment = 0
    fragments: Fragments = 1
    given: Annotated[str, Meta(max_length=2048)] = ""
    """A description of the caller's tensor, if that travels in another form; the same on all ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks whose contributions it has."""
        return self.rank, *self.stands_for


class GiveUp(Struct, frozen=True, array_like=True, tag="give-up"):
    """The sender's rank pushes nothing more for this round of this tensor: it has failed there."""

    ring_epoch: Count
    tensor: Name
    step: Count
    lacks: Annotated[int, Meta(ge=-1, lt=1 << 32)] = -1
    """-1, or a chunk that the server has asked for and the rank does not have; it may push other chunks."""


class Here(Struct, frozen=True, array_like=True, tag="here"):
    """The first message on a connection, and again with each view: the server can send to this worker."""


class Hello(Struct, frozen=True, array_like=True):
    """To a server of the same host by a Unix socket, with the descriptor of the worker's arena."""

    job: Text
    identity: Annotated[bytes, Meta(max_length=255)]
    """The worker's public identity."""


# ── server → worker ─────────────────────────────────────────────────────────────────────────────


class ChunkReply(Struct, frozen=True, array_like=True):
    """The base of all answers of a server: it identifies the chunk and the round."""

    ring_epoch: Count
    tensor: Name
    step: Count
    chunk: Count


class Result(ChunkReply, frozen=True, array_like=True, tag="result"):
    """The union of all ranks' rows of one chunk, summed in rank order. Its frames are those of a push."""

    rows: Count
    codec: CodecName | Literal["none"]
    pushed: Count = 0
    """The sum of ``rows`` over all ranks' pushes; 0 except in fragment 0."""
    shared: Shared | None = None
    fragment: Fragment = 0
    fragments: Fragments = 1


class Failure(ChunkReply, frozen=True, array_like=True, tag="failure"):
    """The round has failed and will have no result."""

    kind: FailureKind
    reason: Text


class Busy(ChunkReply, frozen=True, array_like=True, tag="busy"):
    """The server is over its byte budget and has dropped the push. It will send ``Resume``."""


class Resume(ChunkReply, frozen=True, array_like=True, tag="resume"):
    """There is room now for the push that was answered by ``Busy``: send it again."""


class Resend(ChunkReply, frozen=True, array_like=True, tag="resend"):
    """The push arrived damaged and was dropped: send it again."""


class Wanted(ChunkReply, frozen=True, array_like=True, tag="wanted"):
    """The receiver's push is missing in a round. If the receiver has ended that round, it pushes it again."""


ToServer = Push | GiveUp | Here
FromServer = Result | Failure | Busy | Resume | Resend | Wanted
