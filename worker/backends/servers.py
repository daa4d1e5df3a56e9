"""A worker among others: cuts tensors into rounds, by the layout that all ranks share."""

from __future__ import annotations

import socket as net
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.codecs.values import RUN
from zenps.config.settings import Config, shared_settings
from zenps.errors import PeerLostError, UsageError, ZenPSError, listing
from zenps.observe import metrics
from zenps.observe.clock import now_ns
from zenps.observe.metrics import WorkerMetrics
from zenps.observe.trace import open_trace
from zenps.partition.strategies.registry import strategy
from zenps.schemes.registry import over_servers
from zenps.wire.blocks import PHASES
from zenps.wire.messages import Push, View
from zenps.wire.scheduler_link import new_register
from zenps.wire.tensors import dtype_name

from ..core.communicator import Communicator, Pending
from ..core.handle import Handle, Progress, Recorder
from ..core.spans import Spans
from ..core.statistics import Statistics
from ..core.streaming import StreamedHandle
from ..encode.blocks import BlockTransfer
from ..encode.gpu import StagedBlocks
from ..encode.gpu_queue import Staging
from ..encode.planner import Transfers
from ..encode.streams import LONGEST_NAME, stream_name
from ..encode.transfer import EncodedChunk, EncodedTensor, Transfer
from ..encode.transforms import Converted
from ..rounds.states import Outgoing, Round
from ..rounds.steps import Steps
from ..rounds.tracker import PATIENCE_SECONDS
from ..transport.lease import Session
from ..transport.memory import free_a_large_block


class How(NamedTuple):
    """How a tensor is summed.

    Attributes:
        average: whether the sum is divided by the number of ranks.
        stands_for: the other ranks of this host whose parts are in this one's.
        priority: among what waits for the network, where the scheme has priorities.
    """

    average: bool
    stands_for: tuple[int, ...] = ()
    priority: int = 0


class Cluster(Communicator):
    """Joins the cluster that ``config`` names.

    Args:
        config: all settings; the shared ones must equal the scheduler's.
        rank: the rank to ask for, or None for any.
        local_rank: the rank on this machine, or None to count by host name.

    Raises:
        DeadlineError, MismatchError, UsageError: as :meth:`SchedulerLink.join`.
        ConfigError: the partition strategy cannot be made.
    """

    def __init__(self, config: Config, rank: int | None, local_rank: int | None) -> None:
        self._config = config
        self._scheme = over_servers(config.sync.scheme)
        free_a_large_block()
        strategy(config.sync.partition)  # refuses a wrong one before anybody is told of this worker
        registry = CollectorRegistry()
        self._metrics = WorkerMetrics(registry)
        self._exporter = metrics.serve(registry, config.metrics.host, config.metrics.port)
        self._spans = Spans()
        try:
            self._spans = Spans(open_trace(config.sync.trace, "worker"))
            address, shared = self._exporter.address, shared_settings(config)
            register = new_register("worker", rank, "", address, shared)
            self._session = Session(config, register, self._metrics, self._spans)
        except BaseException:  # Ctrl-C while others are waited for, too: a later init() wants the port
            self._let_go()
            raise
        view = self._session.view
        self._statistics = Statistics(self._metrics, self._scheme.partition or config.sync.partition)
        self.stats = self._statistics.stats
        self.bucket_bytes = config.sync.bucket_bytes
        self.run = RUN if config.sync.values == "int8" else 1
        self.rank = view.rank
        self._metrics.set_rank(view.rank)
        self.is_elastic = config.cluster.is_elastic
        self.is_joining = view.admitted > 0
        self._admitted = view.admitted
        self._know(view)
        self.local_rank = self._here.index(self.rank) if local_rank is None else local_rank

        self._transfers = Transfers(config)
        self._staging = Staging()
        self._timeout_seconds = config.cluster.patience_seconds + 2 * PATIENCE_SECONDS
        self._steps = Steps(self._metrics.steps.inc)
        self._session.start(self._statistics.load, self._follow, self._reshard_round)

    def push_pull_async(
        self,
        tensor: Tensor,
        name: str,
        *,
        average: bool,
        contributes: bool = True,
        is_gradient: bool = False,
        priority: int = 0,
    ) -> Pending:
        """Compacts and pushes on this thread; libzmq's own moves the bytes.

        What lies on a GPU is pushed later, when the GPU has got so far and this worker is called again.
        """
        handle, back = self._push(
            tensor, name, How(average, (), priority), contributes, is_gradient, self._statistics.record
        )
        return handle if back is None else Converted(handle, back)

    def _push(
        self,
        tensor: Tensor,
        name: str,
        how: How,
        contributes: bool,
        is_gradient: bool,
        record: Recorder,
    ) -> tuple[Handle, Callable[[Tensor], Tensor] | None]:
        """Begins a round; with what makes its result what the caller expects, where that is not the same."""
        if self.is_joining:
            raise self._too_early(f"tensor {name!r}")
        plan = self._transfers.plan(tensor)
        names = plan.streams if plan else 1
        if plan and len(name) > LONGEST_NAME:
            reason = f"expected at most {LONGEST_NAME} characters, for its streams have longer names"
            raise UsageError(f"tensor name {name!r:.60}: {reason}")
        previous, progress = self._steps.begin(name, names)
        begin_ns = now_ns()
        try:
            tensor, back = self._transfers.convert(tensor)
            expected_rows = previous.pulled_rows if previous else 0
            with self._spans("compact", name, progress.step) as span:
                transfer = self._transfers.begin(tensor, name, expected_rows, contributes, is_gradient)
                if span:
                    span.note(rows=transfer.rows_given)
        except BaseException:  # Ctrl-C too: a name in flight for ever could not be pushed again
            self._steps.take_back(name, previous)
            raise
        handle, begin = self._handle(name, progress, transfer, how, record, plan is not None)

        def push() -> None:
            progress.compacted_seconds = time.perf_counter() - progress.began
            if transfer.is_staged:
                self._spans.trace.since(begin_ns, "stage", tensor=name, step=progress.step)
            handle.pushed()
            self._session.channel.submit(begin(), handle)

        def fail(error: ZenPSError) -> None:
            self._steps.take_back(name, previous)
            handle.fail(error)

        if transfer.is_staged:
            self._staging.add(transfer, push, fail)
        else:
            push()
            self._staging.advance(until=0.0)
        return handle, back

    def _handle(
        self,
        name: str,
        progress: Progress,
        transfer: Transfer,
        how: How,
        record: Recorder,
        in_streams: bool,
    ) -> tuple[Handle, Callable[[], list[Round]]]:
        """What the caller gets, and what makes its rounds once the transfer is prepared."""
        waiting = self._wait, self._timeout_seconds, record, self._spans
        if in_streams:
            assert isinstance(transfer, BlockTransfer | StagedBlocks)
            new_round = partial(self._phase, name, progress.step, transfer, how)
            handle = StreamedHandle(name, progress, transfer, new_round, *waiting)
            return handle, handle.begin
        return Handle(name, progress, transfer, *waiting), lambda: [
            self._round(name, progress.step, transfer, how)
        ]

    def barrier(self) -> None:
        """As :meth:`Session.barrier`."""
        if self.is_joining:
            raise self._too_early("barrier")
        with self._spans("barrier"):
            self._push_staged()
            self._session.barrier()

    def admit(self) -> None:
        """As :meth:`Session.admit`."""
        self._push_staged()
        self._session.admit()

    def has_joining_workers(self) -> bool:
        """As the scheduler's last answer to a heartbeat says."""
        return self._session.joining > 0

    def close(self, *, together: bool = False) -> None:
        """As :meth:`Session.close`, and frees the metrics port."""
        self._session.close(together=together)
        self._let_go()

    def _let_go(self) -> None:
        self._spans.trace.close()
        self._exporter.close()

    def _wait(self, ready: Callable[[], bool], until: float) -> None:
        """What other ranks wait for is pushed before this one waits itself."""
        self._staging.advance(until)
        self._session.channel.wait(ready, until)

    def _push_staged(self) -> None:
        """Before a wait that is not for a tensor: others may wait for what a device here has not prepared."""
        self._staging.advance(time.monotonic() + self._timeout_seconds)

    def _too_early(self, what: str) -> UsageError:
        return UsageError(
            f"{what}: worker {self.rank} has come to a running job, whose state it has not got yet; "
            "construct zenps.TrainingState before"
        )

    def _negotiate(self, table: Tensor, name: str) -> Handle:
        """A round that is a part of one among workers: it is not counted."""
        return self._push(
            table, name, How(average=False), contributes=True, is_gradient=False, record=lambda *_: None
        )[0]

    def _await_loss(self, is_over: Callable[[], bool] = lambda: False) -> ZenPSError | None:
        """What has become of a rank that cannot be reached, once the scheduler has found out."""
        session = self._session
        until = time.monotonic() + self._config.cluster.lease_seconds + PATIENCE_SECONDS
        session.channel.wait(lambda: bool(session.failure or session.view.left or is_over()), until)
        gone = [worker for worker in session.view.workers if worker.rank in session.view.left]
        return session.failure or (PeerLostError(f"{listing(gone)} left the job") if gone else None)

    def _follow(self, view: View) -> None:
        owners = np.frombuffer(view.owners, dtype="<u2").astype(np.uint16)
        self._transfers.set_ring(view.ring_epoch, owners, [server.rank for server in view.servers])
        self._metrics.epoch.set(view.epoch)
        self._know(view)
        if view.admitted > self._admitted:
            self._admitted = view.admitted
            self._steps.reset()

    def _know(self, view: View) -> None:
        self.ranks = tuple(worker.rank for worker in view.workers)
        self.size = len(self.ranks)
        self._here = [worker.rank for worker in view.workers if worker.host == net.gethostname()]
        self.local_size = len(self._here)

    def _round(self, name: str, step: int, transfer: Transfer, how: How) -> Round:
        sent = transfer.sent = self._placed(transfer.sent)
        return Round(name, step, sent.cut.epoch, self._pushes(name, step, sent, how), sent)

    def _phase(
        self, name: str, step: int, transfer: Transfer, how: How, phase: int, part: EncodedChunk
    ) -> Round:
        """A phase of a stream."""
        sent = self._transfers.place(name, transfer.sent, part)
        name, step = stream_name(name, part.chunk), step * PHASES + phase
        return Round(name, step, sent.cut.epoch, self._pushes(name, step, sent, how), sent)

    def _reshard_round(self, round_: Round) -> tuple[EncodedTensor, list[Outgoing]]:
        assert isinstance(round_.sent, EncodedTensor)
        sent = self._placed(self._transfers.reshard(round_.tensor, round_.sent))
        _, push, _, priority = round_.outgoing[0]
        how = How(push.average, push.stands_for, priority)
        return sent, self._pushes(round_.tensor, round_.step, sent, how, round_.again)

    def _placed(self, sent: EncodedTensor) -> EncodedTensor:
        """The same, where the servers can read it best."""
        if sent.cut.layout is None or not self._session.channel.shares_memory:
            return sent
        place = self._session.channel.place
        parts = [structs.replace(part, frames=place(part.server, part.frames)) for part in sent.parts]
        return structs.replace(sent, parts=parts)

    def _pushes(
        self, name: str, step: int, sent: EncodedTensor, how: How, again: bool = False
    ) -> list[Outgoing]:
        shape, dtype = tuple(sent.shape), dtype_name(sent.dtype)
        return [
            Outgoing(
                part.server,
                Push(
                    ring_epoch=sent.cut.epoch,
                    rank=self.rank,
                    tensor=name,
                    step=step,
                    chunk=part.chunk,
                    chunks=sent.cut.chunks,
                    kind=sent.kind,
                    dtype=dtype,
                    shape=shape,
                    span=part.span,
                    columns=sent.columns,
                    rows=part.rows,
                    codec=part.codec,
                    average=how.average,
                    again=again,
                    answer=self._scheme.pull_codec,
                    values=sent.values,
                    stands_for=how.stands_for,
                ),
                part.frames,
                how.priority,
            )
            for part in sent.parts
        ]
