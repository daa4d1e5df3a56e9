"""Horovod's names on a cluster. Horovod's own tests are in tests/migration."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import zenps as zps
import zenps.horovod as hvd
from tests.integration.cluster import Cluster, Raised, attempt, await_file
from tests.integration.interrupts import interrupted_in
from zenps.horovod import turns
from zenps.horovod.turns import TURNS
from zenps.worker.core.pending import Pending
from zenps.worker.training.gradients.agreement import ParameterAgreement
from zenps.worker.transport.lease import Lease

LOOPS = {0: 5, 1: 2, 2: 3}
"""How many batches each rank has."""

NARROW = [([200, 255], torch.uint8), ([-128, 127], torch.int8), ([-2_000_000_000], torch.int32)]
"""Numbers whose sum over two ranks exceeds their dtype."""

TRUTHS: list[Any] = [False, 0, numpy.False_, True, 1, numpy.True_]
"""What scripts pass as ``average``."""


def reductions() -> dict[str, Any]:
    numbers = torch.tensor([[-3, 1, 7], [0, 2, 2]][hvd.rank()], dtype=torch.int32)
    ops = {op.name: op for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)}
    in_place = numbers.clone()
    return {
        **{name: hvd.allreduce(numbers, op=op) for name, op in ops.items()},
        **{f"old average {given!r}": hvd.allreduce(numbers, given) for given in TRUTHS},
        "complex": hvd.allreduce(torch.tensor([1 + 2j]), op=hvd.Product, prescale_factor=2.0),
        "prescaled": hvd.allreduce(numbers, op=hvd.Sum, prescale_factor=0.5),
        "postscaled": hvd.allreduce(numbers.float(), op=hvd.Sum, postscale_factor=0.5),
        "fp16": hvd.allreduce(numbers.double(), name="compressed", compression=hvd.Compression.fp16),
        "in place": [hvd.allreduce_(in_place, op=hvd.Sum) is in_place, in_place],
        "group": hvd.grouped_allreduce([numbers, numbers.float()], op=hvd.Sum),
        "no group": hvd.grouped_allreduce([]),
        "narrow": [hvd.allreduce(torch.tensor(each, dtype=dtype)) for each, dtype in NARROW],
        "narrow and sparse": hvd.allreduce(torch.tensor([0, 200], dtype=torch.uint8).to_sparse()),
        "sparse": hvd.sparse_allreduce_async(numbers.float().to_sparse(), "sparse", hvd.Average)(),
    }


def gathers() -> dict[str, Any]:
    own = torch.full((1 + hvd.rank(), 2), float(hvd.rank()))
    in_place = own[0].clone()
    handle = hvd.allgather_async(own, "asynchronous")
    objects = {"tuple": (1, {2, 3}), (4, "key"): torch.tensor([[1.5]]), "rank": hvd.rank()}
    return {
        "allgather": hvd.allgather(own),
        "asynchronous": hvd.synchronize(handle),
        "same handle": hvd.synchronize(handle),
        "numbers": hvd.allgather(torch.tensor(hvd.rank())),
        "numbers in a group": hvd.grouped_allgather([own[:0], torch.tensor(hvd.rank())])[1],
        "polled": hvd.poll(handle),
        "broadcast": hvd.broadcast(own[0], 1),
        "in place": [hvd.broadcast_(in_place, 1) is in_place, in_place],
        "object": hvd.broadcast_object(objects, 1),
        "objects": hvd.allgather_object((hvd.rank(), None)),
    }


def gradients() -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    calls: dict[str, Any] = {
        "sum": lambda tensor: hvd.allreduce(tensor, op=hvd.Sum),
        "group": lambda tensor: hvd.grouped_allreduce([tensor], average=True)[0],
        "gather": hvd.allgather,
        "gather numbers": hvd.allgather,
        "broadcast": lambda tensor: hvd.broadcast(tensor, 1),
    }
    for name, call in calls.items():
        tensor = torch.ones(() if name == "gather numbers" else 2, requires_grad=True)
        (call(tensor) * (1 + hvd.rank())).sum().backward()
        assert tensor.grad is not None
        results[name] = tensor.grad
    return results


def refusals() -> dict[str, Any]:
    number = torch.ones(1)
    largest = torch.ones(1, requires_grad=True)
    without_memory = torch.empty(1, device="meta")
    return {
        "adasum": attempt(hvd.allreduce, number, op=hvd.Adasum),
        "both": attempt(hvd.allreduce, number, average=True, op=hvd.Sum),
        "no op": attempt(hvd.allreduce, number, op=1),
        "process set": attempt(hvd.allreduce, number, process_set=object()),
        "alltoall": attempt(getattr, hvd, "alltoall"),
        "typo": attempt(getattr, hvd, "alreduce"),
        "max has no gradient": attempt(hvd.allreduce(largest, op=hvd.Max).backward),
        "optimizer": attempt(hvd.DistributedOptimizer, torch.optim.SGD([largest]), op=hvd.Max),
        "comm": attempt(hvd.init, comm=object()),
        "object": attempt(hvd.broadcast_object, object(), 1),
        "no memory": attempt(hvd.broadcast_object, without_memory, 1),
        "no memory anywhere": attempt(hvd.allgather_object, [without_memory, 0][hvd.rank()]),
        "shape": attempt(hvd.allreduce, torch.ones(2 + hvd.rank())),
        "dtype": attempt(hvd.allreduce, number.to([torch.uint8, torch.int32][hvd.rank()])),
        "op differs": attempt(hvd.allreduce, number, op=[hvd.Min, hvd.Max][hvd.rank()]),
        "root differs": attempt(hvd.broadcast, number, hvd.rank()),
        "rows differ": attempt(hvd.allgather, torch.ones(1, 2 + hvd.rank())),
        "afterwards": hvd.allreduce(number, op=hvd.Sum),
    }


def identity() -> tuple[object, ...]:
    return hvd.rank(), hvd.size(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous(), hvd.mpi_built()


def barrier_before_a_result() -> Tensor:
    """Rank 1 waits for the result of a call only after the barrier."""
    handle = hvd.allgather_async(torch.tensor([hvd.rank()]))
    if hvd.rank() == 0:
        hvd.synchronize(handle)
    hvd.barrier()
    gathered: Tensor = hvd.synchronize(handle)
    return gathered


def everything() -> dict[str, Any]:
    hvd.init()
    hvd.init()
    functions = (reductions, gathers, gradients, refusals, identity)
    results: dict[str, Any] = {function.__name__: function() for function in functions}
    return results | {"barrier": attempt(barrier_before_a_result)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    with Cluster(servers=1) as cluster:
        return cluster.run(everything)


def test_reductions(results: list[dict[str, Any]]) -> None:
    expected = {
        "AVERAGE": [-1, 1, 4],  # towards zero
        "SUM": [-3, 3, 9],
        "MIN": [-3, 1, 2],
        "MAX": [0, 2, 7],
        "PRODUCT": [0, 2, 14],
        **{f"old average {given!r}": [-1, 1, 4] if given else [-3, 3, 9] for given in TRUTHS},
        "complex": [-12 + 16j],
        "prescaled": [-1, 1, 4],
        "postscaled": [-1.5, 1.5, 4.5],
        "fp16": [-1.5, 1.5, 4.5],
    }
    for result in results:
        got = result["reductions"]
        assert {name: got[name].tolist() for name in expected} == expected
        assert got["AVERAGE"].dtype == torch.int32
        assert [(one.tolist(), one.dtype) for one in got["narrow"]] == NARROW
        assert got["narrow and sparse"].to_dense().tolist() == [0, 200]
        assert got["narrow and sparse"].dtype == torch.uint8
        assert got["fp16"].dtype == torch.float64
        assert got["in place"][0]
        assert got["in place"][1].tolist() == [-3, 3, 9]
        assert [one.tolist() for one in got["group"]] == [[-3, 3, 9]] * 2
        assert got["no group"] == []
        assert got["sparse"].to_dense().tolist() == [-1.5, 1.5, 4.5]


def test_gathers(results: list[dict[str, Any]]) -> None:
    for result in results:
        got = result["gathers"]
        for name in ("allgather", "asynchronous", "same handle"):
            assert got[name].tolist() == [[0, 0], [1, 1], [1, 1]]
        assert got["numbers"].tolist() == got["numbers in a group"].tolist() == [0, 1]
        assert got["polled"]
        assert got["broadcast"].tolist() == [1, 1]
        assert got["in place"][0]
        assert got["in place"][1].tolist() == [1, 1]
        assert got["object"] == {"tuple": (1, {2, 3}), (4, "key"): torch.tensor([[1.5]]), "rank": 1}
        assert got["objects"] == [(0, None), (1, None)]


def test_gradients(results: list[dict[str, Any]]) -> None:
    # The gradients that the ranks have are 1 and 2.
    got = [{name: one.tolist() for name, one in result["gradients"].items()} for result in results]
    both = {"sum": [3, 3], "group": [1.5, 1.5], "gather": [1.5, 1.5], "gather numbers": 1.5}
    assert got == [{**both, "broadcast": [0, 0]}, {**both, "broadcast": [1.5, 1.5]}]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("adasum", "UsageError", "use Average or Sum"),
        ("both", "UsageError", "got both"),
        ("no op", "UsageError", "op 1: expected Average, Sum, Min, Max or Product"),
        ("process set", "UsageError", "expected global_process_set"),
        ("alltoall", "AttributeError", "no alltoall: use allgather, and select the rows"),
        ("typo", "AttributeError", "'alreduce'; it has: "),
        ("max has no gradient", "UsageError", "pass tensor.detach()"),
        ("optimizer", "UsageError", "expected Average or Sum"),
        ("comm", "UsageError", "one group, that of all workers"),
        ("object", "UsageError", "expected plain data"),
        ("no memory", "UsageError", "rank 1 had nothing to broadcast: UsageError: cannot send Tensor"),
        (
            "no memory anywhere",
            "UsageError",
            "rank(s) 0 had nothing to gather: UsageError: cannot send Tensor",
        ),
        ("shape", "MismatchError", "(3,)"),
        ("dtype", "MismatchError", "dense int32 (1,)"),
        ("op differs", "MismatchError", "max"),
        ("root differs", "MismatchError", "rank 1"),
        ("rows differ", "MismatchError", "(3,)"),
    ],
)
def test_refusals(results: list[dict[str, Any]], case: str, kind: str, text: str) -> None:
    for result in results:
        raised = result["refusals"][case]
        assert isinstance(raised, Raised)
        assert raised.kind == kind
    assert any(text in result["refusals"][case].text for result in results), raised.text
    assert all(result["refusals"]["afterwards"].item() == 2 for result in results)


def test_identity(results: list[dict[str, Any]]) -> None:
    assert [result["identity"] for result in results] == [(rank, 2, 0, 1, True, False) for rank in (0, 1)]


def test_a_barrier_gives_the_calls_before_it_their_turns(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert not isinstance(result["barrier"], Raised), result["barrier"]
        assert result["barrier"].tolist() == [0, 1]


@pytest.mark.parametrize("waits_in", ["turn", "barrier"])
def test_an_interrupted_barrier_continues(waits_in: str, tmp_path: Path) -> None:
    with Cluster(servers=1, settings={"cluster.deadline_seconds": 30}) as cluster:
        workers = [cluster.start(interrupt_a_barrier, waits_in, tmp_path, rank=rank) for rank in range(2)]
        assert [worker.result() for worker in workers] == [1.0, 1.0]


def interrupt_a_barrier(waits_in: str, path: Path) -> float:
    """Ctrl-C ends rank 0's wait for the turn, or for the barrier that follows in it."""

    def come_late() -> None:
        await_file(path / "interrupted")
        zps.barrier()

    hvd.init()
    if hvd.rank() == 0:
        with interrupted_in(Pending.wait if waits_in == "turn" else Lease.barrier):
            hvd.barrier()
        (path / "interrupted").touch()
        hvd.barrier()
    elif waits_in == "turn":
        await_file(path / "interrupted")
        hvd.barrier()
    else:
        TURNS.run(["barrier"], come_late)
    average: float = hvd.allreduce(torch.ones(1)).item()
    return average


@pytest.mark.parametrize("waits_in", ["turn", "agreement"])
def test_an_interrupted_step_continues(waits_in: str, tmp_path: Path) -> None:
    """It took another turn, for which the other rank had no call."""
    with Cluster(servers=1, settings={"cluster.deadline_seconds": 30}) as cluster:
        workers = [cluster.start(interrupt_a_step, waits_in, tmp_path, rank=rank) for rank in range(2)]
        assert [worker.result() for worker in workers] == [([[-1.5, -1.5]], 1.0)] * 2


def interrupt_a_step(waits_in: str, path: Path) -> tuple[Any, float]:
    """Ctrl-C ends rank 0's wait for the turn, or for the agreement that follows on kinds of gradients."""
    agree_on_kinds = ParameterAgreement.agree_on_kinds

    def come_late(agreement: ParameterAgreement, has_run_backward: bool) -> None:
        await_file(path / "interrupted")
        agree_on_kinds(agreement, has_run_backward)

    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    (model(torch.ones(1, 2)) * (1 + hvd.rank())).sum().backward()
    if hvd.rank() == 0:
        with interrupted_in(Pending.wait if waits_in == "turn" else agree_on_kinds):
            optimizer.step()
        (path / "interrupted").touch()
    elif waits_in == "turn":
        await_file(path / "interrupted")
    else:
        ParameterAgreement.agree_on_kinds = come_late  # type: ignore[assignment, method-assign]
    optimizer.step()
    average: float = hvd.allreduce(torch.ones(1)).item()
    return model.weight.tolist(), average


def test_a_barrier_that_has_failed_does_not_continue(tmp_path: Path) -> None:
    with Cluster(servers=1, settings={"cluster.deadline_seconds": 5}) as cluster:
        workers = [cluster.start(fail_a_barrier, tmp_path, rank=rank) for rank in range(2)]
        for failed, gathered in [worker.result() for worker in workers]:
            assert failed.kind == "DeadlineError"
            assert not isinstance(gathered, Raised), gathered
            assert gathered.tolist() == [0, 1]


def fail_a_barrier(path: Path) -> tuple[Any, Any]:
    """Rank 1 calls a barrier once it has failed on rank 0."""
    hvd.init()
    if hvd.rank() == 1:
        await_file(path / "failed")
    failed = attempt(hvd.barrier)
    (path / "failed").touch()
    return failed, attempt(barrier_before_a_result)


def test_an_interrupted_barrier_takes_another_turn_if_a_rank_has_joined() -> None:
    with Cluster(servers=1, settings={"cluster.deadline_seconds": 10}) as cluster:
        workers = [cluster.start(interrupt_a_refused_barrier, rank=rank) for rank in range(2)]
        refused, joined = [worker.result() for worker in workers]
    assert refused.kind == "UsageError"
    assert "call join() on this rank, too" in refused.text
    assert joined in (0, 1)


def interrupt_a_refused_barrier() -> Any:
    """Rank 1 has joined. Ctrl-C ends rank 0's barrier when the ranks have told each other what they call."""
    hvd.init()
    if hvd.rank() == 1:
        return attempt(hvd.join)
    agreed = turns._agreed

    def interrupted(what: list[Any] | None) -> list[Any]:
        turns._agreed = agreed
        agreed(what)
        raise KeyboardInterrupt

    turns._agreed = interrupted
    with pytest.raises(KeyboardInterrupt):
        hvd.barrier()
    again = attempt(hvd.barrier)
    hvd.join()
    return again


def sum_on_two_threads() -> list[list[float]]:
    """One thread waits for each sum; the other begins more of them than may be unsettled."""

    def one_by_one() -> list[float]:
        return [hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"single {n}").item() for n in range(40)]

    def many() -> list[float]:
        handles = [hvd.allreduce_async(torch.ones(1), name=f"many {n}", op=hvd.Sum) for n in range(300)]
        return [hvd.synchronize(each).item() for each in handles]

    hvd.init()
    with ThreadPoolExecutor(2) as pool:
        return [each.result() for each in [pool.submit(one_by_one), pool.submit(many)]]


def test_several_threads_may_sum() -> None:
    """They took each other's turns, and failed or waited for ever."""
    with Cluster(servers=1, settings={"cluster.deadline_seconds": 15}) as cluster:
        assert cluster.run(sum_on_two_threads) == [[[2.0] * 40, [2.0] * 300]] * 2


def wait_for_a_call_beside_another() -> list[float]:
    """A thread waits for a sum that rank 1 begins only when rank 0 has waited for another on this thread."""
    hvd.init()
    early = hvd.allreduce_async(torch.ones(1), name="early", op=hvd.Sum)
    with ThreadPoolExecutor(1) as pool:
        if hvd.rank() == 0:
            late = pool.submit(hvd.allreduce, torch.ones(1), name="late", op=hvd.Sum)
            while not early._call.is_settled:  # by that thread, which waits for rank 1 next
                time.sleep(0.01)
        total = hvd.synchronize(early)
        zps.barrier()
        if hvd.rank() == 1:
            late = pool.submit(hvd.allreduce, torch.ones(1), name="late", op=hvd.Sum)
        return [total.item(), late.result().item()]


def test_a_call_that_all_ranks_have_made_does_not_wait_for_another_thread_s() -> None:
    with Cluster(servers=1, settings={"cluster.deadline_seconds": 15}) as cluster:
        assert cluster.run(wait_for_a_call_beside_another) == [[2.0, 2.0]] * 2


def train_and_join() -> dict[str, Any]:
    """Ranks have different numbers of batches, and average a number in each of them."""
    hvd.init()
    model = torch.nn.Embedding(9, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    averages, narrow = [], []
    for batch in range(LOOPS[hvd.rank()]):
        optimizer.zero_grad()
        model(torch.tensor([batch])).sum().backward()
        if hvd.rank() == 0 and batch >= 2:  # more passes than ever, once rank 1 has joined
            (0 * model(torch.tensor([batch])).sum()).backward()
        optimizer.step()
        averages.append(hvd.allreduce(torch.tensor([6.0])).item())
        narrow.append(hvd.allreduce(torch.tensor([200], dtype=torch.uint8)).item())
    last = hvd.join()
    unnamed = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item()
    again = hvd.join()
    found = {"averages": averages, "narrow": narrow, "unnamed": unnamed, "last": last, "again": again}
    return {"weight": model.weight.detach(), **found}


def fail_in_another_order() -> None:
    """Polls a call that has failed before the round that it has begun ends."""
    handle = hvd.allreduce_async(torch.ones(1), name=f"of rank {hvd.rank()}")
    try:
        hvd.synchronize(handle)
    finally:
        assert hvd.poll(handle), "its round goes on until the deadline"


def join_others() -> dict[str, Any]:
    """Rank 2 joins while the others make calls in which it cannot take part."""
    hvd.init()
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: hvd.allgather(torch.ones(1)),
        "barrier": hvd.barrier,
        "order": fail_in_another_order,
    }
    results = {}
    for case, call in calls.items():
        results[case] = attempt(hvd.join if hvd.rank() == 2 else call)
        if hvd.rank() < 2 and case != "order":
            hvd.join()
    return results


def join_in_turn() -> dict[str, Any]:
    return train_and_join() | {"others": join_others()}


def test_join() -> None:
    with Cluster(workers=3, servers=1, settings={"cluster.deadline_seconds": 10}) as cluster:
        workers = [cluster.start(join_in_turn, rank=rank) for rank in range(3)]
        results = [worker.result() for worker in workers]
    taken = [sum(batch < batches for batches in LOOPS.values()) for batch in range(9)]
    for rank, result in enumerate(results):
        assert torch.allclose(result["weight"], -torch.tensor(taken).float()[:, None].expand(9, 2) / 3)
        assert result["averages"] == [2.0 * taken[batch] for batch in range(LOOPS[rank])]
        assert result["narrow"] == [200 * taken[batch] // 3 for batch in range(LOOPS[rank])]
        assert result["unnamed"] == 6.0, "ranks that joined early count on from where the others are"
        assert result["last"] == 0
        assert result["again"] in range(3)
        others = result["others"]
        assert others["order"].kind == "MismatchError"
        assert "rank(s) 2 have called join(); expected the others to make" in others["order"].text
        if rank < 2:
            for case in ("gather", "barrier"):
                assert others[case].kind == "UsageError"
                assert "call join() on this rank, too" in others[case].text


def join_in_jobs() -> list[Any]:
    """Trains with one optimizer in two jobs. In the second, rank 0 joins at once; a third follows."""
    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    train(1)
    first = hvd.join()
    left = hvd.allreduce_async(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    train(hvd.rank())
    last = hvd.join()
    after = [hvd.allreduce(torch.ones(1)).item(), attempt(hvd.synchronize, left).kind]
    handles = [hvd.allreduce_async(torch.ones(1)) for _ in range(1 + hvd.rank())]
    zps.shutdown()
    hvd.init()
    after += [hvd.allreduce(torch.ones(1)).item(), attempt(hvd.synchronize, handles[-1]).kind]
    return [first in (0, 1), last, model.weight.tolist(), after]


@pytest.mark.long
def test_a_second_job_goes_on_with_an_optimizer_and_forgets_calls() -> None:
    with Cluster(settings={"cluster.deadline_seconds": 10, "cluster.rejoin_seconds": 5}) as cluster:
        results = cluster.run(join_in_jobs)
    assert results == [[True, 1, [[-1.5, -1.5]], [1.0, "LeftError"] * 2]] * 2
