"""Lightning strategy: DistributedDataParallel whose gradients go over ZenPS.

Lightning registers the communication hook of a ``DDPStrategy`` only on a GPU, and does not say so.
"""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from zenps.worker.training.ddp import CommHookState, comm_hook
from zenps.worker.training.hazards import check_scaler

__all__ = ["Strategy"]


class Strategy(DDPStrategy):
    """``DDPStrategy`` with :func:`zenps.comm_hook`: ``Trainer(strategy=Strategy())``.

    Call ``zenps.init()`` before ``Trainer.fit``. Arguments are those of ``DDPStrategy``, without a hook.

    Raises:
        ZenPSError: from ``Trainer.fit``, as :func:`zenps.comm_hook` describes.
    """

    def configure_ddp(self) -> None:
        """Wraps the model in ``DistributedDataParallel``, with the hook.

        Raises:
            UsageError: gradients are scaled (``16-mixed``), and quantized or sparsified.
        """
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            check_scaler()
        super().configure_ddp()
        self.model.register_comm_hook(CommHookState(), comm_hook)
