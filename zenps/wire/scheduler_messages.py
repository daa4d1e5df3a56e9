"""Messages between nodes and the scheduler, by direction. ``docs/protocol.md`` describes them in prose.

Fields are sent as those of :mod:`.messages`: a new one goes last, with a default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .fields import MAX_WAIT, SEAL_BYTES, Address, Count, Host, Incarnation, Late, Load, Rank, Role, Text


class Member(Struct, frozen=True, array_like=True):
    """One node of the cluster."""

    role: Role
    rank: Rank
    host: Host
    pid: Count
    address: Address
    """The address of a server's data socket."""
    metrics: Address
    """The address of its Prometheus endpoint."""
    identity: Annotated[bytes, Meta(max_length=255)] = b""
    """The node's public identity, another one for each process. Servers accept a rank's pushes only from
    identities that begin with a worker's, and workers are told none of a worker."""

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
    """The shared settings of a worker, or of a server. They must equal the scheduler's, or ranks would shard
    differently."""
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
    """The epoch of the newest view that the node has applied."""
    load: Load
    late: Late = {}
    """From a server: the workers that its rounds have waited for longest, and how long in all."""
    watermark: Count = 0
    """From a worker: all rounds that were in flight when it received this watermark have ended."""
    clock_ns: Count = 0
    """The sender's clock. The answer repeats it."""
    waits_for: Annotated[str, Meta(max_length=MAX_WAIT)] = ""
    """From a worker: its longest wait for others, such as ``barrier``; empty if it does not wait."""
    waited_seconds: float = 0.0
    """How long that wait has lasted."""
    incarnation: Incarnation = 0
    """The incarnation of the scheduler at which the node has registered last; 0 before its first view."""


class Barrier(Struct, frozen=True, array_like=True, tag="barrier"):
    """A worker has reached its ``sequence``-th barrier and waits for all others."""

    sequence: Count
    admitted: Count = 0
    """The :attr:`View.admitted` of its view: the worker counts barriers from 0 since then."""


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
    """The receiver's."""
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
    """Made by the scheduler, so that its successor recognises the view; empty without keys."""
    incarnation: Incarnation = 0
    origin: Incarnation = 0
    """The incarnation of the scheduler that began the job: jobs of one name have different origins."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The workers that had not left, and the servers."""
        return *(worker for worker in self.workers if worker.rank not in self.left), *self.servers


class SharedView(Struct, frozen=True, array_like=True, tag="shared view"):
    """A view. It follows in a frame of its own, which is the same for all nodes of a role."""

    rank: Rank
    """The receiver's. The view in the frame has rank 0."""


class WhoAreYou(Struct, frozen=True, array_like=True, tag="register?"):
    """The scheduler does not know the receiver, which must register (again)."""

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
    admitted: Count = 0
    """That of the :class:`Barrier`."""


class Departed(Struct, frozen=True, array_like=True, tag="departed"):
    """A member is gone: it was ``lost``, or it has left."""

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
    """For how long this scheduler has run."""
    page: Address = ""
    """The address of the status page; empty if it is not served."""
    owners: Annotated[bytes, Meta(max_length=8192)] = b""
    """As in :class:`View`; empty before the first."""
    changes: tuple[Change, ...] = ()
    """The latest, newest first."""
    stall: Text = ""
    """What each worker waits for, if one has waited for longer than ``cluster.stall_seconds``; else empty."""


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
