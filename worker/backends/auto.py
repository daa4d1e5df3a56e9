"""Automatic backend: sends each sparse tensor over servers or peers, whichever costs less by prediction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
from msgspec import Struct

from zenps.schemes.base import Scheme
from zenps.schemes.traffic import Links

from ..core.pending import Pending, in_flight
from ..core.request import Request, table_shape
from ..core.statistics import Progress
from .base import Backend, Session
from .choice import Choice, Table
from .peers.backend import PeerBackend
from .servers import ServerBackend

logger = logging.getLogger("zenps.worker")


class _Chosen(Struct):
    """A sparse tensor's choice, and its latest round until that round is noted."""

    choice: Choice
    table: Table | None = None
    progress: Progress | None = None


class AutoBackend(Backend):
    """Dense tensors go over servers, which sum in rank order; sparse ones follow their :class:`Choice`.

    Args:
        session: this worker's connections to the cluster.
        candidates: the schemes to choose from.
        servers, peers: the backends that run them, in this order.
    """

    def __init__(
        self,
        session: Session,
        candidates: Sequence[Scheme],
        servers: ServerBackend,
        peers: PeerBackend,
    ) -> None:
        self.partition = servers.partition
        self._session = session
        self._servers = servers
        self._peers = peers
        self._candidates = candidates
        self._chosen: dict[str, _Chosen] = {}
        """By name. The limit of a job's names bounds it."""
        self._choosing = threading.Lock()
        self._links = self._agree_on_links()

    def begin(self, request: Request) -> Pending:
        tensor, name, options = request
        if not (tensor.is_sparse and options.is_reduction):
            return self._servers.begin(request)
        chosen = self._choose(name)
        scheme = chosen.choice.scheme
        backend = self._servers if scheme is self._candidates[0] else self._peers
        pending = backend.begin(request)
        chosen.table, chosen.progress = Table(*table_shape(tensor), tensor.dtype.itemsize), pending.progress
        # Only once the round has begun: a refused name does not count towards the limit of a job's names.
        self._chosen[name] = chosen
        self._session.metrics.chosen_rounds.labels(scheme=scheme.name).inc()
        return pending

    def residual_name(self, request: Request) -> str | None:
        return self._servers.residual_name(request)

    def close(self) -> None:
        self._peers.close()

    def _choose(self, name: str) -> _Chosen:
        """Notes the latest round of the tensor ``name`` and returns its choice.

        Raises:
            UsageError: the latest round has not ended.
        """
        before = self._chosen.get(name)
        if before is not None and (progress := before.progress) is not None and not progress.ended:
            # Perhaps its answer has come, and no thread has received it.
            self._servers.poll(lambda: progress.ended)
        with self._choosing:
            chosen = self._chosen.get(name) or _Chosen(Choice(self._links, self._candidates))
            table, latest = chosen.table, chosen.progress
            if table is None or latest is None:
                return chosen
            if not latest.ended:
                raise in_flight(name)
            # Each round is noted once, even if the next push is refused.
            chosen.progress = None
        if latest.has_failed:
            chosen.choice.reset()
            return chosen
        change = chosen.choice.note(table, latest.pushed_rows, latest.pulled_rows)
        if change is not None and self._session.rank == 0:
            logger.info(
                "tensor %r: %s from now on, not %s: %.3g ms predicted, not %.3g, for %.0f rows of each rank "
                "and %.0f of all",
                name,
                change.after.name,
                change.before.name,
                1000 * change.after_seconds,
                1000 * change.before_seconds,
                chosen.choice.pushed,
                chosen.choice.union,
            )
        return chosen

    def _agree_on_links(self) -> Links:
        """Returns the cluster as rank 0 sees it: ranks may see different servers if one is lost meanwhile."""
        view, sync, size = self._session.lease.view, self._session.config.sync, self._session.size
        servers = len(view.servers)
        is_beside = {server.host for server in view.servers} <= {worker.host for worker in view.workers}
        if servers == size and is_beside:
            servers = 0
        own = torch.tensor([servers if self._session.rank == 0 else 0], device="cpu")
        return Links(
            workers=size,
            servers=int(self._servers.negotiate(own, "peers/servers").wait()),
            bytes_per_second=sync.bandwidth_mbit * 1e6 / 8,
            latency_seconds=sync.latency_us / 1e6,
        )
