"""``DistributedDataParallel`` over ZenPS: one communication hook.

DDP hands a hook one bucket for each sparse parameter (its gradient uncoalesced and not yet divided)
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

from ..core.pending import Pending
from ..core.request import Options, Request
from ..process import PROCESS


@dataclass(slots=True)
class CommHookState:
    """The first argument of ``register_comm_hook``; one for each wrapped model.

    Models are told apart by the order in which their states are made, which must be that of all ranks.
    """

    dense_group: dist.ProcessGroup | None = None
    """Averages the dense buckets, by allreduce; None sends them over ZenPS too."""

    _prefix: str = field(default_factory=lambda: PROCESS.new_prefix("ddp"))
    _finisher: _Finisher = field(default_factory=lambda: _Finisher())
    _numbers: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """Of parameters, in the order in which they were first seen: the same on all ranks."""
    _next_number: itertools.count[int] = field(default_factory=itertools.count)

    def _content(self, bucket: GradBucket) -> str:
        """Which parameters it has: DDP rebuilds its dense buckets after the first step."""
        parameters = bucket.parameters()
        for parameter in parameters:
            if parameter not in self._numbers:
                self._numbers[parameter] = next(self._next_number)
        numbers = [self._numbers[parameter] for parameter in parameters]
        return xxhash.xxh3_64_hexdigest(repr(numbers).encode())


class _Finisher:
    """Waits for results on behalf of DDP, which waits for a hook's futures in C++.

    One thread, because results come in the order of the buckets. A daemon: at exit the interpreter joins
    other threads, as those of an executor, before this worker leaves and ends what they wait for.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Pending, Future[Tensor]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, handle: Pending, result: Future[Tensor]) -> None:
        """``result`` gets what ``handle`` does."""
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
        del work  # a gradient must not be kept until the next one


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
    # DDP numbers its buckets as backward fills them: the last ones are of the first layers.
    options = Options(average=True, priority=bucket.index(), purpose="gradient")
    handle = PROCESS.world.begin(Request(gradient, name, options))
    devices: list[int | str | torch.device] | None = [gradient.device] if gradient.is_cuda else None
    result: Future[Tensor] = Future(devices=devices)
    state._finisher.submit(handle, result)
    return result


# DDP compares the annotations of a hook with the classes themselves: they must not stay strings.
comm_hook.__annotations__ = get_type_hints(comm_hook)


def _finish(handle: Pending, result: Future[Tensor]) -> None:
    try:
        result.set_result(handle.wait())
    except Exception as error:  # noqa: BLE001  # it belongs to the thread that waits for the gradient
        result.set_exception(error)  # type: ignore[arg-type]  # torch annotates it as a value
