"""Every message that crosses the network, by direction. ``docs/protocol.md`` is its prose.

A message is the envelope of a frame list; tensor bytes never go inside one. Fields are sent as an
array in the order written here: a new field goes last, with a default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from zenps.codecs.base import CodecName, ValueForm
from zenps.observe.lateness import MOST_RANKS
from zenps.schemes.base import PullCodec as Answer

Role = Literal["worker", "server"]
Dtype = Literal["float16", "bfloat16", "float32", "float64", "int64", "uint8"]
FailureKind = Literal["mismatch", "deadline", "lost"]
Kind = Literal["dense", "sparse", "blocks"]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Text = Annotated[str, Meta(max_length=16384)]
Host = Annotated[str, Meta(max_length=255)]
Address = Annotated[str, Meta(max_length=300)]
# A row is moved as one NumPy item, and those hold less than 2 GiB; so does a frame.
MAX_COLUMNS = (1 << 28) - 1
# What a row of a sparse tensor counts for beside its values, when chunks are cut and bounded.
POSITION_BYTES = 8
# Those of one host.
MOST_STOOD_FOR = 1024
Load = Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=32)]
"""What a node reports of itself with each heartbeat, for ``zenps status``."""
Late = Annotated[dict[Rank, float], Meta(max_length=MOST_RANKS)]
"""How many seconds others have waited for each of some ranks."""
Shared = tuple[Count, Count]
"""Values that are no frame of a message, for its receiver reads them in the sender's memory: where, and how
many bytes."""


class Member(Struct, frozen=True, array_like=True):
    """One node of the cluster, as every other node knows it."""

    role: Role
    rank: Rank
    host: Host
    pid: Count
    address: Address
    """Where workers reach a server's data socket, ``tcp://host:port``; empty for a worker."""
    metrics: Address
    """``host:port`` of its Prometheus endpoint; empty if it has none."""
    identity: Annotated[bytes, Meta(max_length=255)] = b""
    """Its routing identity: a server takes a rank's pushes from this peer alone."""

    def __str__(self) -> str:
        return f"{self.role} {self.rank} (host {self.host}, pid {self.pid})"


# ── node → scheduler ────────────────────────────────────────────────────────────────────────────


class Register(Struct, frozen=True, array_like=True, tag="register"):
    """The first message of a worker or server."""

    role: Role
    rank: Annotated[int, Meta(ge=-1, lt=1 << 16)]
    """The rank that it wants (torchrun's ``RANK``), or -1 for any."""
    host: Host
    pid: Count
    address: Address
    metrics: Address
    settings: dict[str, str | int | float]
    """A worker's shared settings: they must equal the scheduler's, or ranks would cut tensors differently."""
    generation: Count = 0
    """How often torchrun has restarted the workers. A newer generation takes the place of all older ones."""
    restarts: Count = 0
    """How often torchrun may still do so."""
    barriers: Count = 0
    """How many barriers a worker has passed."""
    view: View | None = None
    """The newest that the node has: it was a member before this scheduler began."""


class Heartbeat(Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Renews the lease. ``epoch`` is the newest that the node has applied."""

    epoch: Count
    load: Load
    late: Late = {}
    """A server's: the workers that its rounds have waited for longest, and how long in all."""
    watermark: Count = 0
    """A worker's: all rounds that were in flight when it heard of this watermark have ended."""
    clock_ns: Count = 0
    """The sender's clock when it was sent. The answer repeats it."""


LAST_BARRIER = (1 << 62) - 1
"""The number of the barrier before workers leave: not counted, for one may come to it early."""


class Barrier(Struct, frozen=True, array_like=True, tag="barrier"):
    """A worker waits for all others at its ``sequence``-th barrier."""

    sequence: Count


class Admit(Struct, frozen=True, array_like=True, tag="admit"):
    """A worker is at the end of a step, has nothing in flight, and waits for joining workers to be let in."""

    since: Count
    """The :attr:`View.admitted` that it has."""


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    """The node goes, cleanly."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """From ``zenps drain``: a server shall leave. Needs no registration."""

    rank: Rank


class StatusRequest(Struct, frozen=True, array_like=True, tag="status?"):
    """From ``zenps status``; needs no registration."""


# ── scheduler → node ────────────────────────────────────────────────────────────────────────────


class View(Struct, frozen=True, array_like=True, tag="view"):
    """Membership and ring of one epoch. Servers get it first; workers once all servers have it."""

    epoch: Count
    rank: Rank
    """The receiver's own."""
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    owners: Annotated[bytes, Meta(min_length=8192, max_length=8192)]
    """The rank of the server that owns each of the 4096 slots, uint16 little-endian."""
    ring_epoch: Count
    """The epoch since when servers and owners are these. Messages between worker and server name it."""
    left: tuple[Rank, ...] = ()
    """Those of ``workers`` that have left: rounds that they have not pushed cannot end."""
    admitted: Count = 0
    """The epoch in which joining workers were let in last: workers count from 0 since then."""


class WhoAreYou(Struct, frozen=True, array_like=True, tag="register?"):
    """The scheduler does not know the sender, which has to register (again)."""


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The node cannot be part of the cluster."""

    kind: Literal["mismatch", "deadline", "usage", "lost"]
    reason: Text


class HeartbeatReply(Struct, frozen=True, array_like=True, tag="heartbeat!"):
    """The scheduler is there, and has heard the node."""

    watermark: Count = 0
    """One more than what every worker has reported."""
    joining: Count = 0
    """How many workers wait to be let in."""
    heartbeat_ns: Count = 0
    """The ``clock_ns`` of the heartbeat that this answers."""
    clock_ns: Count = 0
    """The scheduler's clock when it was answered."""


class BarrierReply(Struct, frozen=True, array_like=True, tag="barrier!"):
    """All workers came to the barrier, or ``error`` says which did not."""

    sequence: Count
    error: Text


class Departed(Struct, frozen=True, array_like=True, tag="departed"):
    """A member is gone: ``lost`` when its lease ran out, else it left."""

    member: Member
    lost: bool
    reason: Text


class Stop(Struct, frozen=True, array_like=True, tag="stop"):
    """To a server that nobody needs any more: leave."""


class DrainReply(Struct, frozen=True, array_like=True, tag="drain!"):
    """The server has no slots any more, or ``error`` says why it keeps them."""

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
    """Since its last message; compare with the lease."""
    load: Load
    late_seconds: float = 0.0
    """How long others have waited for this worker."""
    rates: Load = {}
    """How fast the counters of ``load`` rise, per second."""


class Change(Struct, frozen=True, array_like=True):
    """What became of the job, or of some nodes."""

    seconds_ago: float
    who: Text
    state: Text
    """Of the job, or of a node, from then on."""
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
    """``host:port`` of the status page; empty if there is none."""
    owners: Annotated[bytes, Meta(max_length=8192)] = b""
    """As in :class:`View`; empty before the first."""
    changes: tuple[Change, ...] = ()
    """The latest, newest first."""


# ── worker → server ─────────────────────────────────────────────────────────────────────────────


class Push(Struct, frozen=True, array_like=True, tag="push"):
    """One rank's part of one chunk of one round, and the request for its result.

    Frames: envelope, positions (by ``codec``, relative to the chunk), values ``[rows, columns]``.
    A dense chunk has no positions frame bytes and ``rows`` is ``span``, or 0 from a rank that
    takes part without contributing. Of blocks, the positions frame also says which come next
    (:mod:`zenps.wire.blocks`).
    """

    ring_epoch: Count
    """Of the ring by which the tensor was sharded."""
    rank: Rank
    tensor: Name
    step: Count
    chunk: Count
    chunks: Annotated[int, Meta(ge=1, lt=1 << 32)]
    """How many chunks the worker cuts each server's range into."""
    kind: Kind
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Meta(max_length=64)]
    """Of the whole tensor: ranks must agree on it."""
    span: Count
    """Positions in this chunk."""
    columns: Annotated[int, Meta(ge=0, le=MAX_COLUMNS)]
    rows: Count
    codec: CodecName | Literal["none"]
    average: bool
    again: bool = False
    """Whether the round began under an older ring: others may have ended it, and have to push it again."""
    answer: Answer = "auto"
    """How the union's positions shall travel."""
    values: ValueForm = "same"
    """In which form the values travel, here and in the result; but for ``same``, ``dtype`` is float32."""
    stands_for: Annotated[tuple[Rank, ...], Meta(max_length=MOST_STOOD_FOR)] = ()
    """The other ranks of its host whose parts are in this one: they push none."""
    shared: Shared | None = None
    """Where the values lie, if not in a frame."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose parts it has."""
        return self.rank, *self.stands_for


class Hello(Struct, frozen=True, array_like=True):
    """By a Unix socket to a server of the same host; the descriptor of the sender's memory comes with it."""

    job: Text
    identity: Annotated[bytes, Meta(max_length=255)]
    """The worker's routing identity."""


# ── server → worker ─────────────────────────────────────────────────────────────────────────────


class ChunkReply(Struct, frozen=True, array_like=True):
    """Which chunk of which round a server speaks of."""

    ring_epoch: Count
    tensor: Name
    step: Count
    chunk: Count


class Result(ChunkReply, frozen=True, array_like=True, tag="result"):
    """The union of all ranks' rows of one chunk, summed in rank order. Frames as for a push."""

    rows: Count
    codec: CodecName | Literal["none"]
    pushed: Count = 0
    """How many rows all ranks together have pushed: ``rows`` of each, added up."""
    shared: Shared | None = None
    """Where the values lie, if not in a frame."""


class Failure(ChunkReply, frozen=True, array_like=True, tag="failure"):
    """The round cannot be answered, now or later."""

    kind: FailureKind
    reason: Text


class Busy(ChunkReply, frozen=True, array_like=True, tag="busy"):
    """Over its byte budget, the server dropped the push; it will send ``Resume``."""


class Resume(ChunkReply, frozen=True, array_like=True, tag="resume"):
    """There is room now for the push that got ``Busy``: send it again."""


class Resend(ChunkReply, frozen=True, array_like=True, tag="resend"):
    """The push arrived damaged, and was dropped: send it again."""


class Wanted(ChunkReply, frozen=True, array_like=True, tag="wanted"):
    """A round that others have ended lacks the receiver's push, who may be one of them."""


ToScheduler = Register | Heartbeat | Barrier | Admit | Leave | StatusRequest | Drain
FromScheduler = (
    View | WhoAreYou | Refused | HeartbeatReply | BarrierReply | Departed | Stop | Status | DrainReply
)
ToServer = Push
FromServer = Result | Failure | Busy | Resume | Resend | Wanted
