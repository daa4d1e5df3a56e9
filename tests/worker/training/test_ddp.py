"""Under which names the buckets of DDP travel."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import multiprocessing
import pickle
import weakref
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import zenps as zps
from tests.worker.training.test_optimizer import FakeWorld
from zenps.errors import DeadlineError, UsageError
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.process import PROCESS
from zenps.worker.training import ddp
from zenps.worker.training.ddp import CommHookState, comm_hook


class FakeBucket:
    def __init__(self, *parameters: Tensor) -> None:
        self._parameters = parameters

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)

    def buffer(self) -> Tensor:
        return torch.cat([parameter.detach().view(-1) for parameter in self._parameters])

    def index(self) -> int:
        return 0


def test_names_follow_what_a_bucket_has() -> None:
    """What rounding kept of one parameter must not be added to another of its size."""
    state = CommHookState()
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    first, second = state._content(FakeBucket(a, b)), state._content(FakeBucket(b, a))  # type: ignore[arg-type]
    assert first != second
    assert state._content(FakeBucket(a, b)) == first  # type: ignore[arg-type]


def test_names_are_those_of_all_ranks_whatever_memory_is_used_again() -> None:
    names = []
    for rank in range(2):
        state, kept = CommHookState(), []
        for model in range(20):
            parameter = nn.Parameter(torch.zeros(3))
            names.append((model, state._content(FakeBucket(parameter))))  # type: ignore[arg-type]
            if rank == 1:
                kept.append(parameter)
    assert sorted(names[:20]) == sorted(names[20:])
    assert len(set(names)) == len({name for _, name in names}) == 20


def test_all_of_a_layout_is_pushed_at_first_and_vectors_always(monkeypatch: pytest.MonkeyPatch) -> None:
    world, state = FakeWorld(), CommHookState()
    monkeypatch.setattr(PROCESS, "_world", world)
    monkeypatch.setattr(FakeBucket, "index", lambda _: 5)
    bucket = FakeBucket(*(nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (2, 2), ())))
    for is_sparsifiable in (False, True):
        comm_hook(state, bucket).wait()  # type: ignore[arg-type]
        (request,) = world.requests.values()
        assert request.options.exact == ((6, 10), (14, 15))
        assert request.options.is_sparsifiable == is_sparsifiable
        assert (request.options.average, request.options.priority) == (True, 5)
        assert request.options.purpose == "gradient"
        assert request.options.residuals is (state._residuals if is_sparsifiable else None)


def test_all_of_a_layout_is_pushed_at_first_in_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks could differ in that: the last job may have ended on one of them before its last backward."""
    state, bucket = CommHookState(), FakeBucket(nn.Parameter(torch.zeros(3)))
    for _ in range(2):
        world = FakeWorld()
        monkeypatch.setattr(PROCESS, "_world", world)
        monkeypatch.setattr(PROCESS, "_numbers", defaultdict(set))
        for is_repeated in (False, True):
            comm_hook(state, bucket).wait()  # type: ignore[arg-type]
            (request,) = world.requests.values()
            assert request.options.is_sparsifiable == is_repeated


def test_without_a_state_there_is_one_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world, bucket = FakeWorld(), FakeBucket(nn.Parameter(torch.zeros(3)))
    monkeypatch.setattr(PROCESS, "_world", world)
    for is_repeated in (False, True):
        comm_hook(None, bucket).wait()  # type: ignore[arg-type]
        (request,) = world.requests.values()
        assert request.options.is_sparsifiable == is_repeated


def test_dropped_state_frees_its_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    world, state = FakeWorld(), CommHookState()
    monkeypatch.setattr(PROCESS, "_world", world)
    bucket = FakeBucket(nn.Parameter(torch.zeros(3)))
    for _ in range(2):
        comm_hook(state, bucket).wait()  # type: ignore[arg-type]
    (residuals,) = {request.options.residuals for request in world.requests.values()}
    gone = weakref.ref(residuals)
    world.requests.clear()
    del state, residuals
    gc.collect()
    assert gone() is None


def test_a_state_is_constructed_with_what_users_choose() -> None:
    assert [*inspect.signature(CommHookState).parameters] == ["dense_group"]


def pickled(state: CommHookState) -> CommHookState:
    loaded: CommHookState = pickle.loads(pickle.dumps(state))  # noqa: S301 - its own
    return loaded


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_is_a_state_of_its_own(duplicate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks copy their arguments; an averaged model copies all of a model, perhaps on one rank."""
    world, state = FakeWorld(), CommHookState()
    monkeypatch.setattr(PROCESS, "_world", world)
    duplicate(state)  # never used: it takes no prefix
    used, next_state = duplicate(state), CommHookState()
    bucket = FakeBucket(nn.Parameter(torch.zeros(3)))
    for each in (state, used, next_state) * 2:
        comm_hook(each, bucket).wait()  # type: ignore[arg-type]
    first, second, third = (int(name.partition("/")[0].removeprefix("ddp")) for name in world.requests)
    assert (second, third) == (first + 2, first + 1)
    residuals = {id(request.options.residuals) for request in world.requests.values()}
    assert len(residuals) == 3


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_model_with_the_hook_can_be_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = FakeWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(CommHookState(dist.group.WORLD), comm_hook)
    model(torch.ones(1, 2)).sum().backward()
    assert not world.pushed, "the group averages dense gradients"
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded.module.weight, model.module.weight)
    loaded.register_comm_hook(CommHookState(), comm_hook)
    loaded(torch.ones(1, 2)).sum().backward()
    assert world.pushed.total() == 1


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_after_a_push_that_cannot_begin_ddp_goes_on(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others push all buckets, too, and wait for each."""
    world = FakeWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    state, begin, calls = CommHookState(), world.begin, list[str]()
    model.register_comm_hook(state, comm_hook)
    feedback = state._residuals.feedback("any", 3, torch.float32)

    def begin_or_fail(request: Request) -> Pending:
        calls.append(request.name)
        if len(calls) == failing:
            feedback.added_step = 0
            raise UsageError("planted")
        pending = begin(request)
        pending.convert_result(lambda result: result * 2)
        return pending

    monkeypatch.setattr(world, "begin", begin_or_fail)
    for step in range(1, 4):
        model.zero_grad()
        with pytest.raises(UsageError, match="planted") if step == failing else contextlib.nullcontext():
            model(torch.ones(1, 2)).sum().backward()
        bias = next(reversed(list(model.parameters())))
        assert bias.grad is not None
        assert bias.grad.item() == (1 if step == failing else 2), "else it is its own"
    assert (len(calls), world.pushed.total()) == (4, 3)
    assert feedback.added_step is None, "the residual must not be taken to have the next gradient already"
    assert world.waited == world.pushed


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeadlineError("late")])
def test_after_ctrl_c_nothing_is_waited_for_but_after_an_error_all_is(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP's step ends either way, and with this rank's own gradients where there are no averages."""
    state, calls = CommHookState(), list[Any]()
    monkeypatch.setattr(ddp, "_at_end_of_backward", calls.append)
    handles: list[Any] = [Mock(), Mock(), Mock()]
    for handle, average in zip(handles, (torch.full((1,), 7.0), error, torch.full((1,), 8.0)), strict=True):
        handle.wait.side_effect = [average]
        state._in_flight.append(ddp._Bucket(handle, Future(), torch.ones(1), None))
    results = [bucket.result for bucket in state._in_flight]
    state._finish()
    is_error = isinstance(error, Exception)
    assert [float(result.value()) for result in results] == [7.0, 1.0, 8.0 if is_error else 1.0]
    assert handles[2].wait.called == is_error
    (end,) = calls
    with pytest.raises(type(error)):
        end()
    state._finish()
    assert len(calls) == 1


@pytest.mark.usefixtures("group")
def test_after_a_call_that_came_too_early_ddp_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward after zps.init(), as in a notebook, failed by an INTERNAL ASSERT of torch."""
    monkeypatch.setattr(PROCESS, "_world", None)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(CommHookState(), comm_hook)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"call zenps.init\(\) first"):
            model(torch.ones(1, 2)).sum().backward()
    world = FakeWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    model(torch.ones(1, 2)).sum().backward()
    assert world.pushed.total() == 1


def train_alone(rank: int, store: str) -> str:
    """One of two ranks of torch.distributed, each of which is a ZenPS of its own."""
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    zps.init()
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(CommHookState(), comm_hook)
    with pytest.raises(UsageError) as caught:
        model(torch.ones(1, 1)).sum().backward()
    return str(caught.value)


def test_ranks_of_ddp_that_are_no_workers_of_one_job_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # which has no settings
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:
        said = [*pool.map(train_alone, range(2), [f"file://{tmp_path}/store"] * 2)]
    assert all("expected the 2 ranks of torch.distributed as workers" in each for each in said)
