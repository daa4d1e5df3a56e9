"""Accelerate trains the recommender."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

import zenps as zps
from tests.frameworks.recommender import EPOCHS, Recommender, make_loader, save

zps.init()
accelerator = Accelerator(cpu=True)
model = Recommender()
optimizer = torch.optim.SGD(model.parameters(), 0.2)
model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
if zps.size() > 1:
    model.register_comm_hook(zps.CommHookState(), zps.comm_hook)
losses = []
for _ in range(EPOCHS):
    for ids, wanted in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(ids), wanted)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
save(model.state_dict(), losses, accelerator.is_main_process)
accelerator.end_training()
zps.shutdown()
