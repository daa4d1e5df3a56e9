"""All ranks of a group in one process, a thread each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from zenps.worker.transport.peer_group import Group

DEADLINE_SECONDS = 30.0

T = TypeVar("T")
Queues = list[list["SimpleQueue[Tensor]"]]


class LocalGroup(Group):
    """One rank of it; what it sends goes through ``queues[sender][receiver]``."""

    def __init__(self, rank: int, queues: Queues) -> None:
        self.rank, self.size = rank, len(queues)
        self._queues = queues

    def exchange(self, send: Mapping[int, Sequence[Tensor]], receive: Mapping[int, Sequence[Tensor]]) -> None:
        for receiver, tensors in send.items():
            for tensor in tensors:
                assert tensor.is_contiguous()
                self.sent_bytes += tensor.nbytes
                self._queues[self.rank][receiver].put(tensor.clone())
        for sender, tensors in receive.items():
            for tensor in tensors:
                got = self._queues[sender][self.rank].get(timeout=DEADLINE_SECONDS)
                assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
                tensor.copy_(got)

    def post(self, send: Mapping[int, Tensor]) -> None:
        self.exchange({rank: [tensor] for rank, tensor in send.items()}, {})

    def allreduce(self, tensor: Tensor) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        parts = {rank: tensor.clone() for rank in range(self.size)}
        own = parts[self.rank]
        self.exchange({rank: [own] for rank in others}, {rank: [parts[rank]] for rank in others})
        tensor.copy_(sum(parts.values(), torch.zeros((), dtype=tensor.dtype)))

    def abort(self) -> None:
        """Nothing waits longer than its deadline."""


def on_all_ranks(size: int, call: Callable[[Group], T]) -> list[T]:
    """What ``call`` returns on each of ``size`` ranks; nothing may be left unread."""
    queues: Queues = [[SimpleQueue() for _ in range(size)] for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(lambda rank: call(LocalGroup(rank, queues)), range(size)))
    assert all(queue.empty() for row in queues for queue in row)
    return results
