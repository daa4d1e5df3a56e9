"""Allgather and broadcast by Horovod's names, asynchronous and in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from zenps import worker

from .handles import Handle, delivered, names_of
from .process import ProcessSet, check_process_set, global_process_set
from .turns import Call


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Makes an allgather, which begins when its result, or that of a later call, is waited for or polled.

    Arguments and errors are those of :func:`allgather`. All ranks make their allgathers, broadcasts, and
    allreduces by Min, Max and Product in the same order: otherwise they wait for one another.
    """
    return _begin_allgather([tensor], name, process_set, is_group=False)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Makes an allgather of each tensor, as :func:`allgather_async` does; the result is a list."""
    return _begin_allgather(tensors, name, process_set, is_group=True)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Makes a broadcast into a new tensor, which begins as :func:`allgather_async` does, in the same order.

    Arguments and errors are those of :func:`broadcast`.
    """
    return _begin_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`broadcast_async`, in place: :func:`synchronize` or :func:`poll` overwrites ``tensor``."""
    return _begin_broadcast(tensor, root_rank, name, process_set, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast in place; returns ``tensor``. Arguments and errors are those of :func:`broadcast`."""
    result: Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def _begin_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, is_group: bool
) -> Handle:
    check_process_set(process_set)
    names = names_of("allgather", name, len(tensors), is_group)
    given = [tensor.detach() for tensor in tensors]
    work = functools.partial(_each, worker.allgather, given, names)
    return _begin_in_turn("allgather", names, work, None, is_group)


def _begin_broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> Handle:
    check_process_set(process_set)
    names = names_of("broadcast", name, 1, is_group=False)
    given = [tensor.detach()]
    work = functools.partial(_each, worker.broadcast, given, [root_rank], names)
    return _begin_in_turn("broadcast", names, work, [tensor] if in_place else None, is_group=False)


def _each(function: Callable[..., Tensor], *arguments: Iterable[Any]) -> list[Tensor]:
    return list(map(function, *arguments))


def _begin_in_turn(
    kind: str, names: list[str], work: Callable[[], list[Tensor]], outputs: Sequence[Tensor] | None,
    is_group: bool,
) -> Handle:  # fmt: skip
    """Begins a call whose rounds take place once all ranks have made it."""
    call = Call([kind, names], work)
    return Handle(call, names, lambda: delivered(call.result, outputs, is_group))
