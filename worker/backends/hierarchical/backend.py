"""A worker among others, on two levels: the ranks of a host reduce there, before one of them pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zenps.buffers import BufferPool
from zenps.config.settings import Config
from zenps.errors import PeerLostError, UsageError, listing
from zenps.kernels.cpu import CpuKernels
from zenps.wire.arena import Arena

from ...core.communicator import Pending
from ...core.handle import Handle, Progress
from ...core.statistics import Moved
from ...encode.planner import SPLIT_FROM_BYTES
from ...encode.streams import LONGEST_NAME
from ...encode.transfer import Transfer
from ...encode.transforms import Converted
from ...transport.memory import POOL_BYTES
from ..peers.group import MOST_SECONDS
from ..servers import Cluster, How
from .follower import Follower
from .leader import Leader
from .link import Link, LinkError, Listener, connect
from .rounds import HostRounds
from .transfer import HostRound

# Of what the leaders push: under the tensor's own name the ranks meet.
SUFFIX = "@hosts"

# Longer than any address of a listener.
ADDRESS_BYTES = 64


class HostCluster(Cluster):
    """Joins the cluster as :class:`Cluster` does, and the other ranks of its host, who do so at this point.

    Raises:
        PeerLostError: ranks with one host name do not share memory, or one was lost meanwhile.
    """

    def __init__(self, config: Config, rank: int | None, local_rank: int | None) -> None:
        super().__init__(config, rank, local_rank)
        workers = self._session.view.workers
        host = next(worker.host for worker in workers if worker.rank == self.rank)
        ranks = [worker.rank for worker in workers if worker.host == host]
        self._rounds: HostRounds | None = None
        self._links: Sequence[Link] = ()
        if len({worker.host for worker in workers}) == len(workers):
            return  # there is nobody to reduce with, on any host
        self._arena = Arena(POOL_BYTES)
        try:
            self._links = self._connect(host, ranks)
        except BaseException:  # Ctrl-C while others are waited for, too
            super().close()
            self._arena.close()
            raise
        self._rounds = self._new_rounds(ranks)
        self._rounds.start()
        self._session.on_failure = self._rounds.fail
        if self._session.failure is not None:
            self._rounds.fail(self._session.failure)

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
        """Compacts or copies on this thread. Broadcasts and small dense tensors go as on one level."""
        is_small = not tensor.is_sparse and tensor.nbytes < SPLIT_FROM_BYTES
        if self._rounds is None or is_small or tensor.dtype == torch.uint8:
            return super().push_pull_async(
                tensor,
                name,
                average=average,
                contributes=contributes,
                is_gradient=is_gradient,
                priority=priority,
            )
        longest = LONGEST_NAME - len(SUFFIX)
        if len(name) > longest:
            reason = f"expected at most {longest} characters, for leaders push it under a longer name"
            raise UsageError(f"tensor name {name!r:.60}: {reason}")
        device = tensor.device
        pending: Pending = self._rounds.begin(tensor.detach().cpu(), name, average, is_gradient, priority)
        return pending if device.type == "cpu" else Converted(pending, lambda result: result.to(device))

    def close(self, *, together: bool = False) -> None:
        """As :meth:`Cluster.close`; connections to the other ranks of this host are closed last."""
        super().close(together=together)
        if self._rounds is not None:
            self._rounds.close()
            for link in self._links:
                link.close()
            self._arena.close()

    def _connect(self, host: str, ranks: Sequence[int]) -> Sequence[Link]:
        """The leader's links to the others, or another rank's to the leader."""
        leader, *others = ranks
        listener = Listener() if self.rank == leader else None
        try:
            table = torch.zeros((self.size, ADDRESS_BYTES), dtype=torch.uint8, device="cpu")
            if listener is not None:
                own = torch.frombuffer(bytearray(listener.address), dtype=torch.uint8)
                table[self.rank, : len(own)] = own
            address = bytes(self._negotiate(table, "hosts/addresses").wait()[leader].tolist())
            if listener is not None:
                return listener.accept(self.rank, self._arena.fd, others)
            return [connect(b"\0" + address.strip(b"\0"), self.rank, self._arena.fd, leader)]
        except LinkError as error:
            raise PeerLostError(
                f"workers {listing(ranks)} have the host name {host}, but worker {self.rank} does not reach "
                f"the others there: {error}; give machines and containers names of their own, or set "
                "sync.levels = 1"
            ) from error
        finally:
            if listener is not None:
                listener.close()

    def _new_rounds(self, ranks: Sequence[int]) -> HostRounds:
        channel, pool = self._session.channel, BufferPool(POOL_BYTES)
        common = (
            self.rank,
            self.size,
            self._arena,
            self._negotiate,
            channel.wait,
            channel.wake,
            self._record_host,
            self._timeout_seconds + MOST_SECONDS,
            CpuKernels(pool),
            pool,
            self._metrics,
            self._spans,
        )
        if self.rank != ranks[0]:
            (link,) = self._links
            return Follower(link, lambda: self._await_loss(self._is_over), *common)
        self._stands_for = tuple(ranks[1:])
        return Leader(self._links, self._push_for_host if len(ranks) < self.size else None, *common)

    def _is_over(self) -> bool:
        return self._rounds is None or self._rounds.is_over

    def _push_for_host(
        self, round_: HostRound, tensor: Tensor
    ) -> tuple[Handle, Callable[[Tensor], Tensor] | None]:
        # What was narrow travels as the wide sum that it is now, and not narrowed again.
        is_gradient = round_.is_gradient and round_.form.dtype == tensor.dtype
        how, record = How(round_.average, self._stands_for, round_.priority), partial(self._note, round_)
        return self._push(tensor, round_.name + SUFFIX, how, True, is_gradient, record)

    def _note(
        self, round_: HostRound, transfer: Transfer, progress: Progress, waited: float, worked: float
    ) -> None:
        """What crossed the network for this host."""
        round_.pushed_bytes, round_.pulled_bytes = transfer.pushed_bytes, progress.pulled_bytes
        self._statistics.record_pulled(transfer, progress, worked)

    def _record_host(self, round_: HostRound, waited: float) -> None:
        """Counts a round that is done."""
        moved = Moved(round_.pushed_bytes, round_.pulled_bytes, round_.dense_bytes)
        self._statistics.count(moved, round_.began, round_.compacted_seconds, waited)
