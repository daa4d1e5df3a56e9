"""DistributedDataParallel of BytePS: a module whose gradients are averages once backward has ended."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter

from zenps import worker
from zenps.errors import UsageError, ZenPSError
from zenps.horovod.compression import Compression, Compressor, warn_of_optimizer
from zenps.worker.collectives.allgather import allgather_int
from zenps.worker.collectives.broadcast import from_first_present
from zenps.worker.process import PROCESS
from zenps.worker.training.gradients.synchronizer import weakly
from zenps.worker.training.hazards import check_applied_at_once


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module: at the end of each backward, its gradients are averages over all ranks.

    All ranks construct it at the same point, where they get the parameters and buffers of rank 0. A gradient
    that this rank has not computed counts as zeros, so that ``synchronize()`` need not be called for an
    unused branch. If a backward raised an error or was interrupted, the next forward, which all ranks must
    call, throws away what it has pushed.

    Args:
        module: whose parameters are trained; it may have sparse gradients.
        device_ids: at most one, that of the module.
        broadcast_buffers: before each forward that computes gradients, overwrite the buffers with those of
            rank 0; of the lowest present rank, if the job goes on without lost workers.
        compression: has no effect here, and a warning says so: ``sync.values`` quantizes gradients.

    Raises:
        UsageError: there are several ``device_ids``, or gradients are not averaged at once
            (``sync.consistency``), or not without the optimizer's momentum (``dgc``).
        MismatchError: the ranks' parameters differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device | None] | None = None,
        broadcast_buffers: bool = True,
        compression: type[Compressor] = Compression.none,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) > 1:
            raise UsageError(
                f"device_ids = {device_ids}: expected one, that of the module; start a worker for each"
            )
        warn_of_optimizer(compression)
        check_applied_at_once("DistributedDataParallel")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        _broadcast(module.state_dict())
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._synchronizes = False
        self._is_awaited = False
        """Whether the averages are awaited at the end of the backward that runs."""
        self._has_open_step = False
        """Whether a step has begun whose averages have not come and that was not dropped."""
        self._is_synchronized = False
        """Whether the gradients since the last forward that computes any are averages."""
        # Before the optimizer's hooks: after one that raises, no further hook runs.
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(weakly(self._await_end))  # type: ignore[no-untyped-call]
        self._optimizer = _Averager(torch.optim.SGD(self._trained, lr=0.0), module.named_parameters())
        self._synchronizes = True

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Raises UsageError. A copy would average gradients on this rank alone, where others have none."""
        raise UsageError(
            "a DistributedDataParallel cannot be copied or pickled: expected its module; copy or save "
            "ddp.module, as in AveragedModel(ddp.module)"
        )

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        if torch.is_grad_enabled():  # otherwise one rank alone may be evaluating
            self._is_synchronized = False
            if not _runs_backward():
                self._end_failed()
            buffers = dict(self.module.named_buffers())
            if self.broadcast_buffers and buffers:
                _broadcast(buffers)
        return self.module(*inputs, **named_inputs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward only adds up gradients. The script may change or clear them afterwards; a
        later backward averages what is left of them.
        """
        before, self._synchronizes = self._synchronizes, False
        try:
            with self._optimizer.no_sync():
                yield
        finally:
            self._synchronizes = before

    def synchronize(self) -> None:
        """Replaces gradients by averages if backward has not, because it computed none on this rank."""
        if not self._is_synchronized:
            self._end()

    def _await_end(self, _: Tensor) -> None:
        """Makes the end of this backward wait for the averages."""
        if self._synchronizes and not self._is_awaited:
            self._is_awaited = self._has_open_step = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end_failed(self) -> None:
        """Drops the step of a backward that has raised or was interrupted; leaves gradients as they are."""
        if not self._has_open_step:
            return
        self._is_awaited = False
        gradients = [parameter.grad for parameter in self._trained]
        try:
            self._drop_step()
        finally:  # an interrupted wait has gone on; the script does not expect its averages any more
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient

    def _drop_step(self) -> None:
        try:
            self._optimizer.drop_step()
        except UsageError:  # warns once of what residuals lose with the failed step
            self._optimizer.drop_step()
        self._has_open_step = False

    def _end(self) -> None:
        self._is_awaited, self._is_synchronized, self._has_open_step = False, True, True
        try:
            self._optimizer.synchronize()
        except ZenPSError:
            self._drop_step()  # because the script has no call for it, and other ranks wait for the gradients
            raise
        self._has_open_step = False


class _Averager(worker.DistributedOptimizer):
    """Averages gradients, and never steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
    ) -> None:
        super().__init__(optimizer, named_parameters)
        self._consistency.may_change_unpushed = True


def _broadcast(tensors: Mapping[str, Tensor]) -> None:
    """Overwrites tensors with those of rank 0; in an elastic job, of the lowest rank that is not lost."""
    # There, ranks may know of different workers.
    roots = allgather_int(1, "byteps:roots") if PROCESS.world.is_elastic else [0]
    from_first_present(roots, functools.partial(worker.broadcast_parameters, tensors))


def _runs_backward() -> bool:
    """Returns whether this is called inside a backward, as a checkpoint calls forward again."""
    return torch._C._current_graph_task_id() != -1
