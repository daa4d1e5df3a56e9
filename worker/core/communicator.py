"""What the public functions speak to: a cluster, or this process alone."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from torch import Tensor

from zenps.errors import UsageError

# Half a character: Python's str may hold one, UTF-8 may not.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Stats(msgspec.Struct, kw_only=True):
    """What this worker has synchronised since :func:`zenps.init`."""

    partition: str = "none"
    """The strategy in use; ``none`` without a cluster, and where workers exchange among themselves."""
    rounds: int = 0
    peer_rounds: int = 0
    """Those of ``rounds`` that workers have exchanged among themselves."""
    pushed_bytes: int = 0
    """Positions and values pushed to servers, or sent to other workers."""
    pulled_bytes: int = 0
    """Positions and values pulled, or received from other workers."""
    dense_bytes: int = 0
    """What pushing and pulling the same tensors whole would have moved."""
    wait_seconds: float = 0.0
    """Spent waiting for servers, on the threads that asked for results."""
    work_seconds: float = 0.0
    """Spent on compaction before, and on scatter after."""
    busiest_rows: int = 0
    """Sparse rows pushed to the busiest server, summed over rounds."""
    mean_rows: float = 0.0
    """Sparse rows pushed to each server on average, summed over rounds."""

    @property
    def imbalance(self) -> float:
        """Busiest server over mean, weighted by rows; 1 is perfect, the number of servers the worst."""
        return self.busiest_rows / self.mean_rows if self.mean_rows else 1.0


class Pending(ABC):
    """A result to come; what the asynchronous calls return."""

    name: str

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`wait` would not wait for the network any more."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The result; raises what went wrong. May be called again, and from any thread."""


class Communicator(ABC):
    """One worker's place among all: identity, rounds and barriers."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    stats: Stats
    bucket_bytes: int
    """Up to where small dense gradients are fused."""
    run: int
    """Elements of a dense gradient that are rounded by a common scale; 1 where each has its own."""
    ranks: Sequence[int]
    """Those of the workers that are present; without losses 0, 1, …, ``size`` - 1."""
    is_elastic: bool
    """Whether workers go on without one that is gone, and let others in."""
    is_joining: bool
    """Whether this worker came to a running job, and has not got its state from the others yet."""

    @abstractmethod
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
        """Begins a round of a checked tensor; one that does not contribute only gets the others' sum.

        A gradient may be rounded on the way, as ``sync.values`` says. Of those that wait for the network, the
        one of the highest priority goes first, where the scheme has priorities.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all workers."""

    @abstractmethod
    def has_joining_workers(self) -> bool:
        """Whether somebody waits to be let in, as far as is known here: not the same on all ranks."""

    @abstractmethod
    def admit(self) -> None:
        """Waits until all workers have called this, and lets joining workers in. Nothing may be in flight."""

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Leaves, perhaps after a moment's wait for the others. It cannot be used afterwards."""


def in_flight(name: str) -> UsageError:
    """The error of a push under a name whose last round has not ended."""
    return UsageError(f"tensor {name!r} is in flight; wait for its handle before pushing it again")


def check_name(name: object) -> None:
    """Refuses a tensor name that could not travel.

    Raises:
        UsageError: not a string of 1 to 1024 characters that UTF-8 can write.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= 1024 or _SURROGATE.search(name):
        raise UsageError(f"tensor name {name!r:.60}: expected a string of 1 to 1024 characters")
