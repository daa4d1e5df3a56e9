"""Ray Train trains the recommender; with a second argument on a Ray cluster, else in this process."""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn

import zenps as zps
from tests.frameworks.recommender import EPOCHS, Recommender, make_loader, save
from zenps.ray import Cluster


def train(config: dict[str, Any]) -> None:
    model, loader, is_main = Recommender(), make_loader(), True
    if config["is_distributed"]:
        model = prepare_model(model)
        model.register_comm_hook(zps.CommHookState(), zps.comm_hook)
        loader = prepare_data_loader(loader)
        is_main = ray_train.get_context().get_world_rank() == 0
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    losses = []
    for _ in range(EPOCHS):
        for ids, wanted in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(ids), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    save(model.state_dict(), losses, is_main, config["directory"])


config = {"directory": sys.argv[1], "is_distributed": len(sys.argv) > 2}
scaling = ScalingConfig(num_workers=2)
run_config = RunConfig(storage_path=sys.argv[1])
if config["is_distributed"]:
    ray.init(num_cpus=4)
    with Cluster(workers=2, servers=2) as cluster:
        trainer = TorchTrainer(
            cluster.wrap(train), train_loop_config=config, scaling_config=scaling, run_config=run_config
        )
        trainer.fit()
else:
    zps.init()
    train(config)
