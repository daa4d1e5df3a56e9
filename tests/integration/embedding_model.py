"""A small model with sparse and dense parameters, in float64, and its losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

BATCH = 6

Optimizers = Callable[["Model"], list[torch.optim.Optimizer]]


class Model(nn.Module):
    """Both kinds of sparse embeddings, dense layers, and two layers that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True)
        self.bag = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
        self.hidden = nn.Linear(8, 16)
        self.rare = nn.Embedding(30, 16, sparse=True)
        self.extra = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, ids: Tensor, use_extra: bool) -> Tensor:
        both = torch.cat([self.words(ids).sum(1), self.bag(ids % 40)], dim=1)
        hidden = torch.tanh(self.hidden(both))
        if use_extra:
            hidden = hidden + self.extra(hidden) + self.rare(ids[:, 0] % 30)
        result: Tensor = self.out(hidden)
        return result

    def sparse(self) -> list[Tensor]:
        return [self.words.weight, self.bag.weight, self.rare.weight]

    def dense(self) -> list[Tensor]:
        return [p for p in self.parameters() if all(p is not sparse for sparse in self.sparse())]


def make_model() -> Model:
    torch.manual_seed(7)
    return Model().double()


def loss_of(model: Model, step: int, rank: int, part: int = 0) -> Tensor:
    """Rank r's loss; rank 0 alone uses ``extra`` and ``rare``, and nobody ``never``."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    # Skewed, so that batches repeat ids and ranks share some.
    ids = (50 * torch.rand((BATCH, 3), generator=generator) ** 2).long()
    wanted = torch.randn((BATCH, 1), generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(ids, use_extra=rank == 0), wanted)


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=0.3)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
    "sparse adam and adam": lambda model: [
        torch.optim.SparseAdam(model.sparse(), lr=0.05),
        # A decay would change `never`, if it ever got a gradient.
        torch.optim.AdamW(model.dense(), lr=0.05, weight_decay=0.1),
    ],
}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_bits(states: Sequence[dict[str, Tensor]]) -> None:
    """All have the bits of the first."""
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


def assert_same(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(state, wanted, rtol=1e-9, atol=1e-12)
