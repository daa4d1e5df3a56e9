"""Lightning trains the recommender. What a second argument says happens to rank 1."""

from __future__ import annotations

import os
import signal
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import zenps as zps
from tests.frameworks.recommender import EPOCHS, Recommender, make_loader, save
from zenps.lightning import Strategy

happens = sys.argv[2] if len(sys.argv) > 2 else ""


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = Recommender()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        if happens == "kill" and zps.rank() == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        ids, wanted = batch
        loss = nn.functional.mse_loss(self.model(ids), wanted)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.2)


def make_strategy() -> DDPStrategy:
    if happens == "dropped":  # Lightning ignores the hook on a CPU
        return DDPStrategy(ddp_comm_state=zps.CommHookState(), ddp_comm_hook=zps.comm_hook)
    return Strategy()


zps.init()
module = Module()
options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
trainer = Trainer(
    strategy=make_strategy(), accelerator="cpu", devices=zps.local_size(), max_epochs=EPOCHS, **options,
    default_root_dir=sys.argv[1],
)  # fmt: skip
trainer.fit(module, make_loader())
save(module.model.state_dict(), module.losses, trainer.is_global_zero)
zps.shutdown()
