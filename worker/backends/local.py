"""``python train.py`` without a cluster: size 1, nothing is sent, results are as in a cluster of one."""

from __future__ import annotations

from torch import Tensor

from zenps.buffers import BufferPool
from zenps.kernels.cpu import CpuKernels

from ..core.communicator import Communicator, Pending, Stats
from ..encode.sparse import coalesced


class _Ready(Pending):
    def __init__(self, name: str, result: Tensor) -> None:
        self.name = name
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._result


class Alone(Communicator):
    """A world of one worker."""

    rank = local_rank = 0
    size = local_size = 1
    bucket_bytes = 1
    run = 1
    ranks = (0,)
    is_elastic = is_joining = False

    def __init__(self) -> None:
        self.stats = Stats()
        self._kernels = CpuKernels(BufferPool(keep_bytes=1 << 28))

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
        """A copy of a dense tensor; a sparse one coalesced, on the CPU in order of occurrence."""
        if not tensor.is_sparse:
            return _Ready(name, tensor.detach().clone())
        return _Ready(name, coalesced(tensor, self._kernels))

    def barrier(self) -> None:
        """Nobody to wait for."""

    def has_joining_workers(self) -> bool:
        """Nobody can come."""
        return False

    def admit(self) -> None:
        """Nobody to let in."""

    def close(self, *, together: bool = False) -> None:
        """Nothing to leave."""
