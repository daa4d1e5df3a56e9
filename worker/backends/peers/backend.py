"""A worker among others whose rounds go from worker to worker."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from zenps.config.settings import Config
from zenps.errors import PeerLostError
from zenps.wire.addresses import find_host

from ...core.communicator import Pending
from ...core.handle import Progress
from ...core.statistics import Moved
from ...encode.transforms import Converted
from ..servers import Cluster
from .exchange import Peers
from .group import MOST_SECONDS, GlooGroup, GroupError
from .transfer import PeerRound


class PeerCluster(Cluster):
    """Joins the cluster as :class:`Cluster` does, and connects to all other workers, who do so at this point.

    Servers carry broadcasts, and what ranks tell one another of a tensor before they exchange it.

    Raises:
        PeerLostError: they do not reach one another, or one was lost meanwhile.
    """

    def __init__(self, config: Config, rank: int | None, local_rank: int | None) -> None:
        super().__init__(config, rank, local_rank)
        self.stats.partition = "none"
        try:
            group = self._connect()
        except BaseException:  # Ctrl-C while others are waited for, too
            super().close()
            raise
        channel, session = self._session.channel, self._session
        self._peers = Peers(
            group,
            self._negotiate,
            channel.wait,
            channel.wake,
            self._await_loss,
            self._record_exchange,
            self._timeout_seconds + MOST_SECONDS,
            self._metrics,
            self._spans,
        )
        self._peers.start()
        session.on_failure = self._peers.fail
        if session.failure is not None:
            self._peers.fail(session.failure)

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
        """Compacts or copies on this thread; another exchanges. What lies on a GPU is copied first."""
        if tensor.dtype == torch.uint8:  # a broadcast
            return super().push_pull_async(tensor, name, average=average, contributes=contributes)
        return self._exchange(tensor, name, average)[0]

    def _exchange(self, tensor: Tensor, name: str, average: bool) -> tuple[Pending, Progress]:
        """Begins a round among workers."""
        device = tensor.device
        sent, back = self._transfers.convert(tensor.detach().cpu())
        prepare = partial(self._transfers.sum, sent, average)
        round_ = self._peers.begin(sent, name, average, prepare)
        pending: Pending = round_
        if back is not None:
            pending = Converted(pending, back)
        if device.type != "cpu":
            pending = Converted(pending, lambda result: result.to(device))
        return pending, round_.progress

    def close(self, *, together: bool = False) -> None:
        """As :meth:`Cluster.close`; connections to the other workers are closed last."""
        super().close(together=together)
        self._peers.close()

    def _connect(self) -> GlooGroup:
        calls = itertools.count()

        def share(own: bytes) -> list[bytes]:
            # gloo says 150 bytes, and 8 for each rank.
            table = torch.zeros((self.size, 512 + 16 * self.size), dtype=torch.uint8, device="cpu")
            given = len(own).to_bytes(2) + own
            table[self.rank, : len(given)] = torch.frombuffer(bytearray(given), dtype=torch.uint8)
            rows = self._negotiate(table, f"peers/addresses/{next(calls)}").wait().numpy()
            return [row[2:].tobytes()[: int.from_bytes(row[:2].tobytes())] for row in rows]

        host = self._config.cluster.host or find_host(self._config.cluster.scheduler)
        try:
            return GlooGroup(self.rank, self.size, host, share)
        except GroupError as error:
            raise PeerLostError(
                f"worker {self.rank} and the others do not reach one another: {error}; set cluster.host of "
                "each to an address of its machine that the others reach at any port"
            ) from error

    def _record_exchange(self, round_: PeerRound, waited: float) -> None:
        """Counts a round that is done."""
        sum_ = round_.sum
        moved = Moved(round_.sent_bytes, round_.received_bytes, sum_.dense_bytes)
        self._statistics.count_peer_round()
        self._statistics.count(moved, round_.began, round_.compacted_seconds, waited)
        if sum_.rows_total:
            self._statistics.count_rows(sum_.rows_given, sum_.rows, sum_.pulled_rows, sum_.rows_total)
