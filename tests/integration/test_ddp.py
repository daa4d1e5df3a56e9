"""DistributedDataParallel with our hook, against one process that sees the concatenated batch."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, attempt, await_file
from tests.integration.embedding_model import state_of
from tests.integration.interrupts import interrupted_in
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.process import PROCESS

RANKS = 2
STEPS = 5


class Model(nn.Module):
    """Two sparse tables and enough dense parameters for several of DDP's buckets.

    With checkpoints the backward of the layers is a backward of its own inside that of the tables.
    """

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.words = nn.Embedding(60, 8, sparse=True)
        self.bag = nn.EmbeddingBag(40, 8, mode="mean", sparse=True)
        self.layers = nn.Sequential(
            nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.words(ids).sum(1), self.bag(ids % 40)], dim=1)
        if self.checkpoints:
            both = checkpoint(self.layers[:3], both, use_reentrant=True)
        result: Tensor = (self.layers[3:] if self.checkpoints else self.layers)(both)
        return result


def make_model(checkpoints: bool = False) -> Model:
    torch.manual_seed(3)
    return Model(checkpoints).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = (60 * torch.rand((6, 3), generator=generator) ** 2).long()
    wanted = torch.randn((6, 1), generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(ids), wanted)


def train(
    make_state: Any, checkpoints: bool = False, **options: Any
) -> tuple[dict[str, Tensor], list[str], list[list[int]], int]:
    """The weights after some steps; the kinds of gradients that were pushed; by step, their priorities; the
    most buckets that were in flight at once.
    """
    pushed: list[str] = []
    priorities: list[list[int]] = []
    begin, state, in_flight = PROCESS.world.begin, make_state(), 0

    def watched(request: Request) -> Any:
        assert request.options.purpose == "gradient"
        pushed.append("sparse" if request.tensor.is_sparse else "dense")
        priorities[-1].append(request.options.priority)
        nonlocal in_flight
        in_flight = max(in_flight, 1 + len(state._in_flight) if state else 0)
        return begin(request)

    model = make_model(checkpoints)
    # Small buckets, so that there are several, and DDP makes new ones after the first step.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.05, **options)
    parallel.register_comm_hook(state, zps.comm_hook)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    PROCESS.world.begin = watched  # type: ignore[method-assign]
    for step in range(STEPS):
        priorities.append([])
        optimizer.zero_grad()
        loss_of(parallel, step, zps.rank()).backward()
        optimizer.step()
    PROCESS.world.begin = begin  # type: ignore[method-assign]
    return state_of(model), pushed, priorities, in_flight


def join_group(store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=zps.rank(), world_size=zps.size())


def run_all(store: Path) -> dict[str, Any]:
    join_group(store)
    results = {
        "gloo for dense": train(lambda: zps.CommHookState(dense_group=dist.group.WORLD)),
        "ours for both": train(zps.CommHookState),
        "no state": train(lambda: None),
        "copied state": train(lambda: copy.deepcopy(zps.CommHookState())),
        "unused parameters": train(zps.CommHookState, find_unused_parameters=True),
        "static graph": train(zps.CommHookState, static_graph=True),
        "checkpoints": train(zps.CommHookState, checkpoints=True),
        "both": train(zps.CommHookState, checkpoints=True, static_graph=True),
    }
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with Cluster() as cluster:
        return cluster.run(run_all, tmp_path_factory.mktemp("ddp") / "store")


def train_in_one_process() -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum((loss_of(model, step, rank) for rank in range(RANKS)), torch.zeros(())) / RANKS).backward()
        optimizer.step()
    return state_of(model)


WAYS = [
    *("gloo for dense", "ours for both", "no state", "copied state"),
    *("unused parameters", "static graph", "checkpoints", "both"),
]


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_one_process(results: list[dict[str, Any]], way: str) -> None:
    wanted = train_in_one_process()
    (first, *_), (second, *_) = (outcome[way] for outcome in results)
    torch.testing.assert_close(first, wanted, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_travels_over_which_way(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        assert outcome["gloo for dense"][1] == ["sparse"] * 2 * STEPS
        assert outcome["ours for both"][1].count("sparse") == 2 * STEPS
        # One bucket in the first step, and several once DDP knows the order of the gradients.
        assert outcome["ours for both"][1].count("dense") > STEPS


def test_results_are_waited_for_at_the_end_of_backward(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        _, pushed, _, in_flight = outcome["ours for both"]
        assert in_flight == pushed.count("sparse") // STEPS + (pushed.count("dense") - 1) // (STEPS - 1)


def test_what_backward_computes_last_is_the_most_important(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        for priorities in outcome["ours for both"][2]:
            assert priorities == list(range(len(priorities)))


def train_in_groups_of_one(store: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{store}{zps.rank()}", rank=0, world_size=1)
    parallel = DistributedDataParallel(nn.Linear(1, 1))
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    failed = attempt(parallel(torch.full((1,), 2.0 * zps.rank())).sum().backward)
    dist.destroy_process_group()
    assert parallel.module.weight.grad is not None
    return failed or parallel.module.weight.grad.item()


@pytest.mark.parametrize("is_elastic", [False, True])
def test_workers_outside_of_the_group_are_refused_unless_they_may_join_late(
    tmp_path: Path, is_elastic: bool
) -> None:
    settings = {"cluster.on_worker_loss": "continue" if is_elastic else "fail"}
    with Cluster(servers=1, settings=settings) as cluster:
        found = cluster.run(train_in_groups_of_one, tmp_path / "store")
    if is_elastic:
        assert found == [1.0, 1.0]
    else:
        assert [each.kind for each in found] == ["UsageError"] * 2
        assert all("expected the 2 workers as ranks" in each.text for each in found)
        assert all("got a group of 1" in each.text for each in found)


def look_up_on_rank_0_alone(store: Path) -> tuple[list[bool], dict[str, Tensor]]:
    """As docs/usage.md has it; no rank does so in the last step. By step, whether there are rows."""
    join_group(store)
    parallel = DistributedDataParallel(make_model().words)
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    rows = []
    for step in range(3):
        optimizer.zero_grad()
        ids = torch.arange(3 if zps.rank() == 0 and step < 2 else 0)
        parallel(ids).square().sum().backward()
        (parameter,) = parallel.parameters()
        assert parameter.grad is not None
        rows.append(bool(parameter.grad._nnz()))
        optimizer.step()
    dist.destroy_process_group()
    return rows, state_of(parallel)


def test_rank_that_looks_up_no_rows_gets_those_of_the_others(tmp_path: Path) -> None:
    with Cluster() as cluster:
        (rows, weights), (rows_too, weights_too) = cluster.run(look_up_on_rank_0_alone, tmp_path / "store")
    assert rows == rows_too == [True, True, False]
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)


def leave_a_table_out(store: Path, keeps: bool) -> Any:
    """Rank 1 leaves the second table out in step 1, and both do in step 2; its gradients, or the error."""
    join_group(store)
    model = make_model()
    parallel = DistributedDataParallel(_Choosing(model), find_unused_parameters=True)
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    gradients: list[Any] = []
    for users in ((0, 1), (0,), (), (0, 1)):
        parallel.zero_grad(set_to_none=not keeps)
        failed = attempt(parallel(torch.arange(3) + 5 * zps.rank(), zps.rank() in users).backward)
        if failed is not None:
            return failed
        assert model.bag.weight.grad is not None
        gradients.append(model.bag.weight.grad.to_dense())
    zps.barrier()
    dist.destroy_process_group()
    return gradients


class _Choosing(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.words, self.bag = model.words, model.bag

    def forward(self, ids: Tensor, uses_both: bool) -> Tensor:
        words = self.words(ids).square().sum()
        return words + self.bag(ids[None]).square().sum() if uses_both else words


def test_a_table_that_a_rank_leaves_out_needs_a_gradient_that_stays(tmp_path: Path) -> None:
    """As docs/usage.md has it. PyTorch demands a gradient of each sparse parameter, if only an old one."""
    weight = make_model().bag.weight.detach().requires_grad_()

    def gradient(*ranks: int) -> Tensor:
        losses = [nn.functional.embedding_bag((torch.arange(3) + 5 * r)[None], weight) for r in ranks]
        total = sum(((each.square().sum()) for each in losses), start=0 * weight.sum())
        return torch.autograd.grad(total, weight)[0] / RANKS

    with Cluster() as cluster:
        first, second = cluster.run(leave_a_table_out, tmp_path / "store", True)
    for got, other, ranks in zip(first, second, ((0, 1), (0,), (), (0, 1)), strict=True):
        torch.testing.assert_close(got, gradient(*ranks), rtol=1e-12, atol=1e-15)
        assert torch.equal(got, other)


@pytest.mark.long
def test_pytorch_refuses_a_table_that_a_rank_leaves_out(tmp_path: Path) -> None:
    with Cluster() as cluster:
        _, second = cluster.run(leave_a_table_out, tmp_path / "store", False)
    assert second.kind == "RuntimeError"
    assert "Expected sparse gradient to be defined" in second.text


def train_until_alone(store: Path, kind: str, end: str) -> Any:
    """What each backward raises once rank 1 has gone."""
    join_group(store)
    model = {"sparse": nn.Embedding(60, 8, sparse=True), "dense": nn.Linear(8, 8), "both": make_model()}[kind]
    inputs = torch.ones(8) if kind == "dense" else torch.ones(6, 3).long()
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    raised = []
    for step in range(4):
        parallel.zero_grad()
        loss = parallel(inputs).sum()  # in the second step this needs all ranks: DDP makes its buckets anew
        if step == 2 and zps.rank() == 1:
            if end == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return None
        raised.append(attempt(loss.backward))
    return raised[2:]


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        pytest.param("sparse", "leaves", marks=pytest.mark.long),
        pytest.param("dense", "leaves", marks=pytest.mark.long),
        ("both", "is killed"),
    ],
)
def test_backward_raises_what_zenps_raises(tmp_path: Path, kind: str, end: str) -> None:
    """Twice: DDP's own state is as after any step, so its next forward does not fail."""
    with Cluster(lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train_until_alone, tmp_path / "store", kind, end, rank=r) for r in range(2)]
        first, second = workers[0].result()
    assert first.kind == second.kind == "PeerLostError", (first, second)
    assert "worker 1" in first.text


def lose_the_server(store: Path, lost: Path) -> Any:
    join_group(store)
    parallel = DistributedDataParallel(make_model())
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    loss_of(parallel, 0, zps.rank()).backward()
    (store.parent / f"ready{zps.rank()}").touch()
    await_file(lost)
    return attempt(loss_of(parallel, 1, zps.rank()).backward)


def test_backward_raises_on_all_ranks_when_the_last_server_is_killed(tmp_path: Path) -> None:
    with Cluster(servers=1, settings={"cluster.rendezvous_seconds": 3}) as cluster:
        lost = tmp_path / "lost"
        workers = [cluster.start(lose_the_server, tmp_path / "store", lost, rank=rank) for rank in range(2)]
        for rank in range(2):
            await_file(tmp_path / f"ready{rank}")
        cluster.servers[0].kill()
        lost.touch()
        assert [worker.result().kind for worker in workers] == ["PeerLostError"] * 2


def interrupt_backward(store: Path) -> list[dict[str, Tensor]]:
    """Rank 0 gets Ctrl-C while it waits for rank 1, and goes on; the gradients of all steps."""
    join_group(store)
    parallel = DistributedDataParallel(make_model())
    parallel.register_comm_hook(zps.CommHookState(), zps.comm_hook)
    gradients, interrupted = [], store.parent / "interrupted"
    for step in range(3):
        parallel.zero_grad()
        loss = loss_of(parallel, step, zps.rank())
        if step == 1 and zps.rank() == 0:
            with interrupted_in(Pending.wait):
                loss.backward()
            interrupted.touch()
        else:
            if step == 1:
                await_file(interrupted)
            loss.backward()
        zps.barrier()
        gradients.append(
            {name: p.grad.to_dense() for name, p in parallel.named_parameters() if p.grad is not None}
        )
    return gradients


def test_ctrl_c_ends_the_wait_and_the_next_step_is_as_ever(tmp_path: Path) -> None:
    with Cluster() as cluster:
        interrupted, whole = cluster.run(interrupt_backward, tmp_path / "store")
    for step in (0, 2):
        torch.testing.assert_close(interrupted[step], whole[step], rtol=0, atol=0)
    assert not torch.equal(interrupted[1]["module.layers.0.weight"], whole[1]["module.layers.0.weight"])
