"""DDP communication hook: ``DistributedDataParallel`` over ZenPS.

DDP gives a hook one bucket for each sparse parameter (its gradient uncoalesced and not yet divided)
and fused buckets of the dense ones. The hook returns a future of the averaged gradient.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import get_type_hints

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from zenps.errors import UsageError

from ..core.pending import Pending
from ..core.request import Options, Request
from ..core.residuals import Residuals
from ..process import PROCESS


@dataclass(slots=True)
class CommHookState:
    """The first argument of ``register_comm_hook``; one for each wrapped model.

    A process may wrap several models. All ranks must construct their states in the same order.
    """

    dense_group: dist.ProcessGroup | None = None
    """The group whose allreduce averages the dense buckets; None sends them over ZenPS too."""

    _prefix: str = field(default_factory=lambda: PROCESS.new_prefix("ddp"))
    _residuals: Residuals = field(default_factory=Residuals)
    _pushed: set[str] = field(default_factory=set)
    """The names of all buckets so far."""
    _finisher: _Finisher = field(default_factory=lambda: _Finisher())
    _numbers: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Numbers parameters in the order in which they were first seen, which is the same on all ranks."""
    _next_number: itertools.count[int] = field(default_factory=itertools.count)

    def _content(self, bucket: GradBucket) -> str:
        """Returns a hash of the bucket's parameters: DDP rebuilds its dense buckets after the first step."""
        parameters = bucket.parameters()
        for parameter in parameters:
            if parameter not in self._numbers:
                self._numbers[parameter] = next(self._next_number)
        numbers = [self._numbers[parameter] for parameter in parameters]
        return xxhash.xxh3_64_hexdigest(repr(numbers).encode())

    def _is_repeated(self, name: str) -> bool:
        """Returns whether the bucket was pushed before. DDP may never use the first layout again, so that its
        residuals would be lost.
        """
        is_repeated = name in self._pushed
        self._pushed.add(name)
        return is_repeated


def _vectors(bucket: GradBucket) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of the parameters of one dimension, which are never thinned out."""
    ranges, begin = [], 0
    for parameter in bucket.parameters():
        if parameter.dim() <= 1:
            ranges.append((begin, begin + parameter.numel()))
        begin += parameter.numel()
    return tuple(ranges)


class _Finisher:
    """Waits for results and completes the futures that DDP waits for in C++.

    One thread is enough, because results come in the order of the buckets. It is a daemon thread: at exit
    the interpreter joins all others before this worker leaves, and only leaving ends the wait for a result.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Pending, Future[Tensor]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, handle: Pending, result: Future[Tensor]) -> None:
        """Completes ``result`` with the result or error of ``handle``."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_finish_all, args=(self._queue,), name="zenps-ddp", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put((handle, result))


def _finish_all(queue: SimpleQueue[tuple[Pending, Future[Tensor]] | None]) -> None:
    while (work := queue.get()) is not None:
        _finish(*work)
        del work  # do not keep a gradient alive until the next one comes


_default = CommHookState()


def comm_hook(state: CommHookState | None, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket over all ranks: ``ddp.register_comm_hook(CommHookState(), zps.comm_hook)``.

    Args:
        state: ``None`` for one model whose buckets all go over ZenPS.
        bucket: sparse, ``[rows, columns…]`` COO; or dense, ``[n]``; of any dtype of ``push_pull``.
    """
    state = state or _default
    gradient = bucket.buffer()
    if not gradient.is_sparse and state.dense_group is not None:
        gradient.div_(dist.get_world_size(state.dense_group))
        work = dist.all_reduce(gradient, group=state.dense_group, async_op=True)
        averaged: Future[Tensor] = work.get_future().then(lambda reduced: reduced.value()[0])
        return averaged
    name = f"{state._prefix}/{'sparse' if gradient.is_sparse else 'dense'}/{state._content(bucket)}"
    # DDP numbers its buckets in the order in which backward fills them: the last ones hold the first layers.
    options = Options(
        average=True,
        priority=bucket.index(),
        purpose="gradient",
        residuals=state._residuals,
        is_sparsifiable=state._is_repeated(name),
        exact=() if gradient.is_sparse else _vectors(bucket),
    )
    world = PROCESS.world
    if world.staleness or world.averages_models:
        got = "ds-sync" if world.averages_models else f"ssp with sync.staleness = {world.staleness}"
        raise UsageError(
            f"the DDP hook applies averages at once: expected sync.consistency = bsp, got {got}; use bsp, or "
            "DistributedOptimizer"
        )
    if world.sparsification is not None and world.sparsification.kind.takes_momentum:
        raise UsageError(
            f"sync.sparsifier = {world.sparsification.name}: expected DistributedOptimizer, whose momentum "
            "it takes, got the DDP hook; use topk"
        )
    handle = world.begin(Request(gradient, name, options))
    devices: list[int | str | torch.device] | None = [gradient.device] if gradient.is_cuda else None
    result: Future[Tensor] = Future(devices=devices)
    state._finisher.submit(handle, result)
    return result


# DDP compares a hook's annotations with the classes themselves, so they must not be strings.
comm_hook.__annotations__ = get_type_hints(comm_hook)


def _finish(handle: Pending, result: Future[Tensor]) -> None:
    try:
        result.set_result(handle.wait())
    except Exception as error:  # noqa: BLE001  # raised on the thread that waits for the gradient
        result.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a value
