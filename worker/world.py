"""World of a worker: its rank, the world size, requests, barrier and admission."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from msgspec import structs
from prometheus_client import CollectorRegistry

from zenps.buffers import BufferPool
from zenps.codecs.values import RUN
from zenps.config.settings import Config
from zenps.config.sources import kernel_threads
from zenps.errors import TensorError, UsageError, ZenPSError
from zenps.finalizers import release_finalizers
from zenps.kernels.factory import make_kernels
from zenps.observe.metrics import WorkerMetrics

from .backends.base import Backend, Session
from .backends.peers.averager import GroupAverager
from .backends.servers import ServerBackend
from .core.interrupts import MASK
from .core.memory import POOL_BYTES
from .core.pending import Pending
from .core.request import NARROW, Request, check_request, describe, wire_name
from .core.spans import Spans
from .core.statistics import Progress, Statistics, Stats
from .core.transfer import SuppliedTransfer, outside_inference_mode
from .core.waiting import Notifier, Waiting
from .encode.sparse import coalesced
from .recorder import Recorder
from .sparsify.sparsification import Sparsification


class World(ABC):
    """All workers of a job, as seen by one of them.

    Attributes:
        rank: from 0.
        local_rank: among the workers of this host.
        bucket_bytes: the size of a bucket of fused dense gradients.
        quantized_run: elements of a dense gradient that are quantized by a common scale; 1 if values are not
            quantized by runs.
        sparsification: of dense gradients; None if they are pushed whole.
        keeps_residuals: True if, by the settings, a part of each gradient stays behind until its next push.
        spans: for a timeline.
        statistics: of this worker.
        partition: the partition strategy in use, or ``none``.
        staleness: how many steps later than they are pushed gradients are applied.
        averages_models: True if optimizers average models instead of gradients.
        averager: averages models within groups of workers; None if there is no other worker to average with.
        full_size: the world size while no worker is lost; every rank is below it.
        is_elastic: True if training continues after the loss of workers, and new workers may join.
        is_joining: True if this worker has joined a running job and has not got its state yet.
    """

    rank: int
    local_rank: int
    bucket_bytes: int
    quantized_run: int
    sparsification: Sparsification | None
    keeps_residuals: bool
    spans: Spans
    statistics: Statistics
    partition: str
    staleness: int
    averages_models: bool
    averager: GroupAverager | None
    full_size: int
    is_elastic: bool
    is_joining: bool

    @property
    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """Ranks of the present workers; without losses 0, 1, …, ``size`` - 1."""

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.ranks)

    @property
    @abstractmethod
    def local_size(self) -> int:
        """The number of workers on this host."""

    @property
    @abstractmethod
    def is_distributed(self) -> bool:
        """True if there is a cluster."""

    def stats(self) -> Stats:
        """Returns a copy of the statistics so far."""
        return structs.replace(self.statistics.stats, partition=self.partition)

    @abstractmethod
    def begin(self, request: Request) -> Pending:
        """Begins to synchronise a tensor.

        Raises:
            UsageError: the name is in flight, too many names were used, or this worker is joining.
            TensorError: the tensor cannot be synchronised.
        """

    @abstractmethod
    def residual_name(self, request: Request) -> str | None:
        """Returns the name under which a gradient's residual is kept; None if all of it is pushed. The answer
        is the same on all ranks, even on ranks that have no residual.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all workers."""

    @abstractmethod
    def has_joining_workers(self) -> bool:
        """Returns whether workers wait to be admitted. Ranks may know different answers."""

    @abstractmethod
    def admit(self) -> None:
        """Waits until all workers have called this; admits joining workers. Nothing may be in flight."""

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Leaves for good; ``together`` first waits a moment for the others."""


class LocalWorld(World):
    """``python train.py`` without a cluster: a world of one worker."""

    rank = local_rank = 0
    ranks = (0,)
    local_size = full_size = 1
    is_distributed = False
    bucket_bytes = quantized_run = 1
    is_elastic = is_joining = False
    sparsification = None
    keeps_residuals = False
    spans = Spans()
    partition = "none"
    staleness = 0
    averages_models = False
    averager = None

    def __init__(self, config: Config) -> None:
        self.statistics = Statistics(WorkerMetrics(CollectorRegistry()))
        self._kernels = make_kernels(BufferPool(POOL_BYTES), config.kernels.backend, kernel_threads(config))
        self._waiting = Waiting(Notifier(), 0.0, self.statistics, self.spans)

    def begin(self, request: Request) -> Pending:
        check_request(request)
        with outside_inference_mode():
            return _begin(self._reduce, request)

    def _reduce(self, request: Request) -> Pending:
        """Copies a dense tensor; coalesces a sparse one, on the CPU in order of occurrence."""
        tensor, name, options = request
        if not tensor.is_sparse:
            total = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            total = coalesced(tensor, self._kernels)
            if not tensor.is_cpu and tensor.is_coalesced():  # then torch returns the tensor itself
                total = total.clone()
        progress = Progress(0, ended=True)
        return Pending(name, options, SuppliedTransfer(total), progress, self._waiting, counted="nothing")

    def residual_name(self, request: Request) -> str | None:
        return None

    def barrier(self) -> None:
        """Does nothing: there are no other workers."""

    def has_joining_workers(self) -> bool:
        return False

    def admit(self) -> None:
        """Does nothing: no worker can join."""

    def close(self, *, together: bool = False) -> None:
        """Does nothing: there is no cluster."""


class ClusterWorld(World):
    """The workers of a cluster.

    Args:
        session: this worker's connections to the cluster.
        servers: the backend whose tensors may wait for a GPU.
        backend: for all requests.
        averager: of models, or None.
        recorder: for ``zenps plan``, or None.
        local_rank: the rank on this host, or None to count by host name.
        opened: everything that was opened for this worker; closed once the lease has ended.

    Attributes:
        has_reduced: True once a floating-point tensor was pushed that is neither a broadcast nor one number.
    """

    is_distributed = True

    def __init__(
        self,
        session: Session,
        servers: ServerBackend,
        backend: Backend,
        averager: GroupAverager | None,
        recorder: Recorder | None,
        local_rank: int | None,
        opened: ExitStack,
    ) -> None:
        config, view = session.config, session.lease.view
        self.rank = view.rank
        self.is_joining = view.admitted > 0
        self.is_elastic = config.cluster.is_elastic
        # Of an elastic job, the view may lack lost workers; of another one, the configuration may be another.
        self.full_size = config.cluster.workers if self.is_elastic else len(view.workers)
        self.bucket_bytes = config.sync.bucket_bytes
        self.quantized_run = RUN if config.sync.values == "int8" else 1
        self.sparsification = session.sparsification
        self.keeps_residuals = self.sparsification is not None or config.sync.values != "same"
        self.spans, self.statistics = session.spans, session.statistics
        self.partition = backend.partition
        self.averages_models = config.sync.consistency == "ds-sync"
        self.averager = averager
        self.staleness = config.sync.staleness if config.sync.consistency == "ssp" else 0
        self._session, self._servers, self._backend = session, servers, backend
        self._recorder = recorder
        self._opened = opened
        self.has_reduced = False
        self.local_rank = session.ranks_here.index(self.rank) if local_rank is None else local_rank

    @property
    def ranks(self) -> Sequence[int]:
        return tuple(worker.rank for worker in self._session.lease.view.workers)

    @property
    def local_size(self) -> int:
        return len(self._session.ranks_here)

    def begin(self, request: Request) -> Pending:
        check_request(request)
        if self.is_joining:
            raise self._too_early(f"tensor {request.name!r}")
        # Messages of ZenPS between ranks, as those before a broadcast, are integers; a loss is one number.
        if request.options.is_reduction:
            self.has_reduced |= request.tensor.is_floating_point() and request.tensor.numel() > 1
            if self._recorder is not None:
                self._recorder.note(request.tensor, request.name)
        if (name := wire_name(request.name)) is not request.name:
            request = request._replace(name=name)
        # With MASK, a name that is taken is either pushed or given back.
        with MASK, outside_inference_mode():
            try:
                return _begin(self._backend.begin, request)
            except ZenPSError:
                raise
            except RuntimeError as error:  # torch raises it if a device fails, or lacks memory
                raise TensorError(f"tensor {name!r}: {error}") from error

    def residual_name(self, request: Request) -> str | None:
        return self._backend.residual_name(request._replace(name=wire_name(request.name)))

    def barrier(self) -> None:
        """As :meth:`Lease.barrier`."""
        if self.is_joining:
            raise self._too_early("barrier")
        with self._session.spans("barrier"):
            self._push_staged()
            self._session.lease.barrier()

    def has_joining_workers(self) -> bool:
        """Returns whether workers wait to be admitted, as the scheduler's last answer to a heartbeat says."""
        return self._session.lease.joining > 0

    def admit(self) -> None:
        """As :meth:`Lease.admit`."""
        self._push_staged()
        self._session.lease.admit()

    def close(self, *, together: bool = False) -> None:
        """As :meth:`Lease.close`; then closes connections to other workers, metrics and sockets."""
        self._session.lease.close(together=together)
        self._opened.close()
        release_finalizers()

    def _push_staged(self) -> None:
        """Pushes tensors that a device still prepares; others may wait for these while this rank waits."""
        self._servers.flush(time.monotonic() + self._session.timeout_seconds)

    def _too_early(self, what: str) -> UsageError:
        return UsageError(
            f"{what}: worker {self.rank} has joined a running job and has not got its state yet; "
            "construct zenps.TrainingState before"
        )


def _begin(begin: Callable[[Request], Pending], request: Request) -> Pending:
    """Begins a round. Narrow integers are summed as int64, and the sum is cast back: it wraps as in torch.

    Averages of integers and bool are float64, as by torch's ``/``.
    """
    tensor, name, options = request
    dtype = tensor.dtype
    is_divided = options.average and not dtype.is_floating_point
    if not options.is_reduction or not (is_divided or dtype in NARROW):
        return begin(request)
    tensor = tensor.detach()
    if tensor.is_sparse and dtype == torch.bool:
        tensor = tensor.coalesce()  # a logical or of duplicates, because their sum as numbers could exceed 1
    wide = tensor.to(torch.float64 if is_divided else torch.int64)
    options = structs.replace(options, given=options.given or describe(tensor))
    pending = begin(Request(wide, name, options))
    if not is_divided:
        pending.convert_result(lambda total: total.to(dtype))
    return pending
