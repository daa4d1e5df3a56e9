"""One worker of ``bench_values.py``: trains the model of ``examples/lstm_lm.py``, reproducibly.

Runs under ``zenps launch``. Rank 0 writes a :class:`Curve` as JSON.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import torch
from training_worker import run_worker

import zenps as zps
from zenps.worker.core.residuals import Residuals

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import lstm_lm
import text


class Case(msgspec.Struct, frozen=True):
    """The training, and the form of its gradients."""

    steps: int
    forgets: bool
    """True to train without error feedback."""
    vocabulary: int = 10_000
    width: int = 48
    samples: int = 256
    batch: int = 16
    learning_rate: float = 0.1


class Curve(msgspec.Struct):
    """The result of a training."""

    losses: list[float]
    """Of each step, mean over ranks."""
    held_out_loss: float
    pushed_bytes: int
    """By rank 0, in all steps: gradients, and one loss in each step."""
    pulled_bytes: int


def train(case: Case) -> Curve:
    """Trains; the result differs between calls only by the quantization of gradients."""
    torch.manual_seed(zps.rank())
    torch.sparse.check_sparse_tensor_invariants.disable()
    documents = text.read_standard_library()
    vocabulary = text.Vocabulary(text.most_frequent(documents, case.vocabulary))
    held_out = vocabulary.encode(text.held_out(documents))[: lstm_lm.VALIDATION_WORDS + 1]
    own = itertools.islice(text.to_learn(documents), zps.rank(), None, zps.size())
    words = vocabulary.encode(own)
    model = lstm_lm.LanguageModel(len(vocabulary), case.width, case.samples)
    optimizer = zps.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=case.learning_rate), model.named_parameters()
    )
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    before, losses, state = zps.stats(), [], None
    batches = lstm_lm.windows(words, case.batch)
    for _, (inputs, targets) in zip(range(case.steps), batches, strict=False):
        optimizer.zero_grad()
        loss, state = model(inputs, targets, state)
        loss.backward()
        optimizer.step()
        losses.append(zps.push_pull(loss.detach(), "loss").item())
    now = zps.stats()
    loss, _, count = model.validate(held_out).tolist()
    return Curve(
        losses,
        loss / count,
        now.pushed_bytes - before.pushed_bytes,
        now.pulled_bytes - before.pulled_bytes,
    )


def forget(case: Case) -> None:
    """Has every push begin without the residual, if the case says so: what rounding took is lost."""
    if case.forgets:
        Residuals.of = lambda self, name, rows, columns, **_: torch.zeros(rows, columns)  # type: ignore[method-assign]


if __name__ == "__main__":
    run_worker(Case, train, forget)
