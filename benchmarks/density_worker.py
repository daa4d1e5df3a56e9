"""One worker of ``bench_density.py``: sparsifies gradients of known shape. Runs under ``zenps launch``.

Rank 0 writes a :class:`Curve` as JSON.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from training_worker import run_worker

import zenps as zps

LAYERS = 40
POOL = 6
"""Different draws, which are shifted anew in each step: drawing takes longer than all else."""


class Case(msgspec.Struct, frozen=True):
    """The gradients."""

    seed: int
    size: int
    steps: int
    drop_at: int
    """From this step on they are ten times smaller."""


class Curve(msgspec.Struct):
    """Of each step."""

    union: list[int]
    """Elements that any rank has selected."""
    selected: list[int]
    """Elements that a rank has selected, the mean over ranks, rounded."""
    imbalance: list[float]
    """f = n · max kᵢ ÷ Σ kᵢ of what ranks have selected."""
    moved_bytes: list[int]
    """What rank 0 has pushed and pulled."""
    seconds: list[float] = msgspec.field(default_factory=list)
    """Backward and step on rank 0, which begin on all ranks at once; older reports lack it."""


class Gradients:
    """Heavy-tailed gradients of layers of different scale. What ranks have in common is half of them."""

    def __init__(self, case: Case, rank: int) -> None:
        common, own = (np.random.default_rng([case.seed, number]) for number in (0, 1 + rank))
        layers = np.exp(common.normal(0, 1.5, LAYERS))
        self._scales = (1e-3 * np.repeat(layers, -(-case.size // LAYERS))[: case.size]).astype(np.float32)
        self._common, self._own = _pool(common, case.size), _pool(own, case.size)
        self._shifts = np.random.default_rng([case.seed, 1 << 20, rank])
        self._common_shifts = np.random.default_rng([case.seed, 1 << 21])
        self._case = case

    def draw(self, step: int) -> NDArray[np.float32]:
        """That of one step."""
        parts = [
            np.roll(pool[step % POOL], shifts.integers(self._case.size))
            for pool, shifts in ((self._common, self._common_shifts), (self._own, self._shifts))
        ]
        scale = np.float32(0.1 if step >= self._case.drop_at else 1)
        return scale * self._scales * (np.float32(0.5) * parts[0] + parts[1])


def _pool(drawn: np.random.Generator, size: int) -> list[NDArray[np.float32]]:
    return [drawn.standard_t(3, size).astype(np.float32) for _ in range(POOL)]


def push(case: Case) -> Curve:
    """Trains a model whose gradient is what is drawn; it does not learn."""
    rows = 1000
    weight = torch.nn.Parameter(torch.zeros(rows, case.size // rows))
    optimizer = zps.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("weight", weight)])
    gradients, curve = Gradients(case, zps.rank()), Curve([], [], [], [], [])
    for step in range(case.steps):
        optimizer.zero_grad()
        drawn = torch.from_numpy(gradients.draw(step)).view(weight.shape)
        before = zps.stats()
        zps.barrier()
        begin = time.perf_counter()
        (weight * drawn).sum().backward()
        optimizer.step()
        curve.seconds.append(time.perf_counter() - begin)
        after = zps.stats()
        curve.union.append(after.union_elements - before.union_elements)
        curve.moved_bytes.append(
            after.pushed_bytes + after.pulled_bytes - before.pushed_bytes - before.pulled_bytes
        )
        selected = torch.zeros(zps.size(), dtype=torch.int64)
        # Without the presence element of the bucket.
        selected[zps.rank()] = max(after.selected_elements - before.selected_elements - 1, 0)
        by_rank = zps.push_pull(selected, "selected", average=False)
        curve.selected.append(round(float(by_rank.double().mean())))
        curve.imbalance.append(zps.size() * int(by_rank.max()) / max(int(by_rank.sum()), 1))
    return curve


if __name__ == "__main__":
    run_worker(Case, push)
