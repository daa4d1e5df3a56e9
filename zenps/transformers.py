"""Hugging Face Trainer callback: gradients of the model that ``Trainer`` wraps go over ZenPS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakSet

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from zenps.errors import UsageError
from zenps.worker.process import PROCESS
from zenps.worker.training.clipping import clip_grad_norm_
from zenps.worker.training.ddp import CommHookState, comm_hook
from zenps.worker.training.hazards import check_scaler

__all__ = ["Callback"]


_hooked: Final = WeakSet[DistributedDataParallel]()
"""The models that have the hook."""


class Callback(TrainerCallback):
    """Registers :func:`zenps.comm_hook` with the wrapped model: ``trainer.add_callback(Callback(trainer))``.

    Call ``zenps.init()`` before ``trainer.train()``, which raises what the hook raises. Gradients are clipped
    by :func:`zenps.clip_grad_norm_`: Trainer computes their norm in each step, and its own function fails for
    sparse gradients.

    Raises:
        UsageError: from ``trainer.train()``, if there are several workers, and Trainer has not wrapped the
            model in ``DistributedDataParallel``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Registers the hook: the model is wrapped by now, and no gradient computed.

        Raises:
            UsageError: the model is not in DistributedDataParallel, or gradients are scaled (``fp16``) and
                quantized or sparsified.
        """
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            check_scaler()
        model = self._trainer.model_wrapped
        model = getattr(model, "_orig_mod", model)  # with torch_compile, DDP is inside the compiled module
        if isinstance(model, DistributedDataParallel):
            if model not in _hooked:  # a second training has the wrapper of the first
                model.register_comm_hook(CommHookState(), comm_hook)
                _hooked.add(model)
        elif PROCESS.world.size > 1:
            raise UsageError(
                f"model of Trainer: expected DistributedDataParallel, got {type(model).__name__}; start "
                "workers by `zenps launch` or torchrun, without FSDP and DeepSpeed"
            )
        self._trainer.accelerator.clip_grad_norm_ = self._clip

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        self._trainer.accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)
