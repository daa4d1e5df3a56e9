"""Allreduce by Horovod's names, asynchronous and in place."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from zenps import worker
from zenps.errors import UsageError, ZenPSError

from .handles import Handle, delivered, names_of
from .process import ProcessSet, check_process_set, global_process_set
from .reduction import Reduction, check_in_place, description
from .turns import REDUCES, Call


class ReduceOp(enum.Enum):
    """How tensors of all ranks become one."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


Average, Sum, Adasum = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def reduce_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Returns the operation that a caller has asked for by ``op`` or, as in old scripts, by ``average``.

    Raises:
        UsageError: both are given, ``op`` is Adasum, or none of the operations.
    """
    if op is not None and average is not None:
        raise UsageError("allreduce: expected op or average, got both; leave average out")
    if op is None:
        return Average if average is None or average else Sum
    if op is Adasum:
        raise UsageError("op Adasum: ZenPS has no adaptive summation; use Average or Sum")
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op {op!r:.60}: expected Average, Sum, Min, Max or Product of zenps.horovod")
    return op


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Begins an allreduce into a new tensor. Arguments and errors are those of :func:`allreduce`.

    One by Min, Max or Product begins as :func:`allgather_async` does, in the same order on all ranks.
    """
    how = reduce_op(op, average), prescale_factor, postscale_factor
    return _begin([tensor], name, *how, process_set, in_place=False, is_group=False)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Begins an allreduce in place: ``tensor`` is overwritten by :func:`synchronize`, or by :func:`poll`.

    Raises:
        TensorError: ``tensor`` is sparse, or as :func:`allreduce` raises.
    """
    check_in_place([tensor])
    how = reduce_op(op, average), prescale_factor, postscale_factor
    return _begin([tensor], name, *how, process_set, in_place=True, is_group=False)


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Begins an allreduce of each tensor; the result is a list."""
    how = reduce_op(op, average), prescale_factor, postscale_factor
    return _begin(tensors, name, *how, process_set, in_place=False, is_group=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """Begins an allreduce of each tensor in place, as :func:`allreduce_async_`; the result is the list of
    them."""
    check_in_place(tensors)
    how = reduce_op(op, average), prescale_factor, postscale_factor
    return _begin(tensors, name, *how, process_set, in_place=True, is_group=True)


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Allreduce in place; returns ``tensor``. Arguments and errors are those of :func:`allreduce_async_`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = handle.wait()
    return result


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Allreduce of each tensor in place; returns the list of them."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    result: list[Tensor] = handle.wait()
    return result


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begins a sum or average of a sparse COO tensor. To call the handle returns the coalesced result."""
    return allreduce_async(tensor, name=name, op=op, process_set=process_set)


def _begin(
    tensors: Sequence[Tensor], name: str | None, op: ReduceOp, prescale: float, postscale: float,
    process_set: ProcessSet, *, in_place: bool, is_group: bool,
) -> Handle:  # fmt: skip
    """Begins an allreduce of some tensors by one operation."""
    check_process_set(process_set)
    names = names_of("allreduce", name, len(tensors), is_group)
    scaled = [_scaled(tensor.detach(), prescale) for tensor in tensors]

    def finish(results: Iterable[Tensor]) -> Any:
        finished = [_scaled(result, postscale) for result in results]
        return delivered(finished, tensors if in_place else None, is_group)

    if op in (Average, Sum):
        average, own = op is Average, list(zip(scaled, names, strict=True))
        parts = [Reduction(tensor, name, average=average) for tensor, name in own]
        call = Call([REDUCES, [[name, description(tensor, average)] for tensor, name in own]])
        return Handle(call, names, lambda: finish(_waited(parts)), parts)

    def work() -> list[Tensor]:
        how: Any = op.value
        return [worker.allreduce(tensor, own, op=how) for tensor, own in zip(scaled, names, strict=True)]

    call = Call([f"allreduce by {op.value}", names], work)
    return Handle(call, names, lambda: finish(call.result))


def _waited(parts: Sequence[Reduction]) -> list[Tensor]:
    """Waits for all of them, so that no name stays in flight, and raises the first error."""
    results, failed = [], None
    for part in parts:
        try:
            results.append(part.wait())
        except ZenPSError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return results


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Returns the tensor times ``factor`` in its own dtype. Integers are multiplied in float64."""
    if factor == 1.0:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return (tensor.double() * factor).to(tensor.dtype)
    return (tensor.float() * factor).to(tensor.dtype) if tensor.itemsize < 4 else tensor * factor
