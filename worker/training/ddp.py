"""DDP communication hook: ``DistributedDataParallel`` over ZenPS.

DDP gives a hook one bucket for each sparse parameter (its gradient uncoalesced and not yet divided)
and fused buckets of the dense ones. The hook returns a future of the averaged gradient.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn, get_type_hints

import torch
import torch.distributed as dist
import xxhash
from msgspec import structs
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from zenps.errors import UsageError

from ..core.pending import Pending
from ..core.request import Options, Request
from ..core.residuals import Residuals
from ..process import PROCESS, Prefix
from .hazards import check_applied_at_once


class _Bucket(NamedTuple):
    """A bucket in flight.

    Attributes:
        handle: of its round; None if that could not begin.
        result: what DDP waits for.
        gradient: this rank's own.
        refused: why the gradient was not pushed, or was pushed but thrown away here; None if all went well.
    """

    handle: Pending | None
    result: Future[Tensor]
    gradient: Tensor
    refused: Exception | None


@dataclass(slots=True)
class CommHookState:
    """The first argument of ``register_comm_hook``; one for each wrapped model.

    A process may wrap several models. All ranks must construct their states in the same order. Frameworks
    copy their arguments: a copy is a new state for another model, and so is a state that was pickled with its
    model and loaded. It lacks the group, as a loaded DDP lacks its own, and the hook must be registered with
    DDP again.
    """

    dense_group: dist.ProcessGroup | None = None
    """The group whose allreduce averages the dense buckets; None sends them over ZenPS too."""

    _prefix: Prefix = field(init=False, default_factory=lambda: Prefix("ddp"))
    _residuals: Residuals = field(init=False, default_factory=Residuals)
    _pushed: set[str] = field(init=False, default_factory=set)
    """The names of all buckets of this job so far."""
    _in_flight: list[_Bucket] = field(init=False, default_factory=list)
    _numbers: WeakTensorKeyDictionary = field(init=False, default_factory=WeakTensorKeyDictionary)
    """Numbers parameters in the order in which they were first seen, which is the same on all ranks."""
    _next_number: itertools.count[int] = field(init=False, default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._prefix.take(PROCESS.numbers("ddp"))

    def _content(self, bucket: GradBucket) -> str:
        """Returns a hash of the bucket's parameters: DDP rebuilds its dense buckets after the first step."""
        parameters = bucket.parameters()
        for parameter in parameters:
            if parameter not in self._numbers:
                self._numbers[parameter] = next(self._next_number)
        numbers = [self._numbers[parameter] for parameter in parameters]
        return xxhash.xxh3_64_hexdigest(repr(numbers).encode())

    def _finish(self) -> None:
        """Waits for the results of all buckets in flight, and gives them to DDP.

        After an error DDP gets the gradients of this rank, and ends its step with them, because an unfinished
        step makes its next forward fail. Then the error is raised from backward.
        """
        buckets, self._in_flight = self._in_flight, []
        failure: BaseException | None = None
        for handle, result, gradient, refused in buckets:
            averaged = gradient
            if failure is None or isinstance(failure, Exception):  # after Ctrl-C nothing is waited for
                try:
                    pulled = gradient if handle is None else handle.wait()
                    if refused is not None:
                        raise refused
                    averaged = pulled
                except BaseException as error:  # noqa: BLE001  # raised below
                    failure = error
            result.set_result(averaged)
        if failure is not None:
            _at_end_of_backward(partial(_raise, failure))

    def __copy__(self) -> CommHookState:
        return _LateState(self.dense_group)

    def __deepcopy__(self, _: object) -> CommHookState:
        return copy(self)

    def __reduce__(self) -> tuple[type[CommHookState], tuple[()]]:
        return _LateState, ()


class _LateState(CommHookState):
    """A copied or loaded state. It takes its prefix when it is used: one that a single rank makes, such as
    that of an averaged model, must not shift the prefixes of this rank.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Takes no prefix yet."""


def _vectors(bucket: GradBucket) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of the parameters of one dimension, which are never thinned out."""
    ranges, begin = [], 0
    for parameter in bucket.parameters():
        if parameter.dim() <= 1:
            ranges.append((begin, begin + parameter.numel()))
        begin += parameter.numel()
    return tuple(ranges)


_default = _LateState()


def comm_hook(state: CommHookState | None, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket over all ranks: ``ddp.register_comm_hook(CommHookState(), zps.comm_hook)``.

    Errors of :func:`push_pull` are raised from ``backward()``; gradients are then those of this rank. If
    Ctrl-C interrupts the beginning of a hook, or a hook of your own around this one raises, DDP's step never
    ends: its next backward fails with an INTERNAL ASSERT of torch, until the module is wrapped in DDP again.

    Args:
        state: ``None`` for one model whose buckets all go over ZenPS.
        bucket: sparse, ``[rows, columns…]`` COO; or dense, ``[n]``; of any dtype of ``push_pull``.

    Returns:
        A future of the average: of the bucket's shape and dtype, on its device; sparse ones are coalesced.

    Raises:
        UsageError: settings need :class:`DistributedOptimizer`: ``sync.consistency`` is not ``bsp``, or
            ``sync.sparsifier`` takes the optimizer's momentum, as ``dgc`` does; or torch.distributed has
            other ranks than ZenPS.
    """
    state = state or _default
    gradient = bucket.buffer()
    if not gradient.is_sparse and state.dense_group is not None:
        gradient.div_(dist.get_world_size(state.dense_group))
        work = dist.all_reduce(gradient, group=state.dense_group, async_op=True)
        averaged: Future[Tensor] = work.get_future().then(lambda reduced: reduced.value()[0])
        return averaged
    if not state._prefix.is_taken:  # in another job; a rank may have missed the end of the last one
        state._pushed.clear()
    name = f"{state._prefix}/{'sparse' if gradient.is_sparse else 'dense'}/{state._content(bucket)}"
    # DDP may never use the first layout again: its residuals would be lost, and take memory. So a layout is
    # pushed whole and exactly at first. Names, and which were pushed before, are the same on all ranks.
    is_repeated = name in state._pushed
    state._pushed.add(name)
    # DDP numbers its buckets in the order in which backward fills them: the last ones hold the first layers.
    options = Options(
        average=True,
        priority=bucket.index(),
        purpose="gradient",
        residuals=state._residuals if is_repeated or gradient.is_sparse else None,
        is_sparsifiable=is_repeated,
        exact=() if gradient.is_sparse else _vectors(bucket),
    )
    handle, refused = _begin(Request(gradient, name, options), state._residuals)
    devices: list[int | str | torch.device] | None = [gradient.device] if gradient.is_cuda else None
    result: Future[Tensor] = Future(devices=devices)
    state._in_flight.append(_Bucket(handle, result, gradient, refused))
    if _is_hook_of_parameter():
        _at_end_of_backward(state._finish)
    else:
        state._finish()
    return result


def _begin(request: Request, residuals: Residuals) -> tuple[Pending | None, Exception | None]:
    """Begins a round. An error raised from here would leave DDP in a step without an end.

    Returns:
        the round, perhaps of a gradient that is thrown away here, because other ranks wait for it; and why
        the gradient could not be pushed, or None.
    """
    try:
        check_applied_at_once("the DDP hook")
        _check_ranks()
    except UsageError as error:  # on all ranks alike: nobody waits for this one
        return None, error
    try:
        return PROCESS.world.begin(request), None
    except BaseException as error:
        residuals.end_step()  # the next push of this name is that of another gradient
        if not isinstance(error, Exception):
            raise
        refused = error
    dropped = structs.replace(request.options, is_dropped=True)
    with contextlib.suppress(Exception):
        return PROCESS.world.begin(request._replace(options=dropped)), refused
    return None, refused


def _check_ranks() -> None:
    """Checks that the workers are the ranks of torch.distributed.

    If this worker trains alone, nobody averages gradients. If some workers are in another group of
    torch.distributed, DDP does not give them the weights of its first rank. Elastic jobs are not checked for
    that: a worker that joins one cannot enter the group of the others.

    Raises:
        UsageError: they are not.
    """
    world = PROCESS.world
    if not world.is_distributed and (ranks := dist.get_world_size()) > 1:
        raise UsageError(
            f"the DDP hook: expected the {ranks} ranks of torch.distributed as workers, got one that trains "
            "alone; set cluster.scheduler and cluster.workers for all of them, as zenps launch does"
        )
    if world.size > 1 and not world.is_elastic and (ranks := dist.get_world_size()) < world.size:
        raise UsageError(
            f"the DDP hook: expected the {world.size} workers as ranks of torch.distributed, got a group of "
            f"{ranks}; call init_process_group with rank=zps.rank() and world_size=zps.size(), and in "
            "Lightning give num_nodes"
        )


# DDP compares a hook's annotations with the classes themselves, so they must not be strings.
comm_hook.__annotations__ = get_type_hints(comm_hook)


def _is_hook_of_parameter() -> bool:
    """Returns whether backward has just computed a parameter's gradient.

    Then DDP waits for the results in a callback at the end of backward that it has yet to queue. In the first
    step of a static graph, DDP calls the hook in such a callback, and waits for the results in the same one.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Queues a call on the thread of backward, which raises the call's exceptions.

    DDP waits in C++, where the type of an exception is lost, and Ctrl-C is not noticed.
    """
    Variable._execution_engine.queue_callback(call)


def _raise(error: BaseException) -> NoReturn:
    raise error
