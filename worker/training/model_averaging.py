"""Model averaging (DS-Sync): ranks step with their own gradients, then average their models in groups.

Groups change from step to step, so that each rank's updates reach all ranks:
:mod:`zenps.worker.backends.peers.schedule`.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenps.errors import UsageError

from ..collectives.broadcast import by_name, check_alike
from ..core.request import Options, Request, check_reducible
from ..process import PROCESS
from .gradients.consistency import Consistency


class ModelAveraging(Consistency):
    """The model of one optimizer. All ranks make it at the same point.

    Args:
        optimizer: whose parameters they are.
        parameters: by name.
        buffers: by name; those of floating-point dtypes are also averaged.

    Raises:
        UsageError: two tensors have the same name.
        TensorError: a parameter is one of complex numbers.
        MismatchError: ranks have different models.
    """

    is_synchronized = False
    is_periodic = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Parameter],
        buffers: Iterable[tuple[str, Tensor]],
    ) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._parameters = set(parameters.values())
        self._name = PROCESS.new_prefix("model")
        averaged = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point()]
        tensors = by_name([*parameters.items(), *averaged], "named_parameters and named_buffers")
        for tensor in tensors.values():
            check_reducible(tensor.dtype, average=True)
        check_alike(tensors, min(PROCESS.world.ranks))
        found = _find_buffers(dict(averaged))
        self._fused = [
            _Fused([found.get(name) or _constant(tensors[name]) for name in names])
            for _, names in itertools.groupby(
                sorted(tensors, key=lambda name: (str(tensors[name].dtype), name)),
                lambda name: tensors[name].dtype,
            )
        ]
        _living[next(_numbers)] = self

    @property
    def is_of_this_world(self) -> bool:
        """Whether this model was averaged in the world that this process has joined, and not only before."""
        return self._name.is_taken

    def reset(self) -> None:
        super().reset()
        self.step = 0
        self.is_synchronized = False

    def reset_counts(self) -> None:
        """Does nothing: a state has the number of its step."""

    def synchronize(self) -> None:
        """Leaves this rank's gradients as they are.

        Raises:
            UsageError: a gradient is sparse, its parameter was frozen when the optimizer was wrapped, or the
                optimizer is wrapped for other settings.
        """
        super().synchronize()
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._parameters:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} has a gradient, but was frozen when "
                        "its optimizer was wrapped: sync.consistency = ds-sync would not average it; wrap "
                        "the optimizer again with all trained parameters"
                    )
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient: expected a "
                        "dense one, because sync.consistency = ds-sync averages whole models; use bsp or ssp"
                    )
        self.is_synchronized = True

    def consume(self) -> None:
        self.is_synchronized = False

    def after_step(self) -> None:
        step = self.step
        self.step += 1  # also if Ctrl-C ends the wait: then this rank goes on without the average
        averager = PROCESS.world.averager
        if averager is None or not self._fused:
            return
        averager.settle()
        for fused in self._fused:
            fused.gather()
        averager.average(str(self._name), step, [fused.flat for fused in self._fused])
        for fused in self._fused:
            fused.spread()

    def adopt_agreement(self, root_rank: int) -> None:
        """Does nothing: ranks agreed at construction, and none can join later."""

    def average_over_all(self) -> float:
        """Replaces the model by the average of all ranks; returns its relative distance from that average."""
        distance = norm = 0.0
        for number, fused in enumerate(self._fused):
            fused.gather()
            request = Request(fused.flat, f"{self._name}/all/{number}", Options(average=True))
            average = PROCESS.world.begin(request).wait()
            distance = math.hypot(distance, _norm(fused.flat - average))
            norm = math.hypot(norm, _norm(average))
            fused.flat.copy_(average)
            fused.spread()
        return distance / norm if norm else 0.0


class _Fused:
    """Tensors of one dtype, end to end on the CPU.

    Args:
        sources: return the present tensors.
    """

    def __init__(self, sources: Sequence[Callable[[], Tensor]]) -> None:
        self._sources = sources
        tensors = [source() for source in sources]
        sizes = [tensor.numel() for tensor in tensors]
        self.flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device="cpu")
        self._parts = [
            part.view(tensor.shape)
            for part, tensor in zip(torch.split(self.flat, sizes), tensors, strict=True)
        ]

    def gather(self) -> None:
        """Copies the tensors."""
        torch._foreach_copy_(self._parts, self._detached())

    def spread(self) -> None:
        """Overwrites the tensors."""
        torch._foreach_copy_(self._detached(), self._parts)

    def _detached(self) -> list[Tensor]:
        """Returns their present memory: ``model.to()`` gives parameters another one."""
        return [source().detach() for source in self._sources]


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


class _Buffer:
    """A buffer of a module, as it is now: ``model.to()`` and assignments put another tensor in its place.

    Args:
        name: of the buffer in the model.
        tensor: the buffer when the optimizer was wrapped.
        module: the module that has it.
        key: its name in that module.
    """

    def __init__(self, name: str, tensor: Tensor, module: nn.Module, key: str) -> None:
        self._name = name
        self._tensor = tensor
        self._module = ref(module)
        self._key = key

    def __call__(self) -> Tensor:
        """Returns the tensor; the last one if the module is gone.

        Raises:
            UsageError: it has another shape than at first, or there is none.
        """
        module = self._module()
        if module is not None:
            found: Tensor | None = module._buffers.get(self._key)
            if found is None or found.shape != self._tensor.shape:
                got = "none" if found is None else f"one of {tuple(found.shape)}"
                raise UsageError(
                    f"buffer {self._name!r}: expected one of {tuple(self._tensor.shape)}, as when the "
                    f"optimizer was wrapped, got {got}; sync.consistency = ds-sync averages it: leave it out "
                    "of named_buffers, or wrap the optimizer again on all ranks"
                )
            self._tensor = found
        return self._tensor


def _find_buffers(buffers: Mapping[str, Tensor]) -> dict[str, _Buffer]:
    """Finds the living modules that have these buffers: a buffer does not know its module."""
    names = {id(buffer): name for name, buffer in buffers.items()}
    found: dict[str, _Buffer] = {}
    for each in gc.get_objects():
        # By type, not isinstance: that would evaluate the __class__ of lazy proxies of other libraries.
        if issubclass(type(each), nn.Module):
            for key, buffer in each.__dict__.get("_buffers", {}).items():
                if (name := names.get(id(buffer))) is not None and name not in found:
                    found[name] = _Buffer(name, buffer, each, key)
    return found


_numbers = itertools.count()
_living: WeakValueDictionary[int, ModelAveraging] = WeakValueDictionary()
"""By their order, which is the same on all ranks."""


def average_parameters() -> None:
    """With ``sync.consistency = ds-sync``, replaces all models by the averages of all ranks.

    Call it on all ranks at the same point: before weights are evaluated or saved, and at the end. The model
    of each :class:`DistributedOptimizer` is its parameters and floating-point buffers. Models of an earlier
    job of this process count once their optimizers step in this one. Ranks are equal afterwards, until the
    next step. Under other consistencies it does nothing, because ranks are always equal. Errors are those of
    :func:`zenps.push_pull`.
    """
    world = PROCESS.world
    if not world.averages_models:
        return
    if _living:
        gc.collect()  # an unreferenced model may be gone on one rank, and not yet on another
    models = [model for _, model in sorted(_living.items()) if model.is_of_this_world]
    distances = [model.average_over_all() for model in models]
    if distances:
        world.statistics.note_consensus(max(distances))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
