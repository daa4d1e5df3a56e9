"""Broadcasts of state and objects, allgather of objects, barrier and join, by Horovod's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zenps import worker
from zenps.errors import UsageError
from zenps.worker.collectives.broadcast import broadcast_made, by_name
from zenps.worker.collectives.tensors import allgather_made
from zenps.worker.process import PROCESS

from .objects import from_plain, to_plain
from .process import ProcessSet, check_process_set, global_process_set
from .turns import TURNS

Params = Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]]


def named(params: Params) -> dict[str, Tensor]:
    """Returns tensors by name; those without one are named by their position, the same on all ranks.

    Raises:
        UsageError: two tensors have the same name.
    """
    if isinstance(params, Mapping):
        return dict(params)
    pairs = (item if isinstance(item, tuple) else (str(number), item) for number, item in enumerate(params))
    return by_name(pairs, "broadcast_parameters")


def broadcast_parameters(params: Params, root_rank: int) -> None:
    """Overwrites every rank's tensors with the root's.

    Args:
        params: a ``state_dict()``, ``named_parameters()`` or ``parameters()``; names, shapes and dtypes must
            be the same on all ranks.
        root_rank: the rank whose values all ranks get.

    Raises:
        TensorError, MismatchError, PeerLostError: as :func:`zenps.broadcast_parameters`.
        UsageError: there is no such rank, two tensors have the same name, or a rank has called ``join()``.
    """
    TURNS.run(["broadcast_parameters"], lambda: worker.broadcast_parameters(named(params), root_rank))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Makes every rank's optimizer equal to the root's: hyperparameters and state.

    Horovod steps an optimizer without state once, with gradients of zeros, to learn what state it has. This
    does not: gradients and weights stay as they are.

    Args:
        optimizer: over the same parameters on all ranks.
        root_rank: the rank whose state all ranks get.
        model: not needed here; Horovod looks for sparse parameters in it.

    Raises:
        MismatchError, PeerLostError: as :func:`zenps.broadcast_optimizer_state`.
        UsageError: the root's state is not plain data, or a rank has called ``join()``.
    """
    TURNS.run(["broadcast_optimizer_state"], lambda: worker.broadcast_optimizer_state(optimizer, root_rank))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the root's object on every rank. Nothing is pickled.

    Args:
        obj: plain data, as :func:`zenps.broadcast_object` takes it; also tuples, sets, a Counter or
            OrderedDict, NumPy scalars, and dense tensors, which arrive on the CPU. Only the root's is read.
        root_rank: the rank whose object all ranks get.
        name: distinguishes broadcasts that run at the same time.
        process_set: must be ``global_process_set``.

    Raises:
        UsageError: the object has no such form, there is no such rank, or a rank has called ``join()``.
        MismatchError, PeerLostError: as :func:`zenps.broadcast_object`.
    """
    check_process_set(process_set)
    name = "object" if name is None else name

    def work() -> Any:
        return broadcast_made(lambda: to_plain(obj), root_rank, f"horovod/{name}")

    return from_plain(TURNS.run(["broadcast_object", name], work))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Returns the objects of all ranks, in order of rank. Nothing is pickled.

    Args:
        obj: as :func:`broadcast_object` takes it.
        name: distinguishes calls that run at the same time.

    Raises:
        UsageError: an object has no such form, or a rank has called ``join()``.
        DeadlineError, PeerLostError: as :func:`zenps.allgather_object`.
    """
    name = "object" if name is None else name
    gathered = TURNS.run(
        ["allgather_object", name], lambda: allgather_made(lambda: to_plain(obj), f"horovod/{name}")
    )
    return [from_plain(one) for one in gathered]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every worker has called this.

    Args:
        process_set: must be ``global_process_set``.

    Raises:
        UsageError: a rank has called ``join()``.
        DeadlineError, PeerLostError: as :func:`zenps.barrier`.
    """
    check_process_set(process_set)
    TURNS.barrier()


def join(device: int = -1) -> int:
    """Takes part in the other ranks' sums, averages and optimizer steps until all ranks have called this.

    This rank pushes zeros; averages are still divided by the number of all ranks. Its optimizers do not step.
    In the end they and their parameters become those of the rank that has called this last.

    A ``GradScaler`` remains each rank's own, and its scale may then differ between ranks. Make it equal, on
    all ranks::

        scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict()))

    Args:
        device: not needed here; Horovod makes its zeros there.

    Returns:
        the rank that has called this last.

    Raises:
        UsageError: ``sync.consistency = ds-sync`` averages models; or with ``cluster.on_worker_loss =
            continue`` the job goes on without a lost rank, for which this would wait.
        MismatchError: the other ranks make different calls at the same time.
        DeadlineError: a rank has neither made a call nor joined within ``cluster.deadline_seconds``.
        PeerLostError: a node was lost.
    """
    if PROCESS.world.averages_models:
        raise UsageError("join: expected gradients to be averaged, got sync.consistency = ds-sync; use bsp")
    if PROCESS.world.is_elastic:
        raise UsageError(
            "join: expected a job that ends if a rank is lost, got cluster.on_worker_loss = continue; wrap "
            'the optimizer in zps.DistributedOptimizer, and its loop in "with zps.join(optimizer):"'
        )
    return TURNS.join()
