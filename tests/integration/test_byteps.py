"""BytePS's names on a cluster. BytePS's own examples are in tests/migration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
import zenps.byteps as bps
from tests.integration.cluster import Cluster, Raised, attempt


def push_pulls() -> dict[str, Any]:
    numbers = torch.tensor([[-3, 1], [0, 2]][bps.rank()])
    first, second = numbers.float(), numbers.clone()
    handle = bps.push_pull_async(numbers, False, "named", 0, 5)
    unnamed = bps.byteps_push_pull(first)
    weight = torch.ones(2, requires_grad=True)
    (bps.push_pull(weight, False, "graph") * (1 + bps.rank())).sum().backward()
    return {
        "asynchronous": bps.synchronize(handle),
        "polled": bps.poll(handle),
        "in place, later": [bps.synchronize(unnamed) is first, first],
        "in place": [bps.push_pull_inplace(second) is second, second],
        "fp16": bps.push_pull(numbers.double(), name="half", compression=bps.Compression.fp16),
        "gradient": weight.grad,
        "narrow": bps.push_pull(torch.tensor([200, 101], dtype=torch.uint8), name="narrow"),
        "declared": bps.declare("named"),
        "no name": attempt(bps.push_pull, numbers),
        "shape": attempt(bps.push_pull, torch.ones(2 + bps.rank()), name="shape"),
    }


def broadcasts() -> dict[str, Any]:
    torch.manual_seed(bps.rank())
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=[0.5, 0.25][bps.rank()], betas=(0.5, 0.75))
    bps.broadcast_parameters(model.state_dict(), root_rank=1)
    bps.broadcast_parameters([torch.ones(1), torch.ones(2)], root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=1)
    group = optimizer.param_groups[0]
    return {
        "weight": model.weight.detach(),
        "hyperparameters": [group["lr"], group["betas"]],
        "object": bps.broadcast_object((bps.rank(), {"nothing": None}), 1, "mine"),
    }


def step_after_synchronize() -> Tensor:
    """As BytePS's documentation has it: synchronize, clip, and step outside of skip_synchronize."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    (weight * (2.0 + 2.0 * bps.rank())).sum().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_value_([weight], 2.5)
    optimizer.step()
    return weight.detach()


class Model(nn.Module):
    """Sparse and dense gradients, a buffer, and a branch that one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, 2, sparse=True)
        self.norm = nn.BatchNorm1d(2)
        self.branch = nn.Linear(2, 2)

    def forward(self, rows: Tensor, takes_branch: bool) -> Tensor:
        hidden: Tensor = self.norm(self.table(rows))
        output: Tensor = self.branch(hidden) if takes_branch else hidden
        return output


def parallel() -> dict[str, Any]:
    torch.manual_seed(bps.rank())
    local = Model()
    model = bps.DistributedDataParallel(local, device_ids=[None])
    rows = torch.tensor([[0, 1], [2, 3 + bps.rank()]])
    with model.no_sync():
        model(rows, True).square().sum().backward()
    model(rows, bps.rank() == 0).square().sum().backward()
    averages = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    if bps.rank() == 0:
        model(rows, True).square().sum().backward()
    else:
        model(rows, True)
        model.synchronize()
    halves = local.branch.weight.grad
    with torch.no_grad():
        model.eval()(rows, True)
    return {"averages": averages, "halves": halves, "mean": local.norm.running_mean}


def averages_around_a_micro_batch_that_is_thrown_away() -> list[dict[str, Tensor]]:
    """Rank 0 alone uses the branch in the micro-batch. The other passes are alike."""
    torch.manual_seed(bps.rank())
    model = bps.DistributedDataParallel(Model())
    rows = torch.tensor([[0, 1], [2, 3 + bps.rank()]])
    averages = []
    for is_after_micro_batch in (False, True, False):
        if is_after_micro_batch:
            with model.no_sync():
                model(rows, bps.rank() == 0).square().sum().backward()
            model.zero_grad()
        model(rows, False).square().sum().backward()
        averages.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        model.zero_grad()
    return averages


def evaluation_on_one_rank() -> list[float]:
    """The average of step k is 1.5 * 10**k. After the backward of step 1, rank 0 also evaluates the model."""
    layer = nn.Linear(1, 1, bias=False)
    model = bps.DistributedDataParallel(layer)
    averages = []
    for step in range(4):
        model.zero_grad()
        (model(torch.ones(1, 1)) * 10**step * (1 + bps.rank())).sum().backward()
        if step == 1 and bps.rank() == 0:
            with torch.no_grad():
                model(torch.ones(1, 1))
        model.synchronize()
        assert layer.weight.grad is not None
        averages.append(layer.weight.grad.item())
    return averages


def refusals() -> dict[str, Any]:
    weight = nn.Parameter(torch.zeros(1))
    return {
        "staleness": attempt(bps.DistributedOptimizer, torch.optim.SGD([weight]), staleness=1),
        "device_ids": attempt(bps.DistributedDataParallel, nn.Linear(1, 1), [0, 1]),
        "suspend": attempt(bps.suspend),
        "resume": attempt(bps.resume, 2, 1, 0),
    }


def everything() -> dict[str, Any]:
    bps.init()
    functions = (push_pulls, broadcasts, step_after_synchronize, parallel, refusals)
    results: dict[str, Any] = {function.__name__: function() for function in functions}
    return results | {
        "evaluation on one rank": attempt(evaluation_on_one_rank),
        "thrown away": attempt(averages_around_a_micro_batch_that_is_thrown_away),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    with Cluster(servers=1) as cluster:
        return cluster.run(everything)


def test_push_pulls(results: list[dict[str, Any]]) -> None:
    for result in results:
        got = result["push_pulls"]
        assert got["asynchronous"].tolist() == [-3, 3]
        assert got["polled"]
        assert got["in place, later"][0]
        assert got["in place, later"][1].tolist() == [-1.5, 1.5]
        assert got["in place"][0]
        assert got["in place"][1].tolist() == [-1, 1]  # towards zero
        assert got["fp16"].tolist() == [-1.5, 1.5]
        assert got["fp16"].dtype == torch.float64
        assert got["gradient"].tolist() == [3, 3]
        assert got["narrow"].tolist() == [200, 101]  # whose sums exceed uint8
        assert got["narrow"].dtype == torch.uint8
        assert got["declared"] == 0
        assert got["no name"].kind == "UsageError"
        assert got["shape"].kind == "MismatchError"


def test_broadcasts(results: list[dict[str, Any]]) -> None:
    for result in results:
        got = result["broadcasts"]
        assert torch.equal(got["weight"], results[1]["broadcasts"]["weight"])
        assert got["hyperparameters"] == [0.25, (0.5, 0.75)]
        assert got["object"] == (1, {"nothing": None})


def test_step_after_synchronize(results: list[dict[str, Any]]) -> None:
    # The average is 3, and clipped to 2.5.
    assert [result["step_after_synchronize"].tolist() for result in results] == [[-2.5] * 3] * 2


def test_parallel(results: list[dict[str, Any]]) -> None:
    """Gradients are averages of what each rank would have had alone, over two passes."""
    alone = {name: torch.zeros(parameter.shape) for name, parameter in Model().named_parameters()}
    torch.manual_seed(0)
    for rank in (0, 1):
        torch.manual_seed(0)
        model = Model()  # both have the weights of rank 0
        rows = torch.tensor([[0, 1], [2, 3 + rank]])
        for takes_branch in (True, rank == 0):
            model(rows, takes_branch).square().sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                alone[name] += parameter.grad.to_dense() / 2
    for result in results:
        got = result["parallel"]
        for name, average in got["averages"].items():
            assert average.is_sparse == name.endswith("table.weight")
            torch.testing.assert_close(average.to_dense(), alone[name.removeprefix("module.")])
        assert got["halves"].abs().sum() > 0
        assert torch.equal(got["halves"], results[0]["parallel"]["halves"])


def test_evaluation_on_one_rank_leaves_averages_as_they_are(results: list[dict[str, Any]]) -> None:
    assert [result["evaluation on one rank"] for result in results] == [[1.5, 15, 150, 1500]] * 2


def test_a_micro_batch_that_is_thrown_away_leaves_averages_as_they_are(results: list[dict[str, Any]]) -> None:
    """Rank 0 raised in each backward from then on, and rank 1 waited for it."""
    for result in results:
        expected, *others = result["thrown away"]
        assert sorted(expected) == ["module.norm.bias", "module.norm.weight", "module.table.weight"]
        for averages in others:
            assert averages.keys() == expected.keys()
            for name, average in averages.items():
                assert torch.equal(average.to_dense(), expected[name].to_dense())


def test_refusals(results: list[dict[str, Any]]) -> None:
    expected = {
        "staleness": "set sync.consistency = ssp and sync.staleness",
        "device_ids": "expected one",
        "suspend": "suspend: a job is not paused",
        "resume": "resume: a job is not paused",
    }
    for result in results:
        for case, text in expected.items():
            raised = result["refusals"][case]
            assert isinstance(raised, Raised)
            assert raised.kind == "UsageError"
            assert text in raised.text


def test_alone() -> None:
    """Without a cluster, as when a script is tried out."""
    import zenps.horovod as hvd

    hvd.init()
    try:
        assert (hvd.rank(), hvd.size(), hvd.cross_size(), hvd.join()) == (0, 1, 1, 0)
        assert hvd.allreduce(torch.tensor([3])).tolist() == [3]
        assert hvd.allgather_object((1,)) == [(1,)]
        assert bps.push_pull(torch.tensor([3.0]), name="x").tolist() == [3]
        local = nn.Linear(1, 1)
        model = bps.DistributedDataParallel(local)
        model(torch.ones(1, 1)).sum().backward()
        assert model.module is local
        assert local.weight.grad is not None
        assert local.weight.grad.tolist() == [[1]]
    finally:
        hvd.shutdown()
    assert not zps.is_initialized()


def unnamed_in_two_jobs() -> Tensor:
    """In the first job, rank 0 makes an unnamed call more than rank 1."""
    bps.init()
    handles = [bps.push_pull_async(torch.ones(1), average=False) for _ in range(2 - bps.rank())]
    bps.synchronize(handles[0])
    bps.shutdown()
    bps.init()
    return bps.synchronize(bps.push_pull_async(torch.tensor([1.0 + bps.rank()]), average=False))


@pytest.mark.long
def test_unnamed_tensors_of_a_second_job_are_counted_from_0() -> None:
    with Cluster(settings={"cluster.deadline_seconds": 10, "cluster.rejoin_seconds": 5}) as cluster:
        assert [result.tolist() for result in cluster.run(unnamed_in_two_jobs)] == [[3.0], [3.0]]
