"""Workers that are lost while others go on without them, and come back at the end of a step."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, Cluster
from tests.integration.embedding_model import OPTIMIZERS, loss_of, make_model, state_of

LEASE_SECONDS = 1.0
STEP_SECONDS = 0.03
"""Training would otherwise be over before anything can happen to it."""

SETTINGS = {"cluster.on_worker_loss": "continue"}

State = dict[str, Tensor]


def going_on(workers: int = 3, servers: int = 2) -> Cluster:
    return Cluster(workers, servers, SETTINGS, LEASE_SECONDS)


def train(path: Path, until: Path, fail_at: int = -1) -> tuple[State, list[int]]:
    """Trains until the file is there, and says how far it is.

    Returns the weights, and for each step since the start of this worker a bit for each rank that took part.
    """
    model = make_model()
    optimizers = [
        zps.DistributedOptimizer(optimizer, model.named_parameters())
        for optimizer in OPTIMIZERS["sparse adam and adam"](model)
    ]
    state = zps.TrainingState(model, optimizers, step=0, has_ended=False)
    history = []
    while not state.has_ended:
        loss_of(model, state.step, zps.rank()).backward()  # type: ignore[no-untyped-call]
        if state.step == fail_at:
            raise RuntimeError("as a script does that fails")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # Large enough to be split over all servers.
        took_part = zps.push_pull(torch.full((70_000,), 1 << zps.rank()), "who", average=False)
        history.append(int(took_part[0]))
        assert (took_part == took_part[0]).all() or len(history) > 1
        state.step += 1
        _report(path, state.step)
        everyone = zps.push_pull(torch.tensor([int(until.exists())]), "until", average=False)
        state.has_ended = bool(everyone)
        state.commit()
        time.sleep(STEP_SECONDS)
    return state_of(model) | {"step": torch.tensor(state.step)}, history


def _report(path: Path, step: int) -> None:
    partial = path / f"{zps.rank()}.partial"
    partial.write_text(str(step))
    partial.rename(path / f"step{zps.rank()}")


class Training:
    """Three workers that train on a cluster to which things happen."""

    def __init__(self, cluster: Cluster, path: Path, fail_at: dict[int, int] | None = None) -> None:
        self.cluster = cluster
        self._path = path
        self.until = path / "until"
        self.workers = [
            cluster.start(train, path, self.until, (fail_at or {}).get(rank, -1), rank=rank)
            for rank in range(cluster.size)
        ]

    def restart(self, rank: int) -> None:
        (self._path / f"step{rank}").unlink(missing_ok=True)
        self.workers[rank] = self.cluster.start(train, self._path, self.until, rank=rank)

    def await_steps(self, more: int, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        """Waits until these have done so many more."""
        for rank in ranks:
            self._await(rank, self._step(rank) + more)

    def finish(self, ranks: tuple[int, ...] = (0, 1, 2)) -> dict[int, tuple[State, list[int]]]:
        self.until.touch()
        results = {rank: self.workers[rank].result() for rank in ranks}
        self.cluster.drain()
        return results

    def _step(self, rank: int) -> int:
        file = self._path / f"step{rank}"
        return int(file.read_text()) if file.exists() else -1

    def _await(self, rank: int, step: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self._step(rank) < step:
            worker = self.workers[rank]
            assert worker.alive, worker.log
            assert time.monotonic() < deadline, f"step {self._step(rank)} of {step}:\n{worker.log}"
            time.sleep(0.01)


def assert_equal(results: dict[int, tuple[State, list[int]]]) -> None:
    states = [state for state, _ in results.values()]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert [name for name, tensor in state.items() if not torch.equal(tensor, states[0][name])] == []


def test_the_others_go_on_and_a_restarted_worker_comes_back(tmp_path: Path) -> None:
    with going_on() as cluster:
        training = Training(cluster, tmp_path)
        training.await_steps(5)
        training.workers[1].kill()
        cluster.await_epoch(2)
        training.await_steps(5, (0, 2))
        training.restart(1)
        training.await_steps(5)
        results = training.finish()
    assert_equal(results)
    _, history = results[0]
    print(history)
    print([h for _, h in results.values()])
