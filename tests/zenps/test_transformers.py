"""The Trainer's callback, on stand-ins for Trainer; ``tests/frameworks`` has the real one."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.worker.training.test_optimizer import FakeWorld
from zenps.worker.process import PROCESS

SOURCE = Path(__file__).parents[2] / "zenps/transformers.py"


@pytest.fixture
def callback_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    library: Any = ModuleType("transformers")
    library.Trainer = library.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", library)
    return runpy.run_path(str(SOURCE))["Callback"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeWorld]:
    world = FakeWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield world
    dist.destroy_process_group()


def test_a_second_training_goes_on_with_the_hook_of_the_first(callback_class: Any, world: FakeWorld) -> None:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(scaler=None))
    callback = callback_class(trainer)
    for _ in range(2):  # with another model, Trainer makes another wrapper
        trainer.model_wrapped = DistributedDataParallel(nn.Linear(2, 1))
        for _ in range(2):
            before = world.pushed.total()
            callback.on_train_begin()
            trainer.model_wrapped(torch.ones(1, 2)).sum().backward()
            assert world.pushed.total() == before + 1


def test_a_model_that_is_compiled_gets_the_hook(callback_class: Any, world: FakeWorld) -> None:
    """As by ``TrainingArguments(torch_compile=True)``."""
    world.ranks = (0, 1)
    wrapped = torch.compile(DistributedDataParallel(nn.Linear(2, 1)), backend="eager")
    accelerator = SimpleNamespace(scaler=None)
    callback_class(SimpleNamespace(accelerator=accelerator, model_wrapped=wrapped)).on_train_begin()
    world.ranks = (0,)  # as many as the group has
    wrapped(torch.ones(1, 2)).sum().backward()
    assert world.pushed.total() == 1
