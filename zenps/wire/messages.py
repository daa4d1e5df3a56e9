"""Message types of the wire protocol, by direction. ``docs/protocol.md`` describes them in prose.

A message is the first frame of several; tensor bytes are frames of their own. Fields are sent as an array in
the order written here: a new field goes last, with a default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from zenps.codecs.base import CodecName, ValueForm
from zenps.observe.lateness import MOST_RANKS
from zenps.schemes.base import PullCodec

Role = Literal["worker", "server"]
Dtype = Literal["float16", "bfloat16", "float32", "float64", "int64", "uint8"]
FailureKind = Literal["mismatch", "deadline", "lost", "size"]
Kind = Literal["dense", "sparse", "blocks"]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
LAST_BARRIER = (1 << 62) - 1
"""The number of the barrier before workers leave. It is not counted, as a worker may reach it early."""
Incarnation = Count
"""Of a scheduler: a random number that each of its processes draws. 0: not known."""
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
MAX_NAME = 1024
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=16384)]
Host = Annotated[str, Meta(max_length=255)]
Address = Annotated[str, Meta(max_length=300)]
"""``host:port``, of a server's data socket with ``tcp://`` before it; empty if there is none."""
# A row is moved as one NumPy item, which holds less than 2 GiB; so does a frame.
MAX_COLUMNS = (1 << 28) - 1
SEAL_BYTES = 32
MAX_WAIT = 1200  # characters of what a worker waits for
Fragment = Annotated[int, Meta(ge=0, lt=1 << 15)]
"""Which fragment of a chunk a message is, in order of position."""
Fragments = Annotated[int, Meta(ge=1, le=1 << 15)]
"""In how many messages the rows of a chunk travel from the same sender."""
Load = Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=32)]
"""Numbers that a node reports with each heartbeat, for ``zenps status``."""
Late = Annotated[dict[Rank, float], Meta(max_length=MOST_RANKS)]
"""Seconds that others have waited, by the rank that they waited for."""
Shared = tuple[Count, Count]
"""Values that are no frame of the message: their offset in the sender's shared memory, and their bytes."""


class Member(Struct, frozen=True, array_like=True):
    """One node of the cluster."""

    role: Role
    rank: Rank
    host: Host
    pid: Count
    address: Address
    """Of a server's data socket."""
    metrics: Address
    """Of its Prometheus endpoint."""
    identity: Annotated[bytes, Meta(max_length=255)] = b""
    """A worker's public identity. Servers accept a rank's pushes only from one that begins so."""

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (host {self.host}, pid {self.pid})"


# ── node → scheduler ────────────────────────────────────────────────────────────────────────────


class Register(Struct, frozen=True, array_like=True, tag="register"):
    """The first message of a worker or server."""

    role: Role
    rank: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    """The requested rank (torchrun's ``RANK``), or -1 for any."""
    host: Host
    pid: Count
    address: Address
    metrics: Address
    settings: dict[str, str | int | float]
    """A worker's shared settings. They must equal the scheduler's, or ranks would shard differently."""
    generation: Count = 0
    """How often torchrun has restarted the workers. A newer generation replaces all older ones."""
    restarts: Count = 0
    """How often torchrun may still restart them."""
    barriers: Count = 0
    """How many barriers a worker has passed."""
    view: View | None = None
    """The newest view of a node that was a member before this scheduler started."""


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Renews the lease."""

    epoch: Count
    """The newest that the node has applied."""
    load: Load
    late: Late = {}
    """Of a server: the workers that its rounds have waited for longest, and how long in all."""
    watermark: Count = 0
    """Of a worker: all rounds that were in flight when it received this watermark have ended."""
    clock_ns: Count = 0
    """The sender's clock. The answer repeats it."""
    waits_for: Annotated[str, Meta(max_length=MAX_WAIT)] = ""
    """Of a worker: its longest wait for others, such as ``barrier``; empty if it does not wait."""
    waited_seconds: float = 0.0
    """How long that wait has lasted."""
    incarnation: Incarnation = 0
    """Of the scheduler at which the node has registered last; 0 before its first view."""


class Barrier(Struct, frozen=True, array_like=True, tag="barrier"):
    """A worker has reached its ``sequence``-th barrier and waits for all others."""

    sequence: Count


class Admit(Struct, frozen=True, array_like=True, tag="admit"):
    """A worker ends a step with nothing in flight, and waits until joining workers are admitted."""

    since: Count
    """The :attr:`View.admitted` of its view."""


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    """The node leaves the cluster."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """From ``zenps drain``: a server should leave. Needs no registration."""

    rank: Rank


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """From ``zenps launch``: a node's process has ended. Needs no registration; the answer is ``Status``."""

    role: Role
    rank: Rank
    host: Host


class StatusRequest(Struct, frozen=True, array_like=True, tag="status?"):
    """From ``zenps status``; needs no registration."""


# ── scheduler → node ────────────────────────────────────────────────────────────────────────────


class View(Struct, frozen=True, array_like=True, tag="view"):
    """Membership and ring of one epoch. Servers get it first, and workers once all servers have it."""

    epoch: Count
    rank: Rank
    """Of the receiver."""
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    owners: Annotated[bytes, Meta(min_length=8192, max_length=8192)]
    """The rank of the server that owns each of the 4096 slots, uint16 little-endian."""
    ring_epoch: Count
    """The epoch in which this ring (servers and owners) began. Workers and servers name it in messages."""
    left: tuple[Rank, ...] = ()
    """Those of ``workers`` that have left. Rounds that they have not pushed cannot end."""
    admitted: Count = 0
    """The epoch in which joining workers were last admitted. Workers count steps from 0 since then."""
    seal: Annotated[bytes, Meta(max_length=SEAL_BYTES)] = b""
    """Of the scheduler, by which its successor knows the view again; empty without keys."""
    incarnation: Incarnation = 0


class SharedView(Struct, frozen=True, array_like=True, tag="shared view"):
    """A view. It follows in a frame of its own, which is the same for all nodes of a role."""

    rank: Rank
    """Of the receiver. The view in the frame has rank 0."""


class WhoAreYou(Struct, frozen=True, array_like=True, tag="register?"):
    """The scheduler does not know the receiver, which has to register (again)."""

    incarnation: Incarnation = 0


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The node cannot be part of the cluster."""

    kind: Literal["mismatch", "deadline", "usage", "lost"]
    reason: Text


class HeartbeatReply(Struct, frozen=True, array_like=True, tag="heartbeat!"):
    """The answer to a heartbeat."""

    watermark: Count = 0
    """One more than the watermark that every worker has reported."""
    joining: Count = 0
    """How many workers wait to be admitted."""
    heartbeat_ns: Count = 0
    """The ``clock_ns`` of that heartbeat."""
    clock_ns: Count = 0
    """The scheduler's clock."""
    incarnation: Incarnation = 0


class BarrierReply(Struct, frozen=True, array_like=True, tag="barrier!"):
    """All workers have reached the barrier, or ``error`` says which have not."""

    sequence: Count
    error: Text
    incarnation: Incarnation = 0


class Departed(Struct, frozen=True, array_like=True, tag="departed"):
    """A member is gone: ``lost`` if its lease ran out, else it left."""

    member: Member
    lost: bool
    reason: Text


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """To a server that is no longer needed: leave."""


class DrainReply(Struct, frozen=True, array_like=True, tag="drain!"):
    """The server owns no slots any more, or ``error`` says why it keeps them."""

    error: Text


class NodeStatus(Struct, frozen=True, array_like=True):
    """A line of ``zenps status``."""

    role: Literal["scheduler", "worker", "server"]
    rank: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    host: Host
    pid: Count
    address: Address
    metrics: Address
    epoch: Count
    state: Text
    slots: Count
    silent_seconds: float
    """Since its last message. It is lost when this exceeds the lease."""
    load: Load
    late_seconds: float = 0.0
    """How long others have waited for this worker."""
    rates: Load = {}
    """The increase of the counters of ``load``, per second."""


class Change(Struct, frozen=True, array_like=True):
    """A change of the state of the job, or of some nodes."""

    seconds_ago: float
    who: Text
    state: Text
    epoch: Count


class Status(Struct, frozen=True, array_like=True, tag="status!"):
    """The cluster as the scheduler sees it."""

    job: Text
    state: Text
    epoch: Count
    lease_seconds: float
    settings: dict[str, str | int | float]
    nodes: tuple[NodeStatus, ...]
    uptime_seconds: float = 0.0
    """Of this scheduler."""
    page: Address = ""
    owners: Annotated[bytes, Meta(max_length=8192)] = b""
    """As in :class:`View`; empty before the first."""
    changes: tuple[Change, ...] = ()
    """The latest, newest first."""
    stall: Text = ""
    """What each worker waits for, if one has waited for longer than ``cluster.stall_seconds``; else empty."""


# ── worker → server ─────────────────────────────────────────────────────────────────────────────


class Push(Struct, frozen=True, array_like=True, tag="push"):
    """One rank's contribution to one chunk of one round, and the request for its result.

    Frames: envelope, positions (by ``codec``, relative to the chunk), values ``[rows, columns]``. The
    positions frame of a dense chunk is empty, and ``rows`` is ``span``, or 0 from a rank that takes part
    without contributing. The positions frame of blocks also says which come next (:mod:`zenps.wire.blocks`).
    """

    ring_epoch: Count
    """Of the ring by which the tensor was sharded."""
    rank: Rank
    tensor: Name
    step: Count
    chunk: Count
    chunks: Annotated[int, Meta(ge=1, lt=1 << 32)]
    """How many chunks the worker divides each server's shard into."""
    kind: Kind
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    """Of the whole tensor; the same on all ranks."""
    span: Count
    """The number of positions in this chunk."""
    columns: Annotated[int, Meta(ge=0, le=MAX_COLUMNS)]
    rows: Count
    codec: CodecName | Literal["none"]
    average: bool
    again: bool = False
    """True if the round began under an older ring: ranks that have ended it have to push it again."""
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
    """The caller's tensor, in words, if it travels in another form: the same on all ranks."""

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
    """If not -1: the rank may push others, but has no such chunk, which the server has asked for."""


class Here(Struct, frozen=True, array_like=True, tag="here"):
    """The first message on a connection, and again with each view: the server can send to this worker."""


class Hello(Struct, frozen=True, array_like=True):
    """To a server of the same host by a Unix socket, with the descriptor of the worker's arena."""

    job: Text
    identity: Annotated[bytes, Meta(max_length=255)]
    """The worker's public identity."""


# ── server → worker ─────────────────────────────────────────────────────────────────────────────


class ChunkReply(Struct, frozen=True, array_like=True):
    """The base of all answers of a server: which chunk of which round it means."""

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


ToScheduler = Register | Heartbeat | Barrier | Admit | Leave | StatusRequest | Drain | Ended
FromScheduler = (
    View
    | SharedView
    | WhoAreYou
    | Refused
    | HeartbeatReply
    | BarrierReply
    | Departed
    | Stop
    | Status
    | DrainReply
)
ToServer = Push | GiveUp | Here
FromServer = Result | Failure | Busy | Resume | Resend | Wanted
