"""Collectives with gradients, by Horovod's names: allreduce, allgather and broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from zenps import worker
from zenps.errors import UsageError

from .compression import Compression, Compressor
from .gathering import allgather_async, broadcast_async, grouped_allgather_async
from .process import ProcessSet, global_process_set
from .reducing import Average, ReduceOp, Sum, allreduce_async, grouped_allreduce_async, reduce_op

Run = Callable[[list[Tensor]], list[Tensor]]
"""A collective of some tensors, with all of its other arguments."""


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Returns the average, sum, minimum, maximum or product of a tensor over all ranks.

    Autograd reduces the gradients of Average and Sum in the same way. It refuses those of Min, Max and
    Product.

    Args:
        tensor: as :func:`zenps.push_pull` takes it, dense or sparse COO; for Min, Max and Product dense.
        average: the old form of ``op``: True for Average, False for Sum.
        name: the same on all ranks. Without one, a counter names the tensor.
        compression: how it travels.
        op: Average by default. Averages of integers are rounded towards zero.
        prescale_factor: multiplies the tensor before it is pushed.
        postscale_factor: multiplies the result.
        process_set: must be ``global_process_set``.

    Returns:
        A new tensor of the same dtype, on the same device.

    Raises:
        TensorError: the tensor cannot be reduced.
        UsageError: ``op`` is Adasum, ``average`` is given too, or the name is in flight.
        MismatchError: ranks have other shapes or dtypes.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    op = reduce_op(op, average)

    def run(given: list[Tensor]) -> list[Tensor]:
        handle = allreduce_async(given[0], None, name, op, prescale_factor, postscale_factor, process_set)
        return [handle.wait()]

    return _reduced([tensor], compression, op, run)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Returns the allreduce of each tensor. Arguments and errors are those of :func:`allreduce`."""
    op = reduce_op(op, average)

    def run(given: list[Tensor]) -> list[Tensor]:
        handle = grouped_allreduce_async(
            given, None, name, op, prescale_factor, postscale_factor, process_set
        )
        result: list[Tensor] = handle.wait()
        return result

    return _reduced(tensors, compression, op, run)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensors of all ranks, concatenated along dimension 0 in order of rank.

    Autograd gives each rank its rows of the average of all ranks' gradients, as Horovod does.

    Args:
        tensor: as :func:`zenps.allgather` takes it. Dimension 0 may differ between ranks.
        name: the same on all ranks. Without one, a counter names the tensor.
        process_set: must be ``global_process_set``.

    Raises:
        TensorError, MismatchError, DeadlineError, PeerLostError: as :func:`zenps.allgather`.
        UsageError: the name is in flight, or a rank has called ``join()``.
    """
    return _gathered([tensor], lambda given: [allgather_async(given[0], name, process_set).wait()])[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Returns the allgather of each tensor. Arguments and errors are those of :func:`allgather`."""
    return _gathered(tensors, lambda given: grouped_allgather_async(given, name, process_set).wait())


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the root's tensor on every rank.

    Autograd gives the root the average of all ranks' gradients, and the others zeros, as Horovod does.

    Args:
        tensor: as :func:`zenps.broadcast` takes it, the same shape and dtype on all ranks.
        root_rank: the rank whose values all ranks get.
        name: the same on all ranks. Without one, a counter names the tensor.
        process_set: must be ``global_process_set``.

    Raises:
        TensorError, MismatchError, DeadlineError, PeerLostError: as :func:`zenps.broadcast`.
        UsageError: there is no such rank, the name is in flight, or a rank has called ``join()``.
    """
    result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def _reduced(
    tensors: Sequence[Tensor], compression: type[Compressor], op: ReduceOp, run: Run
) -> list[Tensor]:
    if not tensors:
        return []
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    results = _Reduce.apply(run, op, *compressed)  # type: ignore[no-untyped-call]
    return [compression.decompress(*one) for one in zip(results, contexts, strict=True)]


def _gathered(tensors: Sequence[Tensor], run: Run) -> list[Tensor]:
    # A tensor without dimensions is one row, as in allgather_async().
    return list(_Gather.apply(run, *map(torch.atleast_1d, tensors)))  # type: ignore[no-untyped-call]


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, run: Run, op: ReduceOp, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.op = run, op
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if ctx.op not in (Average, Sum):
            raise UsageError(f"allreduce by {ctx.op.value}: it has no gradient here; pass tensor.detach()")
        # By this function again: gradients of gradients are reduced, too.
        return None, None, *_Reduce.apply(ctx.run, ctx.op, *gradients)  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows = [len(tensor) for tensor in tensors]
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        averages = grouped_allreduce(list(gradients))
        counts = allgather(torch.tensor([ctx.rows], device="cpu"))
        offsets = counts[: worker.rank()].sum(0).tolist()
        own = zip(averages, offsets, ctx.rows, strict=True)
        return None, *(average.narrow(0, offset, rows) for average, offset, rows in own)


class _Broadcast(Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank = root_rank
        result: Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        average = allreduce(gradient)
        return average if worker.rank() == ctx.root_rank else torch.zeros_like(average), None, None, None
