"""Horovod's names in a world of one worker: arguments, handles, and the names of tensors."""

from __future__ import annotations

import gc
import logging
import signal
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
import zenps.horovod as hvd
from zenps.errors import MismatchError, TensorError, UsageError
from zenps.horovod.reduction import description
from zenps.horovod.turns import REDUCES, TURNS, UNNAMED, WINDOW
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.process import PROCESS


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("where", ["prescale_factor", "postscale_factor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_factors_multiply_in_float32_or_wider(where: str, dtype: torch.dtype) -> None:
    given = torch.randn(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    wide = given.double() if dtype == torch.float64 else given.float()
    factor: dict[str, Any] = {where: 0.1}
    assert torch.equal(hvd.allreduce(given, **factor), (wide * 0.1).to(dtype))
    assert hvd.allreduce(torch.tensor([-7, 7, 1 << 40]), **factor).tolist() == [0, 0, (1 << 40) // 10]


def test_poll_writes_the_result_of_a_call_in_place() -> None:
    """As Horovod does, whose scripts may use the tensor then."""
    tensors = [torch.tensor([4.0]) for _ in range(3)]
    handles = [
        hvd.allreduce_async_(tensors[0], postscale_factor=0.5),
        hvd.grouped_allreduce_async_(tensors[1:2], postscale_factor=0.5),
        hvd.allreduce_async_(tensors[2], op=hvd.Max, postscale_factor=0.5),
    ]
    assert all(map(hvd.poll, handles))
    assert [each.item() for each in tensors] == [2.0] * 3


def test_sparse_tensors_are_not_reduced_in_place() -> None:
    """The result went to a tensor that nobody had: each ``.data`` of a sparse gradient is a new one."""
    table = nn.Embedding(3, 1, sparse=True)
    table(torch.tensor([1])).square().sum().backward()
    assert table.weight.grad is not None
    gradient = table.weight.grad.data
    with pytest.raises(TensorError, match="expected dense tensors, got a sparse one"):
        hvd.allreduce_(gradient)
    with pytest.raises(TensorError, match="expected dense tensors, got a sparse one"):
        hvd.grouped_allreduce_([torch.ones(1), gradient])
    assert torch.equal(hvd.allreduce(gradient).to_dense(), gradient.to_dense())


def test_results_of_calls_in_place_are_the_tensors_themselves() -> None:
    whole, half = torch.tensor([4, 7]), torch.tensor([1.5])
    handle = hvd.grouped_allreduce_async_([whole, half], op=hvd.Sum, postscale_factor=0.5)
    assert whole.tolist() == [4, 7], "written by synchronize()"
    first, second = hvd.synchronize(handle)
    assert first is whole
    assert second is half
    assert (whole.tolist(), half.tolist()) == ([2, 3], [0.75])
    copied = hvd.allreduce_async(half)
    assert hvd.synchronize(copied) is not half
    assert hvd.synchronize(copied) is copied(), "the same result each time"
    assert hvd.allreduce_(half) is half


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Max])
def test_asynchronous_calls_take_no_part_in_autograd(op: hvd.ReduceOp) -> None:
    computed = torch.ones(2, requires_grad=True) * 2
    result = hvd.synchronize(hvd.allreduce_async(computed, op=op))
    assert result.tolist() == [2, 2]
    assert not result.requires_grad


@pytest.mark.parametrize(
    "reduce",
    [
        hvd.allreduce,
        lambda tensor: hvd.allreduce(tensor, name="x", op=hvd.Sum, compression=hvd.Compression.fp16),
        lambda tensor: hvd.grouped_allreduce([torch.ones(1), tensor])[1],
    ],
)
def test_gradients_of_gradients_are_reduced(reduce: Callable[[Tensor], Tensor]) -> None:
    """Their part of a loss with another term was missing."""
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(reduce(weight).square().sum(), weight, create_graph=True)
    (gradient.square().sum() + weight.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [9, 17]


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Max])
def test_a_name_is_free_once_its_result_was_waited_for(op: hvd.ReduceOp) -> None:
    tensor = torch.ones(2)
    handle = hvd.allreduce_async(tensor, name="x", op=op)
    for call in (hvd.allreduce_async, hvd.allreduce):
        with pytest.raises(UsageError, match="'horovod/allreduce/x' is in flight; wait for its result"):
            call(tensor, name="x", op=op)
    hvd.allreduce(tensor, name="y", op=op)  # waits for the calls before, too
    assert hvd.allreduce(tensor, name="x", op=op).tolist() == [1, 1]
    assert handle().tolist() == [1, 1]
    grouped = hvd.grouped_allreduce_async([tensor, tensor], name="g")
    with pytest.raises(UsageError, match=r"'horovod/allreduce/g\.1' is in flight"):
        hvd.allreduce(tensor, name="g.1")
    assert hvd.poll(grouped)
    hvd.allreduce(tensor, name="g.1")


class Late(Pending):
    """The answer comes once somebody waits for it."""

    def wait(self) -> Tensor:
        self.complete(torch.zeros(1))
        return super().wait()


@pytest.mark.parametrize("keeps_handle", [False, True])
def test_a_name_is_free_once_a_later_result_was_waited_for_even_if_its_own_is_late(
    keeps_handle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether this rank raised, and others waited for it, depended on which answer came first."""
    begin, waiting = PROCESS.world.begin, Waiting(Notifier(), 0.0, PROCESS.world.statistics, Spans())
    late: list[Pending] = []

    def begin_late(request: Request) -> Pending:
        if not request.name.endswith("/x"):
            return begin(request)
        if late and not late[-1].has_ended:
            raise UsageError("in flight")
        late.append(Late(request.name, request.options, SuppliedTransfer(), Progress(0), waiting))
        return late[-1]

    monkeypatch.setattr(PROCESS.world, "begin", begin_late)
    tensor = torch.zeros(1)
    handles = [hvd.allreduce_async(tensor, name="x")]
    if not keeps_handle:
        handles.clear()
    hvd.allreduce(tensor, name="y")
    hvd.allreduce(tensor, name="x")
    assert len(late) == 2
    assert all(handle().tolist() == [0] for handle in handles)


def test_nobody_waits_for_the_round_of_a_call_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may not have pushed it."""
    begin, waiting = PROCESS.world.begin, Waiting(Notifier(), 0.0, PROCESS.world.statistics, Spans())
    pushed = Late("x", Options(), SuppliedTransfer(), Progress(0), waiting)
    with monkeypatch.context() as patch:
        patch.setattr(PROCESS.world, "begin", lambda new: pushed if new.name.endswith("/x") else begin(new))
        handle = hvd.allreduce_async(torch.zeros(1), name="x")
    hvd.allreduce(torch.zeros(1), name="y")
    handle._call.error = MismatchError("ranks make different calls")
    hvd.allreduce_async(torch.zeros(1), name="x")
    assert not pushed.has_ended


def test_any_number_of_handles_may_be_kept_or_dropped() -> None:
    kept = [hvd.allreduce_async(torch.tensor([number])) for number in range(2 * WINDOW)]
    assert len(TURNS._unsettled) == WINDOW
    assert [int(each()) for each in kept] == list(range(2 * WINDOW))
    for _ in range(2 * WINDOW):
        hvd.allreduce_async(torch.ones(1))
    gc.collect()
    assert len(TURNS._unsettled) <= WINDOW


def test_a_rank_that_has_joined_keeps_no_results_of_the_others() -> None:
    for number in range(9):
        TURNS._serve([REDUCES, [[str(number), description(torch.ones(1), average=True)]]])
        assert list(TURNS._zeros) == [str(number)]


def test_names_of_unnamed_tensors_are_bounded() -> None:
    assert [TURNS.number_unnamed("a") for _ in range(UNNAMED + 2)] == [*range(UNNAMED), 0, 1]
    assert TURNS.number_unnamed("b") == 0, "each kind is counted by itself"


def test_calls_of_an_earlier_job_are_forgotten() -> None:
    left = hvd.allreduce_async(torch.ones(1), name="x")
    hvd.shutdown()
    assert TURNS._taken == 0, "a rank that had joined has taken more of them"
    hvd.init()
    hvd.allreduce(torch.ones(1), name="x")
    with pytest.raises(hvd.HorovodInternalError, match="left"):
        left()


@pytest.mark.usefixtures("interruptible")
def test_a_turn_in_which_ctrl_c_comes_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had begun for the other ranks only, and then this rank's calls took their turns one too late."""
    pushed, begin = list[str](), PROCESS.world.begin

    def begin_then_interrupt(request: Request) -> Pending:
        pending = begin(request)
        pushed.append(request.name)
        if len(pushed) == 1:
            signal.raise_signal(signal.SIGINT)
        return pending

    monkeypatch.setattr(PROCESS.world, "begin", begin_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        hvd.barrier()
    hvd.barrier()
    assert pushed == ["horovod/turn/0"]
    assert TURNS._taken == 1


@pytest.mark.usefixtures("interruptible")
def test_a_turn_at_whose_end_ctrl_c_comes_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call was lost, and the next wait for it found no turn."""

    class Interrupting(deque[Any]):
        def popleft(self) -> Any:
            oldest = super().popleft()
            signal.raise_signal(signal.SIGINT)
            return oldest

    taken = TURNS._taken
    with monkeypatch.context() as patch:
        patch.setattr(TURNS, "_unsettled", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            hvd.barrier()
        assert not TURNS._unsettled
    hvd.barrier()
    assert TURNS._taken == taken + 1
    hvd.barrier()
    assert TURNS._taken == taken + 2
    assert hvd.allreduce(torch.ones(1)).tolist() == [1]


def test_old_and_new_ways_to_name_an_operation() -> None:
    tensor = torch.ones(1)
    for wrong in ({"average": True, "op": hvd.Sum}, {"average": False, "op": hvd.Sum}, {"op": hvd.Adasum}):
        arguments: dict[str, Any] = wrong
        with pytest.raises(UsageError):
            hvd.allreduce(tensor, **arguments)
    for fine in ({"average": True}, {"average": False}, {"op": hvd.Sum}, {}):
        arguments = fine
        assert hvd.allreduce(tensor, **arguments).tolist() == [1]


def test_arguments_of_the_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)

    def wrap(**arguments: Any) -> hvd.DistributedOptimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)

    wrap(op=hvd.Sum)
    wrap(gradient_predivide_factor=2.0)
    assert not caplog.records
    with pytest.raises(UsageError, match="gradient_predivide_factor: expected op=Average"):
        wrap(op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(UsageError, match="expected Average or Sum"):
        wrap(op=hvd.Max)
    with caplog.at_level(logging.WARNING):
        optimizer = wrap(compression=hvd.Compression.fp16)
    assert "compression=FP16Compressor: gradients are pushed as they are" in caplog.text
    assert optimizer._parameter_names == {model.weight: "weight", model.bias: "bias"}
    gc.collect()
    wrap()
    *earlier, _ = [each() for _, each in TURNS._optimizers]
    assert earlier[-1] is optimizer
    assert None not in earlier, "one that was dropped"


def test_join_is_refused_in_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a rank that is lost."""
    assert hvd.join() == 0
    monkeypatch.setattr(PROCESS.world, "is_elastic", True, raising=False)
    with pytest.raises(UsageError, match=r"on_worker_loss = continue; .* zps.join\(optimizer\)"):
        hvd.join()


def test_the_join_of_zenps_names_that_of_horovod() -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"got one of zenps.horovod; call hvd.join\(\)"), zps.join(optimizer):
        pass
