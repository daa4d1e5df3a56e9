"""Process group of all workers: send, receive and allreduce over torch.distributed's gloo.

ZenPS creates its own group. All ranks must call the collectives of a group in one order, and the training
script and DDP call those of their groups on other threads.
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

# gloo's own default. A group only waits for ranks that are known to be alive and that do not compute.
MAX_SECONDS = 1800.0

# A message tag. All messages are sent with tag 0.
_NEVER_SENT = 1


class GroupError(ZenPSError):
    """A rank cannot be reached any more, or sent nothing in time. The group cannot be used afterwards.

    Attributes:
        rank: the other rank; -1 if gloo does not say which.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.detail}" if self.rank >= 0 else self.detail


class Group(ABC):
    """A group of ranks that exchange contiguous tensors on the CPU.

    Only one thread may use it, except for :meth:`abort`.

    Attributes:
        rank, size: this rank, and the number of ranks.
        sent_bytes, received_bytes: of tensors, so far.
    """

    rank: int
    size: int
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @abstractmethod
    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        """Sends to some ranks and receives from others, all at once; returns when all of it is done.

        Args:
            send: for each receiver, the tensors to send, in order.
            receive: for each sender, the tensors to receive into; of the same number of bytes.

        Raises:
            GroupError: a rank was lost.
        """

    @abstractmethod
    def post(self, send: Mapping[int, Tensor]) -> None:
        """Sends a tensor to each of some ranks before the next :meth:`exchange`, which waits for it, too.

        Args:
            send: by receiver; nobody may change the tensors any more.

        Raises:
            GroupError: a rank was lost.
        """

    @abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Sums over all ranks in place. All get the same bits, but the order of addition is unspecified.

        Raises:
            GroupError: a rank was lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends every wait in this group with an error. May be called repeatedly and from any thread."""


Allgather = Callable[[bytes], Sequence[bytes]]
"""Returns what every rank passed to it, by rank. All ranks call it equally often."""


class GlooGroup(Group):
    """A group over TCP, with a connection between each pair of ranks.

    Args:
        rank, size: this rank, and the number of ranks.
        host: an address of this machine, on which gloo listens and other ranks reach it.
        allgather: called to exchange the addresses of all ranks.

    Raises:
        GroupError: the ranks cannot reach one another, or ``host`` is not an address of this machine.
    """

    def __init__(self, rank: int, size: int, host: str, allgather: Allgather) -> None:
        self.rank, self.size = rank, size
        self._posted: list[tuple[int, dist.Work]] = []
        """Receivers of posted tensors, and the sends."""
        kind: Any = dist.ProcessGroupGloo  # torch's annotations leave some of its attributes out
        options = kind._Options()
        options._timeout = timedelta(seconds=MAX_SECONDS)
        try:
            options._devices = [kind.create_device(hostname=host)]
            self._gloo = kind(_Addresses(allgather), rank, size, options)
        except RuntimeError as error:
            raise GroupError(-1, f"gloo on {host}: {_first_sentence(error)}") from error

    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        works, self._posted = self._posted, []
        for peers, act in ((receive, self._gloo.recv), (send, self._gloo.send)):
            for peer, tensors in peers.items():
                # If a connection is known to be closed, gloo raises here already.
                with _lost(peer):
                    # Both sides know which tensors are empty, and skip these.
                    works += [(peer, act([tensor], peer, 0)) for tensor in tensors if tensor.numel()]
        for peer, work in works:
            with _lost(peer):
                work.wait()
        self.sent_bytes += _bytes(send)
        self.received_bytes += _bytes(receive)

    def post(self, send: Mapping[int, Tensor]) -> None:
        for peer, tensor in send.items():
            with _lost(peer):
                self._posted.append((peer, self._gloo.send([tensor], peer, 0)))
            self.sent_bytes += tensor.nbytes

    def allreduce(self, tensor: Tensor) -> None:
        with _lost(-1):
            self._gloo.allreduce([tensor]).wait()
        # gloo runs a ring allreduce.
        moved = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.sent_bytes += moved
        self.received_bytes += moved

    def abort(self) -> None:
        # gloo has no such call. But when a wait times out, it closes all connections of the group. If the
        # connection to a rank is already broken, its wait ends at once without that, so each rank is tried.
        for rank in self.others:
            with contextlib.suppress(RuntimeError):
                work = self._gloo.recv([torch.empty(1, device="cpu")], rank, _NEVER_SENT)
                work.wait(timedelta(milliseconds=1))


class _Addresses(dist.Store):  # type: ignore[misc, name-defined]  # it is there, though not annotated
    """The methods of torch's store that gloo needs: all ranks set one key at the same point and read all."""

    def __init__(self, allgather: Allgather) -> None:
        super().__init__()
        self._allgather = allgather
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        for entry in self._allgather(key.encode() + b"\0" + value):
            name, _, address = entry.partition(b"\0")
            self._values[name.decode()] = address

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Does nothing: :meth:`set` returns when all ranks have set their keys."""


@contextlib.contextmanager
def _lost(peer: int) -> Iterator[None]:
    """Turns errors of gloo into a GroupError of ``peer``; -1: the rank is unknown."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError(peer, _first_sentence(error)) from error


def _bytes(tensors: Mapping[int, Sequence[Tensor]]) -> int:
    return sum(tensor.nbytes for some in tensors.values() for tensor in some)


def _first_sentence(error: RuntimeError) -> str:
    """Drops the source location at the start and the advice at the end."""
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", str(error)).split(". ")[0].splitlines()[0]
