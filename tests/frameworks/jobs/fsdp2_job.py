"""FSDP2 shards the dense layer of the recommender; its table is wrapped in DDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import zenps as zps
from tests.frameworks.recommender import BATCH, EPOCHS, Recommender, make_data, save


def shard(model: Any) -> None:  # its table becomes another module
    dist.init_process_group("gloo")
    model.table = DistributedDataParallel(model.table)
    model.table.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    fully_shard(model, ignored_params=set(model.table.parameters()))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


zps.init()
model = Recommender()
if zps.size() > 1:
    shard(model)
optimizers = [torch.optim.SGD(part.parameters(), 0.2) for part in (model.table, model.dense)]
losses = []
for _ in range(EPOCHS):
    for ids, wanted in DataLoader(make_data(), batch_size=BATCH):
        mine = slice(zps.rank(), None, zps.size())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(ids[mine]), wanted[mine])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
save(
    {name.replace("module.", ""): whole(t) for name, t in model.state_dict().items()}, losses, zps.rank() == 0
)
if dist.is_initialized():
    dist.destroy_process_group()
zps.shutdown()
