"""The process group over which workers exchange among themselves: torch.distributed's gloo.

It is always one of our own. The collectives of a group have one order, and those that the script itself, or
DDP, runs on a group of theirs come on other threads.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zenps.errors import ZenPSError

# As gloo's own. Only ranks that are known to be alive are waited for here, and none that is still computing.
MOST_SECONDS = 1800.0

# A tag of messages; all that are sent have tag 0.
_NEVER_SENT = 1


class GroupError(ZenPSError):
    """A rank cannot be reached any more, or nothing came in time. The group is of no use after.

    Attributes:
        rank: of the other one; -1 where gloo does not say.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.detail}" if self.rank >= 0 else self.detail


class Group(ABC):
    """Some ranks that exchange tensors, which lie on the CPU and are contiguous.

    To be used by one thread, but for :meth:`abort`.

    Attributes:
        rank, size: this one's place among how many.
        sent_bytes, received_bytes: of tensors, so far.
    """

    rank: int
    size: int
    sent_bytes: int = 0
    received_bytes: int = 0

    @abstractmethod
    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        """Sends to some ranks, and receives from some, all at once; returns when all of it is done.

        Args:
            send: for each receiver what it gets, in this order.
            receive: for each sender where to put what it sends; of the same number of bytes.

        Raises:
            GroupError: a rank is gone.
        """

    @abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Sums over all ranks, in place; the same bits on all of them, in an order of its own.

        Raises:
            GroupError: a rank is gone.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends whatever waits in here with an error. May be called from any thread, and again."""


Share = Callable[[bytes], Sequence[bytes]]
"""What every rank has given, by rank. All ranks call it equally often."""


class GlooGroup(Group):
    """Over TCP, each rank connected to each.

    Args:
        rank, size: this one's place among how many.
        host: an address of this machine, on which gloo listens, and by which the others reach it.
        share: by which ranks learn of one another's addresses.

    Raises:
        GroupError: the ranks cannot reach one another, or ``host`` is none of this machine.
    """

    def __init__(self, rank: int, size: int, host: str, share: Share) -> None:
        self.rank, self.size = rank, size
        kind: Any = dist.ProcessGroupGloo  # what torch annotates of it is not all that it has
        options = kind._Options()
        options._timeout = timedelta(seconds=MOST_SECONDS)
        try:
            options._devices = [kind.create_device(hostname=host)]
            self._gloo = kind(_Addresses(share), rank, size, options)
        except RuntimeError as error:
            raise GroupError(-1, f"gloo on {host}: {_first_sentence(error)}") from error

    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        works = []
        for peers, act in ((receive, self._gloo.recv), (send, self._gloo.send)):
            for peer, tensors in peers.items():
                # Once a connection is known to be closed, gloo says so here already.
                with _lost(peer):
                    # Neither side sends what it knows to be empty.
                    works += [(peer, act([tensor], peer, 0)) for tensor in tensors if tensor.numel()]
        for peer, work in works:
            with _lost(peer):
                work.wait()
        self.sent_bytes += _bytes(send)
        self.received_bytes += _bytes(receive)

    def allreduce(self, tensor: Tensor) -> None:
        with _lost(-1):
            self._gloo.allreduce([tensor]).wait()
        # Of a ring, which is what gloo makes of it.
        moved = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.sent_bytes += moved
        self.received_bytes += moved

    def abort(self) -> None:
        # gloo has no such call. But once one wait has run out of time, it closes all connections of a group;
        # of a rank whose connection is broken already it waits for none.
        for rank in range(self.size):
            if rank != self.rank:
                with contextlib.suppress(RuntimeError):
                    work = self._gloo.recv([torch.empty(1, device="cpu")], rank, _NEVER_SENT)
                    work.wait(timedelta(milliseconds=1))


class _Addresses(dist.Store):  # type: ignore[misc, name-defined]  # it is there, though not annotated
    """torch's store, as far as gloo asks for one: a key by each rank, set at once and read by all."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._share = share
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        for shared in self._share(key.encode() + b"\0" + value):
            name, _, address = shared.partition(b"\0")
            self._values[name.decode()] = address

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """There is nothing to wait for: :meth:`set` returns when all ranks have set theirs."""


@contextlib.contextmanager
def _lost(peer: int) -> Iterator[None]:
    """What gloo raises says that ``peer`` is gone; -1: some rank."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError(peer, _first_sentence(error)) from error


def _bytes(tensors: Mapping[int, Sequence[Tensor]]) -> int:
    return sum(tensor.nbytes for some in tensors.values() for tensor in some)


def _first_sentence(error: RuntimeError) -> str:
    """Without the source file before, and advice after."""
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error)).split(". ")[0].splitlines()[0]
