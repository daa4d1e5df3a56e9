"""A worker among others that takes for each sparse tensor the scheme that suits it."""

from __future__ import annotations

import logging
import threading

import torch
from msgspec import Struct
from torch import Tensor

from zenps.config.settings import Config
from zenps.schemes.registry import AUTO
from zenps.schemes.traffic import (
    Links,
)

from ..core.communicator import Pending, in_flight
from ..core.handle import Progress
from ..encode.transfer import table_shape
from ..encode.transforms import Converted
from .choice import Choice, Table
from .peers.backend import PeerCluster
from .servers import Cluster, How

logger = logging.getLogger("zenps.worker")


class _Chosen(Struct):
    """A sparse tensor: its choice, and its latest round until that is noted."""

    choice: Choice
    table: Table | None = None
    progress: Progress | None = None


class AutoCluster(PeerCluster):
    """Joins the cluster as :class:`PeerCluster` does. Dense tensors go over servers, where they are added in
    rank order; sparse ones as their :class:`Choice` says.

    Raises:
        PeerLostError: as for :class:`PeerCluster`.
    """

    def __init__(self, config: Config, rank: int | None, local_rank: int | None) -> None:
        super().__init__(config, rank, local_rank)
        self.stats.partition = config.sync.partition
        self._chosen: dict[str, _Chosen] = {}
        """By name, and so as many as the names that a job may use."""
        self._choosing = threading.Lock()
        try:
            self._links = self._agree_on_links()
        except BaseException:  # Ctrl-C while others are waited for, too
            self.close()
            raise

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
        """As :class:`Cluster` or :class:`PeerCluster` does it, by the scheme of this round."""
        if not tensor.is_sparse:
            return Cluster.push_pull_async(
                self,
                tensor,
                name,
                average=average,
                contributes=contributes,
                is_gradient=is_gradient,
                priority=priority,
            )
        chosen = self._choose(name)
        if chosen.choice.scheme == AUTO[0]:
            handle, back = self._push(
                tensor, name, How(average), contributes, is_gradient, self._statistics.record
            )
            pending: Pending = handle if back is None else Converted(handle, back)
            progress = handle.progress
        else:
            pending, progress = self._exchange(tensor, name, average)
        chosen.table, chosen.progress = Table(*table_shape(tensor), tensor.dtype.itemsize), progress
        # Not before: a name that was refused is none of those that a job may use.
        self._chosen[name] = chosen
        self._metrics.chosen_rounds.labels(scheme=chosen.choice.scheme).inc()
        return pending

    def _choose(self, name: str) -> _Chosen:
        """What is chosen for the tensor ``name``, after its latest round.

        Raises:
            UsageError: that has not ended.
        """
        with self._choosing:
            chosen = self._chosen.get(name) or _Chosen(Choice(self._links))
            table, latest = chosen.table, chosen.progress
            if table is None or latest is None:
                return chosen
            if not latest.ended:
                raise in_flight(name)
            # Noted once, even if what is pushed next is refused.
            chosen.progress = None
        change = chosen.choice.note(table, latest.pushed_rows, latest.pulled_rows)
        if change is not None and self.rank == 0:
            logger.info(
                "tensor %r: %s from now on, not %s: %.3g ms predicted, not %.3g, for %.0f rows of each rank "
                "and %.0f of all",
                name,
                change.after,
                change.before,
                1000 * change.after_seconds,
                1000 * change.before_seconds,
                chosen.choice.pushed,
                chosen.choice.union,
            )
        return chosen

    def _agree_on_links(self) -> Links:
        """The cluster as rank 0 sees it: a server may be lost while others get here."""
        view, sync = self._session.view, self._config.sync
        servers = len(view.servers)
        is_beside = {server.host for server in view.servers} <= {worker.host for worker in view.workers}
        if servers == self.size and is_beside:
            servers = 0
        own = torch.tensor([servers if self.rank == 0 else 0], device="cpu")
        return Links(
            workers=self.size,
            servers=int(self._negotiate(own, "peers/servers").wait()),
            bytes_per_second=sync.bandwidth_mbit * 1e6 / 8,
            latency_seconds=sync.latency_us / 1e6,
        )
