"""One worker of ``bench_convergence.py``: trains a dense classifier, reproducibly.

Runs under ``zenps launch``. Rank 0 writes a :class:`Curve` as JSON.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from training_worker import run_worker

import zenps as zps
from zenps.worker.sparsify.selection import Gradient

INPUTS, CLASSES = 64, 10


class Case(msgspec.Struct, frozen=True):
    """The training."""

    seed: int
    steps: int
    forgets: bool
    """True to train without error feedback."""
    hidden: int = 256
    batch: int = 32
    """Of each rank."""
    learning_rate: float = 0.05
    momentum: float = 0.9


class Curve(msgspec.Struct):
    """The result of a training."""

    losses: list[float]
    """Of each step, mean over ranks."""
    bytes_by_step: list[int]
    """What rank 0 has pushed and pulled of gradients up to each step."""
    whole_elements: int
    selected_elements: int
    union_elements: int


def train(case: Case) -> Curve:
    """Trains on the classes that a teacher gives; ranks draw different inputs."""
    torch.manual_seed(case.seed)
    model = nn.Sequential(
        nn.Linear(INPUTS, case.hidden), nn.ReLU(),
        nn.Linear(case.hidden, case.hidden), nn.ReLU(),
        nn.Linear(case.hidden, CLASSES),
    )  # fmt: skip
    teacher = Teacher(case.seed)
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), case.learning_rate, case.momentum), model.named_parameters()
    )
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    batches = torch.Generator().manual_seed(1000 * case.seed + zps.rank())
    losses, moved, before = [], [], _moved()
    for _ in range(case.steps):
        inputs, labels = teacher.batch(case.batch, batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        moved.append(_moved() - before)
        losses.append(round(zps.push_pull(loss.detach(), "loss").item(), 5))
        before += _moved() - before - moved[-1]  # without those of the loss
    stats = zps.stats()
    return Curve(losses, moved, stats.whole_elements, stats.selected_elements, stats.union_elements)


class Teacher:
    """A random network, whose classes are to be learned."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._first = torch.randn(INPUTS, 16, generator=generator)
        self._second = torch.randn(16, CLASSES, generator=generator)

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs that were never drawn before, and their classes."""
        inputs = torch.randn(size, INPUTS, generator=generator)
        return inputs, (torch.tanh(inputs @ self._first / 8) @ self._second).argmax(1)


def _moved() -> int:
    stats = zps.stats()
    return stats.pushed_bytes + stats.pulled_bytes


def forget(case: Case) -> None:
    """Has every selection begin without the residual, if the case says so: what was not pushed is lost."""
    if not case.forgets:
        return
    select = Gradient.select

    def without_residual(self: Gradient, tensor: Tensor) -> Tensor:
        self.residual.zero_()
        return select(self, tensor)

    Gradient.select = without_residual  # type: ignore[method-assign]


if __name__ == "__main__":
    run_worker(Case, train, forget)
