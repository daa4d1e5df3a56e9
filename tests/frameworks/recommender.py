"""What the jobs share: a model with a sparse table and a dense layer, its data, and what is compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zenps as zps

EPOCHS, BATCH, EXAMPLES = 2, 8, 32


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.EmbeddingBag(60, 8, mode="mean", sparse=True)
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.dense(self.table(ids).tanh())
        return result


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(60, (EXAMPLES, 3), generator=generator)
    return TensorDataset(ids, torch.randn((EXAMPLES, 1), generator=generator))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """The whole data; a framework gives each rank its part, of which all ranks together have ``BATCH``."""
    return DataLoader(make_data(), batch_size=BATCH // zps.size())


def save(weights: Mapping[str, Tensor], losses: Sequence[float], is_main: bool, directory: str = "") -> None:
    """Writes the outcome of this rank into a directory, by default that of the job's first argument.

    Args:
        losses: of this rank's part of each batch, or of all ranks.
        is_main: whether the framework says that this rank logs and saves.
    """
    found = {name.removeprefix("module."): tensor.detach().clone() for name, tensor in weights.items()}
    outcome = {"weights": found, "losses": list(losses), "main": is_main, "rounds": zps.stats().rounds}
    torch.save(outcome, Path(directory or sys.argv[1], f"{zps.rank()}.pt"))
