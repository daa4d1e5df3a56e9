"""Workers that are lost while others go on without them, and come back at the end of a step."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster, Raised, attempt, await_file
from tests.integration.embedding_model import OPTIMIZERS, Model, assert_same, loss_of, make_model, state_of
from tests.integration.progress import await_step, report, step_of
from zenps.wire.messages import Push
from zenps.worker.core.pending import Pending
from zenps.worker.core.transfer import Answer, EncodedTensor
from zenps.worker.process import PROCESS
from zenps.worker.rounds.states import Frames
from zenps.worker.training import elastic
from zenps.worker.transport.server_sockets import ServerSockets

STEP_SECONDS = 0.03
"""Training would otherwise be over before anything can happen to it."""

ALL = (0, 1, 2)

State = dict[str, Tensor]


class Step(NamedTuple):
    """What a worker has after a step; ``ranks`` took part in it, as far as its last round tells."""

    ranks: tuple[int, ...]
    size: int
    state: State
    optimizers: list[dict[str, Any]]


def going_on(workers: int = 3, servers: int = 2) -> Cluster:
    settings = {"cluster.on_worker_loss": "continue"}
    return Cluster(workers, servers, settings, LEASE_SECONDS)


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    return OPTIMIZERS["sparse adam and adam"](model)


def train(path: Path, fail_at: int = -1) -> dict[int, Step]:
    """Trains until ``path/until`` is there; says how far it is, and returns what it has after each step."""
    model = make_model()
    optimizers = [zps.DistributedOptimizer(o, model.named_parameters()) for o in optimizers_of(model)]
    state = zps.TrainingState(model, optimizers, step=0, has_ended=False)
    steps = {}
    while not state.has_ended:
        loss_of(model, state.step, zps.rank()).backward()
        if state.step == fail_at:
            raise RuntimeError("as a script does that fails")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        has_ended = zps.push_pull(torch.tensor([int((path / "until").exists())]), "until", average=False)
        # Large enough to be split over all servers.
        who = zps.push_pull(torch.full((70_000,), 1 << zps.rank()), "who", average=False)
        ranks = tuple(rank for rank in ALL if int(who[0]) >> rank & 1)
        own = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
        steps[state.step] = Step(ranks, zps.size(), state_of(model), own)
        report(path, zps.rank(), state.step)
        state.step += 1
        state.has_ended = bool(has_ended)
        state.commit()
        time.sleep(STEP_SECONDS)
    return steps


def train_in_one_process(steps: dict[int, Step], since: int, count: int, ranks: tuple[int, ...]) -> State:
    """The weights ``count`` steps later, if these ranks have taken part in them."""
    model = make_model()
    model.load_state_dict(steps[since].state)
    optimizers = optimizers_of(model)
    for optimizer, own in zip(optimizers, steps[since].optimizers, strict=True):
        optimizer.load_state_dict(own)
    for step in range(since + 1, since + 1 + count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum((loss_of(model, step, rank) for rank in ranks), torch.zeros(())) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return state_of(model)


class Training:
    """Three workers that train on a cluster to which things happen."""

    def __init__(self, cluster: Cluster, path: Path, failing: int = -1) -> None:
        self.cluster = cluster
        self._path = path
        self.workers = [cluster.start(train, path, 7 if rank == failing else -1, rank=rank) for rank in ALL]

    def restart(self, rank: int) -> None:
        """Another process takes the rank."""
        self.workers[rank] = self.cluster.start(train, self._path, rank=rank)

    def await_steps(self, more: int, ranks: tuple[int, ...] = ALL) -> None:
        """Waits until these have done so many more steps."""
        for rank in ranks:
            await_step(self._path, rank, step_of(self._path, rank) + more, self.workers[rank])

    def finish(self, ranks: tuple[int, ...] = ALL) -> dict[int, dict[int, Step]]:
        """The steps of each rank."""
        (self._path / "until").touch()
        results = {rank: self.workers[rank].result() for rank in ranks}
        self.cluster.drain()
        return results


def assert_equal_at_each_step(results: dict[int, dict[int, Step]]) -> None:
    (first, *others) = results.values()
    last = max(first)
    for steps in others:
        assert max(steps) == last
        for step in steps.keys() & first.keys():
            state, expected = steps[step].state, first[step].state
            assert [name for name in state if not torch.equal(state[name], expected[name])] == [], step


def first_step(steps: dict[int, Step], ranks: tuple[int, ...], after: int = -1) -> int:
    """The first after ``after`` in which these, and no others, took part."""
    return min(step for step in steps if step > after and steps[step].ranks == ranks)


def test_the_others_go_on_and_a_restarted_worker_comes_back(tmp_path: Path) -> None:
    with going_on() as cluster:
        training = Training(cluster, tmp_path)
        training.await_steps(5)
        training.workers[1].kill()
        cluster.await_epoch(2)
        assert {node.rank: node.state for node in cluster.nodes("worker")} == {
            0: "present", 1: "lost", 2: "present"
        }  # fmt: skip
        training.await_steps(5, (0, 2))
        training.restart(1)
        training.await_steps(5)
        results = training.finish()
    assert_equal_at_each_step(results)
    steps = results[0]
    lost = first_step(steps, (0, 2))
    assert_same(steps[lost + 3].state, train_in_one_process(steps, lost, 3, (0, 2)))
    back = first_step(steps, ALL, after=lost)
    # Servers hear of a loss before workers do, and complete rounds without the lost one.
    assert 2 in (steps[step].size for step in range(lost, back))
    assert min(results[1]) == back, "it begins where the others are"
    assert steps[back].size == 3
    assert_same(steps[back + 2].state, train_in_one_process(steps, back - 1, 3, ALL))


def test_a_worker_whose_script_raises_is_done_without_at_once(tmp_path: Path) -> None:
    with going_on() as cluster:
        training = Training(cluster, tmp_path, failing=2)
        assert training.workers[2].wait() == 1
        training.await_steps(5, (0, 1))
        results = training.finish((0, 1))
    assert_equal_at_each_step(results)
    assert results[0][max(results[0])].ranks == (0, 1)
    assert results[0][7].ranks == (0, 1), "it had not come to the last round of that step"


@pytest.mark.long
def test_two_are_lost_at_once_and_both_come_back(tmp_path: Path) -> None:
    with going_on() as cluster:
        training = Training(cluster, tmp_path)
        training.await_steps(5)
        for rank in (0, 1):  # the state is then that of the last one
            training.workers[rank].kill()
        training.await_steps(5, (2,))
        for rank in (0, 1):
            training.restart(rank)
        training.await_steps(5)
        results = training.finish()
    assert_equal_at_each_step(results)
    steps = results[2]
    alone = first_step(steps, (2,))
    assert_same(steps[alone + 2].state, train_in_one_process(steps, alone, 2, (2,)))
    assert steps[max(steps)].ranks == ALL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_joining_worker_that_dies_before_it_has_the_state_holds_nobody_up(tmp_path: Path) -> None:
    with going_on() as cluster:
        training = Training(cluster, tmp_path)
        training.await_steps(2)
        training.workers[1].kill()
        cluster.await_epoch(2)
        assert cluster.start(die, rank=1).wait() == -signal.SIGKILL
        training.await_steps(5, (0, 2))
        cluster.await_epoch(4)
        training.restart(1)
        training.await_steps(5)
        results = training.finish()
    assert_equal_at_each_step(results)
    assert results[0][max(results[0])].ranks == ALL


def die_as_the_root(path: Path) -> None:
    """Rank 0, from which all should get the state, is gone when it has told them so."""
    if zps.rank() == 0:
        elastic.broadcast_parameters = lambda *_: die()  # type: ignore[attr-defined]
    model = make_model()
    if zps.rank() == 1:
        torch.nn.init.ones_(model.out.weight)
    state = zps.TrainingState(model, (), rank=zps.rank())
    torch.save((state.rank, model.out.weight), path / f"{zps.rank()}.pt")


@pytest.mark.long
def test_another_takes_the_place_of_a_root_that_dies(tmp_path: Path) -> None:
    with going_on() as cluster:
        workers = [cluster.start(die_as_the_root, tmp_path, rank=rank) for rank in ALL]
        assert workers[0].wait() == -signal.SIGKILL
        for rank in (1, 2):
            workers[rank].result()
            root, weight = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
            assert root == 1
            assert torch.equal(weight, torch.ones_like(weight))
        cluster.drain()


@pytest.mark.long
def test_a_lost_server_and_a_returning_worker(tmp_path: Path) -> None:
    with going_on(servers=3) as cluster:
        training = Training(cluster, tmp_path)
        training.await_steps(2)
        training.workers[1].kill()
        cluster.await_epoch(2)
        training.await_steps(2, (0, 2))  # a server that is lost within the same round ends the job
        training.restart(1)
        cluster.servers[0].kill()
        training.await_steps(20)
        (tmp_path / "until").touch()
        results = {rank: training.workers[rank].result() for rank in ALL}
    assert_equal_at_each_step(results)


# ── without a state ─────────────────────────────────────────────────────────────────────────────


def wait_for_the_dead(what: str, path: Path) -> Any:
    """Rank 1 is killed while the others wait for it."""
    zps.push_pull(torch.ones(1), "all are here")
    values = torch.full((70_000,), float(zps.rank()))
    push = zps.push_pull_async(values, "x") if what == "push" and zps.rank() != 1 else None
    (path / f"{what}{zps.rank()}").touch()
    if zps.rank() == 1:
        time.sleep(DEADLINE_SECONDS)
    if push is not None:
        return attempt(push.wait)
    match what:
        case "barrier":
            return [attempt(zps.barrier), attempt(zps.barrier)]
        case "small broadcast":
            return attempt(zps.broadcast_object, "value", 1)
        case _:
            return attempt(zps.broadcast_parameters, {"x": values}, 1)


def lose_one(what: str, path: Path, *, with_a_server: bool = False) -> list[Any]:
    with going_on() as cluster:
        workers = [cluster.start(wait_for_the_dead, what, path, rank=rank) for rank in ALL]
        for rank in ALL:
            await_file(path / f"{what}{rank}")
        time.sleep(0.5)  # the others begin to wait
        workers[1].kill()
        if with_a_server:
            cluster.servers[0].kill()
        return [workers[rank].result() for rank in (0, 2)]


@pytest.mark.long
def test_a_loss_completes_a_barrier(tmp_path: Path) -> None:
    assert lose_one("barrier", tmp_path) == [[None, None]] * 2


@pytest.mark.long
def test_averages_are_over_those_that_are_present(tmp_path: Path) -> None:
    for result in lose_one("push", tmp_path):
        assert torch.equal(result, torch.full((70_000,), 1.0)), "of 0 and 2"


@pytest.mark.long
def test_a_lost_root_of_a_broadcast_is_an_error(tmp_path: Path) -> None:
    for what in ("small broadcast", "large broadcast"):
        for result in lose_one(what, tmp_path):
            assert isinstance(result, Raised)
            assert result.kind == "RootLostError", "a PeerLostError"
            name = "object" if what.startswith("small") else "parameters"
            text = f"broadcast of '{name}': root 1 is not in the job; present: 0, 2; pass one of these"
            assert text in result.text


def go_on_without_rank_0() -> dict[str, Any]:
    zps.push_pull(torch.ones(1), "all are here")
    if zps.rank() == 0:
        die()
    while zps.size() > 2:
        time.sleep(0.01)
    zps.barrier()  # a rank that did not know of the loss yet would choose another root
    index, one = zps.ranks().index(zps.rank()), torch.ones(1)
    handle = zps.broadcast_async(torch.ones(1), name="later")
    return {
        "ranks": zps.ranks(),
        "saves": zps.rank() == zps.ranks()[0],
        "shard": list(DistributedSampler(TensorDataset(torch.ones(4)), zps.size(), index, shuffle=False)),
        "root": zps.broadcast(torch.tensor(zps.rank()), zps.ranks()[0]).item(),
        "lost root": [
            attempt(zps.synchronize, handle),
            attempt(zps.broadcast, one),
            attempt(zps.broadcast_object, "value"),
            attempt(zps.broadcast_parameters, {"x": one}),
        ],
        "no rank": [attempt(zps.broadcast, one, 3), attempt(zps.broadcast_object, "value", 3)],
    }


def test_the_present_ranks_share_what_rank_0_did() -> None:
    with going_on() as cluster:
        workers = [cluster.start(go_on_without_rank_0, rank=rank) for rank in ALL]
        results = [workers[rank].result() for rank in (1, 2)]
        cluster.drain()
    assert [result["ranks"] for result in results] == [(1, 2), (1, 2)]
    assert [result["saves"] for result in results] == [True, False]
    assert [result["shard"] for result in results] == [[0, 2], [1, 3]]
    assert [result["root"] for result in results] == [1, 1]
    for result in results:
        later, *others = result["lost root"]
        assert later.kind == "RootLostError"
        assert "pass one of zenps.ranks() as root_rank" in later.text
        for error, name in zip(others, ("tensor", "object", "parameters"), strict=True):
            assert error.kind == "RootLostError"
            text = f"broadcast of '{name}': root 0 is not in the job; present: 1, 2; pass one of these"
            assert text in error.text
        assert [error.kind for error in result["no rank"]] == ["UsageError", "UsageError"]


def train_without_rank_0(unfreezes: bool, is_rank_2_late: bool) -> State:
    """Rank 0 is killed before ranks agree on parameters. Rank 2 may know of it before it begins to."""
    model = make_model()

    def wrap() -> zps.DistributedOptimizer:
        return zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    if unfreezes:
        model.out.weight.requires_grad_(False)
        optimizer = wrap()
    zps.push_pull(torch.ones(1), "all are here")
    if zps.rank() == 0:
        die()
    while is_rank_2_late and zps.rank() == 2 and zps.size() > 2:
        time.sleep(0.01)
    if unfreezes:
        model.out.weight.requires_grad_(True)
    else:
        optimizer = wrap()
    loss_of(model, 0, zps.rank()).backward()
    optimizer.step()
    return state_of(model)


@pytest.mark.parametrize(
    ("unfreezes", "is_rank_2_late"),
    [(False, False), (False, True), pytest.param(True, True, marks=pytest.mark.long)],
)
def test_ranks_agree_on_parameters_without_a_lost_one(unfreezes: bool, is_rank_2_late: bool) -> None:
    with going_on() as cluster:
        workers = [cluster.start(train_without_rank_0, unfreezes, is_rank_2_late, rank=rank) for rank in ALL]
        first, second = (workers[rank].result() for rank in (1, 2))
        cluster.drain()
    assert_same(first, second)


def test_a_worker_and_a_server_lost_within_one_round_end_it(tmp_path: Path) -> None:
    for result in lose_one("push", tmp_path, with_a_server=True):
        assert isinstance(result, Raised)
        assert result.kind == "PeerLostError"
        # Workers may hear of both at once, or of the server first: then the other one says so.
        assert (
            "servers have changed, within this round" in result.text
            or "a server and then rank 1 were lost within one round" in result.text
        )


def die_with_a_push_at_one_server() -> Tensor:
    """Rank 2 pushes only to server 0, and is killed when that has its push."""
    own = torch.arange(10) + 10 * zps.rank()
    rows = torch.cat([own, torch.tensor([50])]).unsqueeze(0)
    table = torch.sparse_coo_tensor(
        rows, torch.full((11, 8), 1.0 + zps.rank()), (60, 8), check_invariants=True
    )
    if zps.rank() < 2:
        return zps.push_pull(table, "x", average=False)
    answers: list[Answer] = []
    send, deliver = ServerSockets.send, Pending.deliver

    def send_to_0(sockets: ServerSockets, rank: int, push: Push, frames: Frames) -> tuple[int, int]:
        return send(sockets, rank, push, frames) if rank == 0 else (0, 0)

    def note(pending: Pending, answer: Answer, last: bool) -> Sequence[EncodedTensor]:
        answers.append(answer)
        return deliver(pending, answer, last)

    ServerSockets.send, Pending.deliver = send_to_0, note  # type: ignore[assignment, method-assign]
    handle = zps.push_pull_async(table, "x", average=False)
    while not answers:
        zps.poll(handle)
        time.sleep(0.01)
    die()
    return table


def test_by_element_a_row_may_have_the_push_of_a_lost_rank_in_part() -> None:
    settings = {"cluster.on_worker_loss": "continue", "sync.scheme": "zen"}
    with Cluster(3, 2, settings, LEASE_SECONDS) as cluster:
        workers = [cluster.start(die_with_a_push_at_one_server, rank=rank) for rank in ALL]
        first, second = (workers[rank].result().to_dense() for rank in (0, 1))
        cluster.drain()
    assert torch.equal(first, second)
    for rank in (0, 1):
        assert torch.equal(first[10 * rank : 10 * rank + 10], torch.full((10, 8), 1.0 + rank))
    assert set(first[20:30].unique().tolist()) == {0, 3}
    assert set(first[50].unique().tolist()) <= {3, 6}
    assert not first[30:50].any()


def lose_an_answer(path: Path) -> Tensor:
    """Rank 1 has not looked at its answer when the server is killed; rank 0 waits at a barrier."""
    handle = zps.push_pull_async(torch.full((70_000,), float(zps.rank())), "x")
    if zps.rank() == 1:
        time.sleep(0.5)
        (path / "pushed").touch()
        world: Any = PROCESS.world
        while world._session.lease.view.epoch < 2:
            time.sleep(0.01)
    result = handle.wait()
    zps.barrier()
    return result


def test_a_worker_at_a_barrier_pushes_again_what_others_lack(tmp_path: Path) -> None:
    with Cluster(lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(lose_an_answer, tmp_path, rank=rank) for rank in (0, 1)]
        await_file(tmp_path / "pushed")
        cluster.servers[0].kill()
        for worker in workers:
            assert torch.equal(worker.result(), torch.full((70_000,), 0.5))


def commit_twice() -> int:
    """How many rounds that takes."""
    model = make_model()
    if zps.rank() == 1:
        torch.nn.init.zeros_(model.out.weight)
    state = zps.TrainingState(model=model, step=zps.rank())
    assert state.step == 0
    assert model.out.weight.any(), "that of rank 0"
    before = zps.stats().rounds
    state.commit()
    state.commit()
    return zps.stats().rounds - before


def test_where_a_loss_ends_the_job_a_commit_costs_nothing() -> None:
    with Cluster() as cluster:
        assert cluster.run(commit_twice) == [0, 0]


def never_commit(told: Path) -> None:
    await_file(told)


@pytest.mark.long
def test_a_joining_worker_that_nobody_admits_is_told_why(tmp_path: Path) -> None:
    with going_on(workers=2) as cluster:
        worker = cluster.start(never_commit, tmp_path / "told", rank=0)
        assert cluster.start(die, rank=1).wait() == -signal.SIGKILL
        cluster.await_epoch(2)
        error = cluster.start(
            attempt, zps.init, rank=1, init=False, settings={"cluster.rendezvous_seconds": 0.1}
        ).result()
        assert error.kind == "DeadlineError"
        assert "its workers must call zenps.TrainingState.commit() after each step" in error.text
        (tmp_path / "told").touch()
        worker.result()
        cluster.drain()


def push_too_early() -> list[Raised]:
    early = [attempt(zps.push_pull, torch.ones(1), "x"), attempt(zps.barrier)]
    zps.TrainingState()
    return early


def commit_until_three() -> None:
    state = zps.TrainingState()
    while zps.size() == 3:  # servers may have heard of the loss before this worker
        time.sleep(STEP_SECONDS)
    while zps.size() < 3:
        state.commit()
        time.sleep(STEP_SECONDS)


@pytest.mark.long
def test_a_joining_worker_without_the_state_is_told_to_get_it() -> None:
    with going_on() as cluster:
        workers = [cluster.start(commit_until_three, rank=rank) for rank in (0, 1)]
        first = cluster.start(die, rank=2)
        assert first.wait() == -signal.SIGKILL
        cluster.await_epoch(2)
        for result in cluster.start(push_too_early, rank=2).result():
            assert result.kind == "UsageError"
            assert "construct zenps.TrainingState before" in result.text
        for worker in workers:
            worker.result()
        cluster.drain()
