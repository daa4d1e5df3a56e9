"""Settings schema: one frozen tree, :class:`Config`.

Each field has its description, bounds and default, from which ``zenps config``, error messages and
documentation are made. :mod:`zenps.config.values` checks one value, and :mod:`zenps.config.sources` reads the
tree from its sources.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from zenps.codecs.base import ValueForm
from zenps.schemes.refusals import Combination

# Names of the built-in partition strategies and sparsifiers, which are not imported here: they need torch.
PARTITIONS: Final = ("balanced", "centralized", "parallel")
SPARSIFIERS: Final = ("none", "dgc", "exdyna", "micro", "randomk", "threshold", "topk")

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
# A longer limit would be as good as none. Its milliseconds still fit the C int that poll() takes.
WEEK_SECONDS: Final = 7 * 24 * 3600

MAX_WORKERS: Final = 4096
MIN_CHUNK_BYTES: Final = 4 * KIB

MAX_NAMES: Final = 65536
"""The number of different tensor names that a job may use. Workers and servers remember each of them."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes of a job, where they register, and how long they wait for one another."""

    scheduler: Annotated[
        str, Meta(description="'host:port' of the scheduler; empty: no cluster, this worker trains alone")
    ] = ""
    job: Annotated[
        str,
        Meta(description="name of the job; nodes of another job are refused", min_length=1, max_length=64),
    ] = "default"
    workers: Annotated[int, Meta(description="number of workers: the world size", ge=1, le=MAX_WORKERS)] = 1
    servers: Annotated[int, Meta(description="number of servers", ge=1, le=1024)] = 1
    host: Annotated[
        str,
        Meta(
            description="address at which others reach this node; empty: that of the route to the scheduler",
            max_length=255,
        ),
    ] = ""
    server_port: Annotated[
        int, Meta(description="port that a server listens on; 0: any free port", ge=0, le=65535)
    ] = 0
    lease_seconds: Annotated[
        float, Meta(description="a node without a heartbeat for this long is lost", ge=0.1, le=WEEK_SECONDS)
    ] = 10.0
    rendezvous_seconds: Annotated[
        float,
        Meta(
            description="how long to wait for all nodes to register, and for a lost scheduler to return",
            gt=0,
            le=WEEK_SECONDS,
        ),
    ] = 120.0
    rejoin_seconds: Annotated[
        float,
        Meta(
            description="how long scheduler and servers stay when all workers have left, for workers that "
            "[join again](operations.md#joining-again); under zenps launch they stay until the workers' "
            "processes have ended",
            ge=0,
            le=WEEK_SECONDS,
        ),
    ] = 0.0
    deadline_seconds: Annotated[
        float,
        Meta(
            description="how long a push or a barrier waits for a rank that is alive; 0: no deadline",
            ge=0,
            le=WEEK_SECONDS,
        ),
    ] = 0.0
    stall_seconds: Annotated[
        float,
        Meta(
            description="after a wait of this long, the log, the status and a metric say what each worker "
            "[waits for](operations.md#stalls); 0: never",
            ge=0,
            le=WEEK_SECONDS,
        ),
    ] = 45.0
    on_worker_loss: Annotated[
        Literal["fail", "continue"],
        Meta(
            description="what the other workers do when one is lost or leaves: fail, or "
            "[continue without it](operations.md#elastic-workers) (elastic)"
        ),
    ] = "fail"
    server_budget_bytes: Annotated[
        int,
        Meta(description="bytes of pushes and sums above which a server answers busy", ge=MIB, le=TIB),
    ] = 4 * GIB
    max_message_bytes: Annotated[
        int, Meta(description="largest message; a larger one is refused unread", ge=64 * KIB, le=2 * GIB)
    ] = 256 * MIB
    same_host: Annotated[
        Literal["memory", "tcp"],
        Meta(
            description="how workers and servers of one host exchange large tensors: "
            "[shared memory](protocol.md#shared-memory-on-one-host), or tcp"
        ),
    ] = "memory"

    @property
    def is_elastic(self) -> bool:
        """True if the other workers continue when one is lost."""
        return self.on_worker_loss == "continue"

    @property
    def deadline_or_infinity_seconds(self) -> float:
        """``deadline_seconds``, or infinity where there is no deadline."""
        return self.deadline_seconds or math.inf


class SyncConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients are synchronised."""

    scheme: Annotated[
        str,
        Meta(
            description="[how gradients are exchanged](schemes.md); all schemes but zenps and auto have "
            "their own partition and codec; auto: the one that is [predicted to be fastest](schemes.md#auto)"
        ),
    ] = "zenps"
    partition: Annotated[
        str,
        Meta(
            description="strategy that assigns rows to slots: "
            f"{', '.join(PARTITIONS)}, an entry point of zenps.partition, or a dotted path to a strategy"
        ),
    ] = "balanced"
    codec: Annotated[
        Literal["auto", "coo", "bitmap", "delta", "blocks", "dense"],
        Meta(
            description="codec of positions; "
            "auto: [chosen for each chunk by size](encoding.md#position-codecs)"
        ),
    ] = "auto"
    values: Annotated[
        ValueForm,
        Meta(
            description="form in which float32 gradients travel; same: unchanged; any other: "
            "[quantized](schemes.md#quantized-values)"
        ),
    ] = "same"
    chunk_bytes: Annotated[
        int,
        Meta(
            description="size of a tensor's chunks; [less where many workers push](protocol.md#byte-budget)",
            ge=MIN_CHUNK_BYTES,
            le=GIB,
        ),
    ] = 8 * MIB
    bucket_bytes: Annotated[
        int, Meta(description="dense gradients are fused up to this size", ge=KIB, le=GIB)
    ] = 4 * MIB
    granule: Annotated[
        int,
        Meta(description="elements of a one-column tensor that stay together; a power of two", ge=1, le=256),
    ] = 32
    block: Annotated[
        int,
        Meta(
            description="omnireduce: elements in a block, which travels whole or not at all; a power of two",
            ge=1,
            le=4096,
        ),
    ] = 256
    fusion: Annotated[int, Meta(description="omnireduce: the most blocks in a message", ge=1, le=65536)] = 256
    bandwidth_mbit: Annotated[
        int, Meta(description="auto: bandwidth of a host's link in each direction, in Mbit/s", ge=1, le=10**7)
    ] = 10_000
    latency_us: Annotated[int, Meta(description="auto: latency of a message, in µs", ge=0, le=10**7)] = 50
    sparsifier: Annotated[
        str,
        Meta(
            description="[elements of a dense gradient that are pushed](sparsifiers.md); none: all of them; "
            f"{', '.join(SPARSIFIERS[1:])}, an entry point of zenps.sparsifier, or a dotted path to one"
        ),
    ] = "none"
    density: Annotated[
        float, Meta(description="fraction of a dense gradient's elements that each rank pushes", gt=0, le=1)
    ] = 0.01
    consistency: Annotated[
        Literal["bsp", "ssp", "ds-sync"],
        Meta(
            description="[when gradients are applied](consistency.md), and where; bsp: in their own step; "
            "ssp: steps later; ds-sync: on their own worker only, and groups of workers average their models"
        ),
    ] = "bsp"
    staleness: Annotated[
        int, Meta(description="ssp: how many steps later the averages of a step are applied", ge=0, le=64)
    ] = 1
    group: Annotated[
        int, Meta(description="ds-sync: workers that average their models in a step", ge=2, le=MAX_WORKERS)
    ] = 2
    levels: Annotated[
        int,
        Meta(
            description="2: hierarchical reduction: the workers of a host "
            "[reduce there first](schemes.md#hierarchical-reduction), and one of them pushes the sum",
            ge=1,
            le=2,
        ),
    ] = 1
    table_bytes: Annotated[
        int,
        Meta(description="memory limit of a worker's cached permutation tables; 0: no cache", ge=0, le=TIB),
    ] = GIB
    seed: Annotated[
        int,
        Meta(description="key of the permutation; the same on all workers", ge=0, le=(1 << 63) - 1),
    ] = 0x5A454E
    trace: Annotated[
        str,
        Meta(
            description="file for a [timeline](timeline.md) of all roles, such as trace.json; empty: none",
            max_length=4096,
        ),
    ] = ""


class SparsifierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How dense gradients are thinned out, with ``sync.sparsifier``."""

    least_bytes: Annotated[int, Meta(description="smaller tensors are pushed whole", ge=0, le=TIB)] = 64 * KIB
    threshold: Annotated[
        float, Meta(description="threshold: the least magnitude that is pushed", ge=0, le=1e30)
    ] = 0.001
    controller: Annotated[
        Literal["counts", "published"],
        Meta(
            description="exdyna, micro: how they find a threshold; counts: from the counts of all ranks; "
            "published: in small steps, as in the papers"
        ),
    ] = "counts"
    mask_momentum: Annotated[
        Literal["on", "off"], Meta(description="dgc: whether the momentum of pushed elements is cleared")
    ] = "on"
    clip_norm: Annotated[
        float,
        Meta(
            description="dgc: limit of the norm of a rank's dense gradients, × √(world size); 0: none",
            ge=0,
            le=1e30,
        ),
    ] = 0.0
    warmup_steps: Annotated[
        int, Meta(description="dgc: steps in which the density falls to sync.density", ge=0, le=1 << 40)
    ] = 0


class KernelsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows are summed and placed on the CPU. Nodes may differ in these: results have the same bits."""

    backend: Annotated[
        Literal["auto", "native", "torch"],
        Meta(
            description="kernels to use; native: compiled from C when ZenPS was installed; "
            "torch: those of NumPy and torch; auto: native if they were built"
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(
            description="the most threads for one native sum; 0: usable cores ÷ LOCAL_WORLD_SIZE (or 1)",
            ge=0,
            le=1024,
        ),
    ] = 0


class CudaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gradients on a GPU are compacted. Workers may differ in this."""

    compaction: Annotated[
        Literal["sort", "bitmap"],
        Meta(
            description="sort: the same bits on every run; bitmap: duplicates are added in any order, "
            "float32, float16 and bfloat16 only"
        ),
    ] = "sort"


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Authentication and encryption ([how to set up keys](security.md)); with no keys, any peer may join."""

    keys: Annotated[
        str,
        Meta(description="file of all nodes' public keys, keys.toml; empty: no keys", max_length=4096),
    ] = ""
    secret: Annotated[
        str,
        Meta(
            description="file of this node's secret key, or a directory with one file per node",
            max_length=4096,
        ),
    ] = ""


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where this process serves its metrics to Prometheus."""

    host: Annotated[str, Meta(description="address to serve /metrics on", min_length=1, max_length=255)] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        Meta(
            description="port to serve /metrics on; a worker adds its LOCAL_RANK; 0: any free port; -1: off",
            ge=-1,
            le=65535,
        ),
    ] = 0


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the scheduler serves its [status page](operations.md#the-status-page)."""

    host: Annotated[
        str, Meta(description="address to serve the status page on", min_length=1, max_length=255)
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(description="port to serve the status page on; 0: any free port; -1: off", ge=-1, le=65535),
    ] = 0


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this process writes to stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="the least severe level that is written"),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="text: lines for people; json: one object per line, for programs"),
    ] = "text"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one process. Only :func:`zenps.config.sources.load` checks them."""

    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    sync: SyncConfig = msgspec.field(default_factory=SyncConfig)
    sparsifier: SparsifierConfig = msgspec.field(default_factory=SparsifierConfig)
    kernels: KernelsConfig = msgspec.field(default_factory=KernelsConfig)
    cuda: CudaConfig = msgspec.field(default_factory=CudaConfig)
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    metrics: MetricsConfig = msgspec.field(default_factory=MetricsConfig)
    status: StatusConfig = msgspec.field(default_factory=StatusConfig)
    log: LogConfig = msgspec.field(default_factory=LogConfig)

    @property
    def combination(self) -> Combination:
        """The settings that the scheme may refuse."""
        return Combination(
            values=self.sync.values,
            sparsifier=self.sync.sparsifier,
            levels=self.sync.levels,
            on_worker_loss=self.cluster.on_worker_loss,
            keys=self.security.keys,
        )


class Field(NamedTuple):
    """The type, bounds and description of one setting."""

    annotated: Any
    kind: Any
    meta: Meta


def _fields() -> dict[str, Field]:
    table = {}
    for section, struct in get_type_hints(Config).items():
        for name, annotated in get_type_hints(struct, include_extras=True).items():
            kind, meta = get_args(annotated)
            table[f"{section}.{name}"] = Field(annotated, kind, meta)
    return table


FIELDS: Final = _fields()
"""Every setting, by ``section.field``, in the order of declaration."""
