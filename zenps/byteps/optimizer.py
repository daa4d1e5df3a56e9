"""Distributed optimizer and broadcasts with BytePS's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zenps import worker
from zenps.errors import UsageError
from zenps.horovod.compression import Compression, Compressor, warn_of_optimizer
from zenps.horovod.functions import Params, named
from zenps.horovod.objects import from_plain, to_plain
from zenps.worker.collectives.broadcast import broadcast_made


class DistributedOptimizer(worker.DistributedOptimizer):
    """Wraps any optimizer, as :class:`zenps.DistributedOptimizer` does.

    Args:
        optimizer: over the local parameters.
        named_parameters: ``model.named_parameters()``. Without it, parameters are named by their position.
        compression: has no effect here, and a warning says so: ``sync.values`` quantizes gradients.
        backward_passes_per_step: how often backward runs before ``step()``. Gradients of these passes add up.
        staleness: must be 0: ``sync.staleness`` sets it for the whole job.

    Raises:
        UsageError: ``staleness`` is not 0, or as :class:`zenps.DistributedOptimizer` raises.
        MismatchError: the ranks' parameters differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        staleness: int = 0,
    ) -> None:
        if staleness:
            raise UsageError(
                f"staleness = {staleness}: expected 0; set sync.consistency = ssp and sync.staleness"
            )
        warn_of_optimizer(compression)
        super().__init__(optimizer, named_parameters, backward_passes_per_step=backward_passes_per_step)


def broadcast_parameters(params: Params, root_rank: int, prefix: str = "Parameter.") -> None:
    """Overwrites every rank's tensors with the root's, bit for bit.

    Args:
        params: a ``state_dict()``, ``named_parameters()`` or ``parameters()``; names, shapes and dtypes must
            be the same on all ranks.
        root_rank: the rank whose values all ranks get.
        prefix: of the names.

    Raises:
        TensorError, UsageError, MismatchError, PeerLostError: as :func:`zenps.broadcast_parameters`.
    """
    tensors = {f"{prefix}{name}": tensor for name, tensor in named(params).items()}
    worker.broadcast_parameters(tensors, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = "Parameter."
) -> None:
    """Makes every rank's optimizer equal to the root's: hyperparameters and state.

    BytePS steps an optimizer without state once, with gradients of zeros. This leaves gradients and weights
    as they are. ``prefix`` is not needed here.
    """
    worker.broadcast_optimizer_state(optimizer, root_rank)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Returns the root's object on every rank. Nothing is pickled.

    Args:
        obj: plain data, as :func:`zenps.broadcast_object` takes it; also tuples, sets, a Counter or
            OrderedDict, NumPy scalars, and dense tensors, which arrive on the CPU. Only the root's is read.
        root_rank: the rank whose object all ranks get.
        name: distinguishes broadcasts that run at the same time.

    Raises:
        UsageError, MismatchError, PeerLostError: as :func:`zenps.broadcast_object`.
    """
    name = "object" if name is None else name
    return from_plain(broadcast_made(lambda: to_plain(obj), root_rank, name))
