"""One worker of ``bench_convergence.py``: trains a model without sparse gradients, reproducibly.

Runs under ``zenps launch``. Rank 0 writes :class:`Curves` as JSON.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path
from typing import Literal

import msgspec
import torch
from digits import Digits
from torch import Tensor, nn
from training_worker import run_worker

import zenps as zps
from zenps.worker.sparsify.selection import Gradient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import finetune

Task = Literal["digits", "text"]

CURVE_STEPS = 10
HELD_OUT_WINDOWS = 256


class Case(msgspec.Struct, frozen=True):
    """A training from each of several seeds, in one job: starting one takes longer than a training."""

    task: Task
    seeds: int
    steps: int
    learning_rate: float
    momentum: float
    forgets: bool = False
    """True to train without error feedback."""


class Curve(msgspec.Struct):
    """The result of a training from one seed."""

    losses: list[float]
    """Of the batches, mean over ranks and each :data:`CURVE_STEPS` steps."""
    bytes: list[int]
    """What rank 0 has pushed and pulled of gradients up to the end of these steps."""
    final_loss: float
    """In the end, of data that is the same for all settings."""
    whole_elements: int
    selected_elements: int
    union_elements: int


class Curves(msgspec.Struct):
    """The results of a case."""

    parameters: int
    by_seed: list[Curve]


class Text:
    """An LSTM that predicts each next byte of Python's manual; ranks draw different windows."""

    def __init__(self, seed: int, width: int = 96, batch: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict(
            {
                "bytes": nn.Embedding(finetune.BYTES, 32),
                "lstm": nn.LSTM(32, width, batch_first=True),
                "head": nn.Linear(width, finetune.BYTES),
            }
        )
        text = finetune.as_bytes("\n".join(pydoc_data.topics.topics.values()))
        size = HELD_OUT_WINDOWS * (finetune.WINDOW + 1)
        self._held_out = text[-size:].long().view(HELD_OUT_WINDOWS, -1)
        generator = torch.Generator().manual_seed(1000 * seed + zps.rank())
        self._batches = finetune.batches(text[:-size], batch, generator)

    def next_loss(self) -> Tensor:
        """Of windows that are drawn at random."""
        return self._loss(next(self._batches))

    @torch.no_grad()
    def final_loss(self) -> float:
        """Of the held-out end of the text."""
        return float(self._loss(self._held_out))

    def _loss(self, windows: Tensor) -> Tensor:
        hidden, _ = self.model["lstm"](self.model["bytes"](windows[:, :-1]))
        scores = self.model["head"](hidden)
        return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def train(case: Case) -> Curves:
    """Trains; the result differs between calls only by the sparsifier."""
    by_seed = []
    for seed in range(case.seeds):
        task = Digits(seed) if case.task == "digits" else Text(seed)
        by_seed.append(train_from_seed(case, task))
    return Curves(sum(each.numel() for each in task.model.parameters()), by_seed)


def train_from_seed(case: Case, task: Digits | Text) -> Curve:
    """Trains one model. Residuals and states of the last one have gone with its optimizer."""
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(task.model.parameters(), case.learning_rate, case.momentum),
        task.model.named_parameters(),
    )
    zps.broadcast_parameters(task.model.state_dict(), root_rank=0)
    own: list[Tensor] = []
    losses, moved, begin = [], [], zps.stats()
    before = _moved()
    for step in range(1, case.steps + 1):
        optimizer.zero_grad()
        loss = task.next_loss()
        loss.backward()
        optimizer.step()
        own.append(loss.detach())
        if step % CURVE_STEPS == 0:
            moved.append(_moved() - before)
            losses.append(round(zps.push_pull(torch.stack(own).mean(), "loss").item(), 5))
            before += _moved() - before - moved[-1]  # without those of the loss
            own.clear()
    end = zps.stats()
    return Curve(
        losses,
        moved,
        task.final_loss(),
        end.whole_elements - begin.whole_elements,
        end.selected_elements - begin.selected_elements,
        end.union_elements - begin.union_elements,
    )


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
