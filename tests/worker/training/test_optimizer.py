"""``DistributedOptimizer`` without a cluster: what it pushes and waits for, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import signal
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zenps as zps
import zenps.byteps as bps
import zenps.horovod as hvd
from zenps.codecs.values import RUN
from zenps.config.settings import Config
from zenps.config.sources import load
from zenps.errors import DeadlineError, MismatchError, TensorError, UsageError, ZenPSError
from zenps.observe.metrics import WorkerMetrics
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.process import PROCESS
from zenps.worker.sparsify.sparsification import Sparsification, make_sparsification
from zenps.worker.training.gradients import agreement
from zenps.worker.training.gradients.agreement import ParameterAgreement
from zenps.worker.training.gradients.buckets import Bucket
from zenps.worker.training.gradients.synchronizer import GradientSynchronizer
from zenps.worker.world import LocalWorld, World


class Answered(SuppliedTransfer):
    """Says to its world when somebody has waited for it."""

    def __init__(self, world: FakeWorld, name: str, outcome: Tensor | ZenPSError) -> None:
        super().__init__()
        self._world, self._name, self._outcome = world, name, outcome

    def finish(self) -> Tensor:
        self._world.waited[self._name] += 1
        if isinstance(self._outcome, ZenPSError):
            raise self._outcome
        return self._outcome


def agreement_of(optimizer: zps.DistributedOptimizer) -> ParameterAgreement:
    assert isinstance(optimizer._consistency, GradientSynchronizer)
    return optimizer._consistency._agreement


class FakeWorld(World):
    """A cluster of one rank, whose sums are what it pushed; rounds of names in ``late`` fail."""

    rank = local_rank = 0
    ranks: tuple[int, ...] = (0,)
    local_size = full_size = 1
    is_distributed = True
    bucket_bytes = 1 << 20
    quantized_run = 1
    sparsification: Sparsification | None = None
    keeps_residuals = False
    spans = Spans()
    partition = "none"
    staleness = 0
    averages_models = False
    averager = None
    is_elastic = is_joining = False

    def __init__(self) -> None:
        self.pushed: Counter[str] = Counter()
        self.requests: dict[str, Request] = {}
        self.waited: Counter[str] = Counter()
        self.late: set[str] = set()
        self.statistics = Statistics(WorkerMetrics(CollectorRegistry()))
        self._waiting = Waiting(Notifier(), 20.0, self.statistics, Spans())

    def begin(self, request: Request) -> Pending:
        tensor, name, options = request
        self.pushed[name] += 1
        self.requests[name] = request
        assert self.pushed[name] == self.waited[name] + 1, f"{name} is in flight"
        late = DeadlineError(f"{name}: no answer") if name in self.late else None
        result = tensor.detach().coalesce() if tensor.is_sparse else tensor.detach().clone()
        transfer = Answered(self, name, late or result)
        return Pending(name, options, transfer, Progress(0, ended=True), self._waiting)

    def residual_name(self, request: Request) -> str | None:
        return request.name if self.keeps_residuals else None

    def barrier(self) -> None: ...
    def has_joining_workers(self) -> bool:
        return False

    def admit(self) -> None: ...
    def close(self, *, together: bool = False) -> None: ...


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 2, sparse=True)
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, 1)

    def loss(self) -> Tensor:
        total: Tensor = self.last(self.first(self.words(torch.tensor([1, 3])))).sum()
        return total


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    world = FakeWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    return world


@pytest.fixture
def model(world: FakeWorld) -> Model:
    return Model()


def wrap(model: Model) -> zps.DistributedOptimizer:
    return zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def train_one_step(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_wrapping_twice_is_refused(model: Model) -> None:
    """As a framework and a script do between them: each of the two would average the gradients."""
    optimizer = wrap(model)
    for wrap_again in (zps.DistributedOptimizer, hvd.DistributedOptimizer, bps.DistributedOptimizer):
        with pytest.raises(UsageError, match=r"not wrapped.*use that one"):
            wrap_again(optimizer, model.named_parameters())
    train_one_step(model, optimizer)


def test_what_cannot_be_wrapped_is_refused(model: Model) -> None:
    sgd, named = torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, named, {}, "expected an optimizer, such as .*, got Model"),
        (sgd, model.parameters(), {}, "expected pairs of a name and a tensor, .* got Parameter instead"),
        (sgd, model, {}, r"such as model.named_parameters\(\), got Model instead"),
        (sgd, dict(named), {}, "got str instead"),
        (sgd, named, {"average": 1}, "average = 1: expected a bool"),
        (sgd, named, {"backward_passes_per_step": 1.5}, "= 1.5: expected an integer, at least 1"),
        (sgd, named, {"backward_passes_per_step": "2"}, "= '2': expected an integer, at least 1"),
    ]
    for optimizer, names, options, message in cases:
        with pytest.raises(UsageError, match=message):
            zps.DistributedOptimizer(optimizer, names, **options)
    zps.DistributedOptimizer(sgd, named, backward_passes_per_step=cast(int, numpy.int64(2)))


@pytest.fixture
def optimizer(model: Model) -> zps.DistributedOptimizer:
    """After a step: ranks have agreed on everything."""
    optimizer = wrap(model)
    train_one_step(model, optimizer)
    return optimizer


def test_round_that_fails_leaves_no_other_in_flight(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    world.late = {max(name for name in world.pushed if "bucket" in name)}
    model.loss().backward()
    with pytest.raises(DeadlineError):
        optimizer.step()
    assert world.waited == world.pushed

    world.late.clear()
    pushed = world.pushed.copy()
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()
    assert world.pushed - pushed == {name: 1 for name in pushed if pushed[name] > 1}
    assert world.waited == world.pushed


class Full:
    """In place of a method: once, there is no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self._inner, self.is_full = getattr(Bucket, method), False
        monkeypatch.setattr(Bucket, method, lambda *args: self(*args))

    def __call__(self, *args: object) -> object:
        if self.is_full:
            self.is_full = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._inner(*args)


@pytest.mark.parametrize(("method", "during"), [("fused", "backward"), ("fused", "step"), ("spread", "step")])
def test_a_device_without_memory_leaves_no_round_in_flight(
    method: str, during: str, world: FakeWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "bucket_bytes", 1)  # each gradient by itself
    full, optimizer = Full(monkeypatch, method), wrap(model)
    train_one_step(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pushed = world.pushed.copy()
    if during == "backward":
        full.is_full = True
        with pytest.raises(TensorError, match=r"gradient of '\w+\.\w+': CUDA out of memory; zero_grad"):
            model.loss().backward()
    else:
        with optimizer.no_sync():  # so that step() pushes all
            model.loss().backward()
        full.is_full = True
        with pytest.raises(TensorError, match="CUDA out of memory"):
            optimizer.step()
        assert world.waited == world.pushed
    optimizer.zero_grad()
    assert world.waited == world.pushed
    assert all(map(torch.equal, before, model.parameters()))
    gradients = {name for name in pushed if world.requests[name].options.purpose == "gradient"}
    assert names_pushed(world, pushed) == Counter(gradients), "every rank pushes each once in a step"
    if (method, during) == ("fused", "step"):  # the table has been pushed before
        left = {name for name in gradients if not world.requests[name].options.is_dropped}
        assert left == {name for name in gradients if name.endswith("words.weight")}

    train_one_step(model, optimizer)
    assert not any(map(torch.equal, before, model.parameters()))
    assert world.waited == world.pushed


def test_who_drops_the_error_of_a_step_keeps_nothing_of_it(
    world: FakeWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, optimizer = Full(monkeypatch, "fused"), wrap(model)
    with optimizer.no_sync():  # so that step() pushes all
        model.loss().backward()
    assert isinstance(optimizer._consistency, GradientSynchronizer)
    kept: list[weakref.ref[Any]] = [weakref.ref(optimizer._consistency._pushes.averages)]
    full.is_full = True
    gc.disable()
    try:
        try:
            optimizer.step()
        except TensorError as error:
            kept.append(weakref.ref(error))
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


def test_after_a_step_that_failed_a_bucket_waits_for_all_its_gradients_again(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(monkeypatch, "fused")
    model.first(torch.ones(1, 2)).sum().backward()  # the bucket still waits for those of the last layer
    full.is_full = True
    with pytest.raises(TensorError, match="CUDA out of memory"):
        optimizer.step()
    optimizer.zero_grad()
    before = world.pushed.copy()
    train_one_step(model, optimizer)
    assert set(names_pushed(world, before).values()) == {1}, "others push each once, and wait for one push"
    assert world.waited == world.pushed


def test_on_a_gpu_the_stream_of_each_gradient_of_a_bucket_is_known_before_its_push(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    fused = Bucket.fused

    def note_push(bucket: Bucket, *args: Any) -> Tensor:
        calls.append("push")
        return fused(bucket, *args)

    monkeypatch.setattr(Bucket, "note_stream", lambda _: calls.append("note"))
    monkeypatch.setattr(Bucket, "fused", note_push)
    train_one_step(model, optimizer)
    assert calls == ["push"], "the host has no streams"
    calls.clear()
    monkeypatch.setattr(agreement_of(optimizer).buckets[0], "is_on_gpu", True)
    train_one_step(model, optimizer)
    assert calls == ["note"] * 4 + ["push"]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("interrupted", ["words", "bucket"])
def test_synchronize_that_ctrl_c_ends_pushes_nothing_again_when_it_is_repeated(
    world: FakeWorld, model: Model, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    optimizer, begin = wrap(model), world.begin

    def begin_then_interrupt(request: Request) -> Pending:
        pending = begin(request)
        if interrupted in request.name and world.pushed[request.name] == 1:
            signal.raise_signal(signal.SIGINT)
        return pending

    monkeypatch.setattr(world, "begin", begin_then_interrupt)
    model.loss().backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.synchronize()
    optimizer.synchronize()
    assert world.waited == world.pushed
    assert any(interrupted in name for name in world.pushed)


@pytest.fixture
def interrupt_wait(
    interruptible: None, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Has Ctrl-C end the next wait for the gradient whose name contains the given one."""
    names, finish = set[str](), Answered.finish

    def finish_then_interrupt(answered: Answered) -> Tensor:
        result = finish(answered)
        if interrupted := {name for name in names if name in answered._name}:
            names.difference_update(interrupted)
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Answered, "finish", finish_then_interrupt)
    return names.add


@pytest.mark.parametrize("interrupted", ["words", "bucket"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("repeated", ["synchronize", "step"])
def test_a_step_whose_wait_ctrl_c_ends_goes_on_with_it_when_it_is_repeated(
    world: FakeWorld,
    model: Model,
    interrupt_wait: Callable[[str], None],
    interrupted: str,
    staleness: int,
    repeated: str,
) -> None:
    world.staleness = staleness
    optimizer = wrap(model)
    for _ in range(2):
        train_one_step(model, optimizer)
    before, bias = world.pushed.copy(), model.last.bias.detach().clone()
    model.loss().backward()
    interrupt_wait(interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(optimizer, repeated)()
    getattr(optimizer, repeated)()
    if repeated == "synchronize":
        optimizer.step()
    assert set(names_pushed(world, before).values()) == {1}
    assert torch.allclose(bias - model.last.bias, torch.tensor(0.2))
    optimizer.zero_grad()
    train_one_step(model, optimizer)
    optimizer.drain()
    assert world.waited == world.pushed


@pytest.mark.parametrize("is_dropped", [False, True])
def test_an_agreement_whose_wait_ctrl_c_ends_is_made_by_the_next_step(
    world: FakeWorld, model: Model, interrupt_wait: Callable[[str], None], is_dropped: bool
) -> None:
    """As where a rank is the first to train, and waits for the others."""
    optimizer = wrap(model)
    model.loss().backward()
    interrupt_wait("kinds")
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    if is_dropped:
        optimizer.zero_grad()
        model.loss().backward()
    optimizer.step()
    assert all(count == 1 for count in world.pushed.values())
    optimizer.zero_grad()
    train_one_step(model, optimizer)
    assert world.waited == world.pushed


@pytest.mark.parametrize("is_dropped", [False, True])
def test_parameters_that_are_unfrozen_after_ctrl_c_has_ended_an_agreement_are_pushed(
    world: FakeWorld, model: Model, interrupt_wait: Callable[[str], None], is_dropped: bool
) -> None:
    """The agreement that goes on does not have them."""
    model.first.weight.requires_grad_(False)
    optimizer = wrap(model)
    model.loss().backward()
    interrupt_wait("kinds")
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    model.first.weight.requires_grad_(True)
    if is_dropped:
        optimizer.zero_grad()
        model.loss().backward()
    optimizer.step()
    assert (model.first.weight in agreement_of(optimizer).bucket_of) == is_dropped
    optimizer.zero_grad()
    train_one_step(model, optimizer)
    assert model.first.weight in agreement_of(optimizer).bucket_of
    assert world.waited == world.pushed


@pytest.mark.parametrize("staleness", [0, 1])
def test_zero_grad_whose_wait_ctrl_c_ends_goes_on_with_it_when_it_is_repeated(
    world: FakeWorld, model: Model, interrupt_wait: Callable[[str], None], staleness: int
) -> None:
    world.staleness = staleness
    optimizer = wrap(model)
    for _ in range(2):
        train_one_step(model, optimizer)
    before = world.pushed.copy()
    model.loss().backward()
    interrupt_wait("bucket")
    with pytest.raises(KeyboardInterrupt):
        optimizer.zero_grad()
    optimizer.zero_grad()
    assert set(names_pushed(world, before).values()) == {1}
    before = world.pushed.copy()
    train_one_step(model, optimizer)
    optimizer.drain()
    assert all(
        "1 step(s) thrown" in world.requests[name].options.given for name in names_pushed(world, before)
    )
    assert world.waited == world.pushed


def test_zero_grad_after_a_step_whose_wait_ctrl_c_ended_says_what_residuals_keep(
    world: FakeWorld, model: Model, interrupt_wait: Callable[[str], None]
) -> None:
    world.keeps_residuals = True
    optimizer = wrap(model)
    train_one_step(model, optimizer)
    before, weights = world.pushed.copy(), state_of(model)
    model.loss().backward()
    interrupt_wait("bucket")
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(UsageError, match="residuals keep a part"):
        optimizer.zero_grad()
    optimizer.zero_grad()
    assert all(torch.equal(weights[name], each) for name, each in state_of(model).items())
    assert set(names_pushed(world, before).values()) == {1}
    train_one_step(model, optimizer)
    assert world.waited == world.pushed


def test_drain_that_ctrl_c_ends_applies_each_step_once_when_it_is_repeated(
    world: FakeWorld, model: Model, interrupt_wait: Callable[[str], None]
) -> None:
    world.staleness = 2
    optimizer, bias = wrap(model), model.last.bias.detach().clone()
    for _ in range(2):
        train_one_step(model, optimizer)
    interrupt_wait("bucket")
    with pytest.raises(KeyboardInterrupt):
        optimizer.drain()
    optimizer.drain()
    assert torch.allclose(bias - model.last.bias, torch.tensor(0.4))
    before = world.pushed.copy()
    train_one_step(model, optimizer)
    assert all(
        "after 2 drained step(s)" in world.requests[name].options.given
        for name in names_pushed(world, before)
    )


def test_gradients_of_the_first_layers_have_the_highest_priority(
    world: FakeWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "bucket_bytes", 1)  # each by itself
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    by_priority = {
        request.options.priority: name.rpartition("/")[2] for name, request in world.requests.items()
    }
    # Buckets are numbered from the last layer's: last.bias, last.weight, first.bias, first.weight.
    assert [by_priority[-place] for place in range(5)] == ["words.weight", "3", "2", "1", "0"]


@pytest.mark.parametrize("average", [True, False])
def test_only_gradients_are_pushed_as_such(world: FakeWorld, model: Model, average: bool) -> None:
    """The others must arrive as they are, whatever ``sync.values`` is."""
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), average=average
    )
    model.loss().backward()
    optimizer.step()
    purposes = {name: request.options.purpose for name, request in world.requests.items()}
    gradients = {name for name, purpose in purposes.items() if purpose == "gradient"}
    assert {name.rpartition("/")[2] for name in gradients} == {"words.weight", "0"}
    assert {world.requests[name].options.average for name in gradients} == {average}
    assert {purposes[name] for name in purposes.keys() - gradients} == {"broadcast", "control", "value"}
    assert not any(world.requests[name].options.average for name in purposes.keys() - gradients)


def test_any_leaf_tensor_may_be_trained(world: FakeWorld) -> None:
    """torch's optimizers take more than ``nn.Parameter``."""
    vector, table = torch.ones(3, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD([vector, table], lr=1.0))
    for _ in range(2):
        looked_up = nn.functional.embedding(torch.tensor([2]), table, sparse=True)
        (vector.sum() + looked_up.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert vector.tolist() == [-1.0] * 3
    assert table[:, 0].tolist() == [1.0, 1.0, -1.0, 1.0]
    assert world.pushed == world.waited
    assert [times for name, times in world.pushed.items() if name.endswith("/parameter1")] == [2]


def test_the_end_of_a_step_forgets_which_gradients_failed_pushes_have_added(model: Model) -> None:
    """The next step's gradient would be taken for one that the residual has already."""
    optimizer = wrap(model)
    feedback = agreement_of(optimizer).residuals.feedback("layer", 4, torch.float32)
    feedback.added_step = 0
    train_one_step(model, optimizer)
    assert feedback.added_step is None


def change_settings(world: FakeWorld, sparsifier: str = "topk", values: str = "int8") -> None:
    """To those of a new job, in which parameters of 4 elements are sparsified."""
    sets = [f"sync.sparsifier={sparsifier}", "sync.density=0.5", "sparsifier.least_bytes=0"]
    config = load(sets=sets, environ={}).config
    world.sparsification = make_sparsification(config, 0, world.statistics)
    world.quantized_run = RUN if values == "int8" else 1
    world.keeps_residuals = world.sparsification is not None or values != "same"


def gradients_pushed(world: FakeWorld, before: Counter[str]) -> list[Request]:
    return [world.requests[name] for name in sorted(names_pushed(world, before))]


def test_in_a_new_job_buckets_are_those_that_its_settings_need(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    """Nothing was sparsified, and presence elements were quantized together with gradients."""
    change_settings(world)
    optimizer._consistency.reset()
    before = world.pushed.copy()
    train_one_step(model, optimizer)
    buckets = [each for each in gradients_pushed(world, before) if "bucket" in each.name]
    assert [each.options.is_sparsifiable for each in buckets] == [False, True]
    assert [each.options.parts.flags.step for each in buckets if each.options.parts] == [RUN] * 2


@pytest.mark.parametrize(
    ("before", "now", "got"),
    [
        ({}, {"staleness": 2}, "got sync.consistency = ssp with sync.staleness = 2"),
        ({"staleness": 1}, {"staleness": 0}, "got sync.consistency = bsp"),
        ({"staleness": 1}, {"staleness": 2}, "got sync.consistency = ssp with sync.staleness = 2"),
        ({}, {"averages_models": True}, "got sync.consistency = ds-sync"),
        ({"sparsifier": "topk"}, {"sparsifier": "dgc"}, "got sync.sparsifier = dgc"),
        ({"sparsifier": "dgc"}, {"sparsifier": "topk"}, "got a sync.sparsifier that takes no momentum"),
        ({"sparsifier": "none"}, {"sparsifier": "exdyna"}, ""),
        ({"sparsifier": "dgc"}, {"sparsifier": "dgc"}, ""),
        ({"staleness": 1}, {"is_distributed": False, "staleness": 0}, ""),
    ],
    ids=str,
)
def test_an_optimizer_goes_on_in_a_job_for_whose_settings_it_is_wrapped(
    before: dict[str, Any], now: dict[str, Any], got: str, world: FakeWorld, model: Model
) -> None:
    """It trained as in the job in which it was wrapped, or without momentum."""

    def join(settings: dict[str, Any]) -> None:
        change_settings(world, **{key: settings[key] for key in settings if key == "sparsifier"})
        for name in settings.keys() - {"sparsifier"}:
            setattr(world, name, settings[name])

    model.words.requires_grad_(False)
    join({"sparsifier": "none"} | before)
    optimizer = wrap(model)
    train_one_step(model, optimizer)
    optimizer.drain()
    join({"sparsifier": "none"} | now)
    optimizer._consistency.reset()
    pushed = world.pushed.copy()
    for _ in range(2):
        model.loss().backward()
        with pytest.raises(UsageError, match=f"{got}; wrap") if got else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    assert bool(world.pushed - pushed) == (not got and world.is_distributed)


def test_ranks_agree_in_a_new_job_though_only_some_had_agreed_in_the_last_one(
    world: FakeWorld, model: Model, interrupt_wait: Callable[[str], None]
) -> None:
    """Ctrl-C had ended the wait of the others: they asked alone, in each step."""
    change_settings(world, "none")
    asked = []
    for is_interrupted in (False, True):
        optimizer = wrap(model)
        model.loss().backward()
        if is_interrupted:
            interrupt_wait("kinds")
        with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
            optimizer.step()
        world.waited = world.pushed.copy()
        optimizer._consistency.reset()
        optimizer.zero_grad()
        before = world.pushed.copy()
        train_one_step(model, optimizer)
        asked.append([name.partition(":")[2] for name in world.pushed - before if ":" in name])
    assert asked == [["kinds"]] * 2


@pytest.mark.parametrize("layer", ["first", "last"])
def test_a_residual_goes_on_in_a_new_job_while_its_bucket_has_the_same_parameters(
    layer: str, world: FakeWorld, model: Model
) -> None:
    change_settings(world, "none")
    model.words.weight.requires_grad_(False)
    model.last.requires_grad_(False)
    optimizer = wrap(model)
    train_one_step(model, optimizer)
    (request,) = gradients_pushed(world, Counter())
    assert request.options.residuals is not None
    residual = request.options.residuals.of(request.name, 1, request.tensor.numel())
    model.first.requires_grad_(layer == "first")
    model.last.requires_grad_(layer == "last")
    optimizer._consistency.reset()
    train_one_step(model, optimizer)
    (request,) = (each for name, each in world.requests.items() if "bucket" in name)
    assert request.options.residuals is not None
    found = request.options.residuals.peek(request.name)
    assert (found is residual) == (layer == "first")


def test_a_bucket_of_an_earlier_job_s_name_takes_no_other_bucket_its_residual(
    world: FakeWorld, model: Model
) -> None:
    change_settings(world, "none")
    model.words.weight.requires_grad_(False)
    optimizer = wrap(model)
    kept = []
    for unfrozen in (model.last, model.last.bias):
        model.last.requires_grad_(False)
        optimizer._consistency.reset()
        for _ in range(3):
            train_one_step(model, optimizer)
            unfrozen.requires_grad_(True)
        first, second = (
            (request.options.residuals, request.name)
            for name, request in sorted(world.requests.items())
            if "bucket" in name
        )
        assert [name.partition("/")[2] for _, name in (first, second)] == ["bucket0/0", "bucket2/0"]
        kept.append([residuals.of(name, 1, 4) for residuals, name in (first, second) if residuals])
    assert [now is before for before, now in zip(*kept, strict=True)] == [True, False]


def test_dropped_optimizer_frees_its_residuals(world: FakeWorld, model: Model) -> None:
    """Each residual is as large as its tensor."""
    optimizer = wrap(model)
    for _ in range(2):
        train_one_step(model, optimizer)
    gradients = [request for request in world.requests.values() if request.options.purpose == "gradient"]
    (residuals,) = {request.options.residuals for request in gradients}
    gone = weakref.ref(residuals)
    world.requests.clear()
    del optimizer, gradients, residuals
    gc.collect()
    assert gone() is None


def step_without_synchronize(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    with optimizer.skip_synchronize():
        optimizer.step()


def clip_after_the_push(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    nn.utils.clip_grad_norm_(model.first.parameters(), 1e-3)
    optimizer.step()


def scale_rows_after_the_push(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    assert model.words.weight.grad is not None
    model.words.weight.grad._values().mul_(0.5)
    optimizer.step()


def edit_one_element_of_data(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    assert model.last.weight.grad is not None
    model.last.weight.grad.data[0, 2] += 1e-6
    optimizer.step()


def negate_data(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    """Its sum may stay what it was."""
    model.loss().backward()
    for parameter in model.first.parameters():
        assert parameter.grad is not None
        parameter.grad.data.neg_()
    optimizer.step()


def edit_rows_of_data(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    assert model.words.weight.grad is not None
    model.words.weight.grad.data._values()[1] = 0
    optimizer.step()


def edit_by_numpy(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    assert model.first.bias.grad is not None
    model.first.bias.grad.numpy()[:] = 0
    optimizer.step()


def drop_after_the_push(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    model.zero_grad()
    optimizer.step()


MISUSE = {
    step_without_synchronize: "call synchronize",
    clip_after_the_push: "changed since backward computed it",
    scale_rows_after_the_push: "'words.weight': changed since",
    edit_one_element_of_data: "'last.weight': changed since",
    negate_data: "'first.(weight|bias)': changed since",
    edit_rows_of_data: "'words.weight': changed since",
    edit_by_numpy: "'first.bias': changed since",
    drop_after_the_push: "changed since",
}


@pytest.mark.parametrize("step", ["first step", "later step"])
@pytest.mark.parametrize(("misuse", "message"), MISUSE.items(), ids=[misuse.__name__ for misuse in MISUSE])
def test_misuse_that_would_train_wrongly_is_refused_in_each_step(
    misuse: Callable[[Model, zps.DistributedOptimizer], None], message: str, step: str, model: Model
) -> None:
    optimizer = wrap(model)
    if step == "later step":
        train_one_step(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UsageError, match=message):
        misuse(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_state_and_groups_are_those_of_the_wrapped_optimizer(
    model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    inner = optimizer._inner
    for name, value in {
        "state": defaultdict(dict, {model.last.bias: {"momentum_buffer": torch.ones(1)}}),
        "param_groups": [{**inner.param_groups[0], "lr": 7.0}],
        "defaults": {**inner.defaults, "lr": 7.0},
    }.items():
        assert getattr(optimizer, name) is getattr(inner, name)
        setattr(optimizer, name, value)
        assert getattr(optimizer, name) is getattr(inner, name) is value
    before = model.last.bias.detach().clone()
    model.loss().backward()
    optimizer.step()
    assert torch.allclose(before - model.last.bias, torch.tensor(14.0))  # a gradient of 2 rows


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_is_refused_and_leaves_hooks_as_they_are(
    copy_of: Callable[[object], object], model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    with pytest.raises(UsageError, match=r"copied.*wrap the copy.*state_dict"):
        copy_of(optimizer)
    model.loss().backward()
    optimizer.step()
    assert calls == ["step"]


def refused_step(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    nn.utils.clip_grad_norm_(model.first.parameters(), 1e-3)
    optimizer.step()


def refused_step_of_a_part(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    """One bucket was pushed, another waits for a gradient."""
    model.first(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.first.parameters(), 1e-3)
    optimizer.step()


@pytest.mark.parametrize("step", ["first step", "later step"])
@pytest.mark.parametrize("mistake", [refused_step, refused_step_of_a_part])
def test_zero_grad_ends_a_step_that_was_refused(
    mistake: Callable[[Model, zps.DistributedOptimizer], None],
    step: str,
    world: FakeWorld,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "bucket_bytes", 1)  # each gradient by itself
    optimizer = wrap(model)
    if step == "later step":
        train_one_step(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pushed = world.pushed.copy()
    with pytest.raises(UsageError):
        mistake(model, optimizer)
    with pytest.raises(UsageError):
        optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
    assert world.waited == world.pushed
    if step == "later step":  # every rank pushes each tensor once in a step, or the others would wait for it
        gradients = {name for name in pushed if world.requests[name].options.purpose == "gradient"}
        assert world.pushed - pushed == dict.fromkeys(gradients, 1)

    train_one_step(model, optimizer)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("mistake", [refused_step])
def test_a_refused_step_is_dropped_and_the_delayed_ones_are_applied(
    mistake: Callable[[Model, zps.DistributedOptimizer], None], world: FakeWorld, model: Model
) -> None:
    world.staleness = 2
    optimizer = wrap(model)
    applied: list[dict[str, Tensor | None]] = []

    def note(*_: object) -> None:
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        applied.append({name: None if each is None else each.to_dense() for name, each in gradients.items()})

    optimizer.register_step_pre_hook(note)
    pushed: list[dict[str, Tensor | None]] = []
    for step in range(6):
        optimizer.zero_grad()
        for parameter in model.parameters():  # so that steps have different gradients
            parameter.data += 0.1 * step
        if step == 3:
            with pytest.raises(UsageError):
                mistake(model, optimizer)
            optimizer.zero_grad()
            pushed.append(dict.fromkeys(pushed[0]))
            continue
        model.loss().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        pushed.append({name: each.to_dense() for name, each in gradients.items() if each is not None})
        optimizer.step()
    optimizer.drain()
    nothing = dict.fromkeys(pushed[0])
    assert len(applied) == 2 + 6
    for got, expected in zip(applied, [nothing, nothing, *pushed], strict=True):
        torch.testing.assert_close(got, expected)
    assert world.waited == world.pushed


def state_of(model: Model) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def names_pushed(world: FakeWorld, before: Counter[str]) -> Counter[str]:
    """How often each gradient was pushed since."""
    pushed = world.pushed - before
    return Counter(
        {name: pushed[name] for name in pushed if world.requests[name].options.purpose == "gradient"}
    )


def test_gradients_are_pushed_in_the_last_of_the_passes_that_earlier_steps_had(
    world: FakeWorld, model: Model
) -> None:
    optimizer = wrap(model)
    for step in range(3):
        before = world.pushed.copy()
        for part in range(2):
            model.loss().backward()
            assert bool(names_pushed(world, before)) == (step > 0 and part == 1)
        optimizer.step()
        optimizer.zero_grad()
        assert set(names_pushed(world, before).values()) == {1}
    assert world.waited == world.pushed


def test_a_gradient_of_more_passes_than_before_is_pushed_once(world: FakeWorld, model: Model) -> None:
    """As an expert's, to which this rank sends more micro-batches than before. Another push would wait for
    the other ranks, which have no reason for one.
    """
    model.words.weight.requires_grad_(False)
    expert = nn.Embedding(10, 2, sparse=True)
    named = [*model.named_parameters(), ("expert", next(expert.parameters()))]
    optimizer = zps.DistributedOptimizer(torch.optim.SGD([each for _, each in named], lr=1.0), named)
    before = expert.weight.detach().clone()
    for uses in ([True, False], [False, True], [True, True], [False, False]):
        world.pushed.clear()
        world.waited.clear()
        for is_used in uses:
            loss = model.loss()
            (loss + expert(torch.tensor([3])).sum() if is_used else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert set(world.pushed.values()) == {1}
        assert not [name for name in world.pushed if "backward ran again" in name]
    assert torch.allclose(before[3] - expert.weight[3], torch.tensor(4.0))


def test_what_backward_computes_again_after_its_push_is_pushed_again(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    before, bias = world.pushed.copy(), model.last.bias.detach().clone()
    model.loss().backward()
    model.loss().backward()
    optimizer.step()
    assert set(names_pushed(world, before).values()) == {2}
    assert torch.allclose(bias - model.last.bias, torch.tensor(0.4))  # two passes over two rows
    assert all("computed again" in world.requests[name].options.given for name in names_pushed(world, before))
    assert world.waited == world.pushed


@pytest.mark.parametrize(("elsewhere", "times"), [(False, 1), (True, 2)])
def test_only_what_any_rank_has_computed_again_is_pushed_again(
    elsewhere: bool,
    times: int,
    world: FakeWorld,
    model: Model,
    optimizer: zps.DistributedOptimizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = world.begin

    def begin_beside_another(request: Request) -> Pending:
        pending = begin(request)
        if elsewhere and request.name.endswith("backward ran again"):
            pending.convert_result(torch.ones_like)
        return pending

    monkeypatch.setattr(world, "begin", begin_beside_another)
    before = world.pushed.copy()
    model.loss().backward()
    model.words(torch.tensor([1])).sum().backward()
    optimizer.step()
    pushed = {"words" in name: count for name, count in names_pushed(world, before).items()}
    assert pushed == {True: 2, False: times}
    assert world.waited == world.pushed


def test_zero_grad_throws_away_what_was_pushed(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pushed = world.pushed.copy()
    model.words(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    assert all(map(torch.equal, before, model.parameters()))
    assert set(names_pushed(world, pushed).values()) == {1}, "others wait for each of them"
    train_one_step(model, optimizer)
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(
        "1 step(s) thrown away" in request.options.given
        for request in world.requests.values()
        if request.options.purpose == "gradient"
    )
    assert world.waited == world.pushed


@pytest.mark.parametrize("layer", [nn.Linear(2, 1), nn.Embedding(4, 2, sparse=True)], ids=str)
def test_gradients_of_one_kind_alone_are_thrown_away_together_too(world: FakeWorld, layer: nn.Module) -> None:
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters()
    )
    given = torch.ones(3, 2) if isinstance(layer, nn.Linear) else torch.tensor([1, 3])
    for number in range(3):
        before = world.pushed.copy()
        layer(given).sum().backward()
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()
        ((name, times),) = names_pushed(world, before).items()
        assert times == 1
        assert ("1 step(s) thrown away" in world.requests[name].options.given) == (number == 2)
    assert world.waited == world.pushed


def test_what_left_a_residual_is_neither_pushed_again_nor_thrown_away(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    """Even if the residual is another rank's, as of a host with two levels."""
    world.keeps_residuals = True
    model.loss().backward()
    with pytest.raises(UsageError, match=r"got zero_grad\(\)"):
        optimizer.zero_grad()
    optimizer.zero_grad()
    model.words(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"'words.weight'.*sparsified.*no_sync\(\)"):
        model.words(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    train_one_step(model, optimizer)
    assert world.waited == world.pushed


def pushes_dropped(world: FakeWorld, before: Counter[str]) -> set[bool]:
    """Whether the gradients that were pushed since leave residuals as they are."""
    return {world.requests[name].options.is_dropped for name in names_pushed(world, before)}


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_is_thrown_away_before_it_was_pushed_leaves_residuals_as_they_are(
    is_refused: bool, world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    world.keeps_residuals = True
    for _ in range(2):
        before, weights = world.pushed.copy(), state_of(model)
        with optimizer.no_sync():
            model.loss().backward()
        if is_refused:
            nn.utils.clip_grad_norm_(model.first.parameters(), 1e-3)
            with pytest.raises(UsageError, match="changed since"):
                optimizer.step()
        assert not names_pushed(world, before)
        optimizer.zero_grad()
        assert pushes_dropped(world, before) == {True}
        assert all(torch.equal(weights[name], each) for name, each in state_of(model).items())
        before = world.pushed.copy()
        train_one_step(model, optimizer)
        assert pushes_dropped(world, before) == {False}
    assert world.waited == world.pushed


def test_averages_whose_rest_is_in_residuals_are_thrown_away_by_a_second_call_only(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    world.keeps_residuals = True
    for has_second_thoughts in (True, False):
        bias = model.last.bias.detach().clone()
        model.loss().backward()
        optimizer.synchronize()
        with pytest.raises(UsageError, match=r"step\(\) after synchronize\(\), got zero_grad"):
            optimizer.zero_grad()
        before = world.pushed.copy()
        if has_second_thoughts:
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(bias, model.last.bias) != has_second_thoughts
        assert world.pushed == before
        assert model.last.bias.grad is None
    train_one_step(model, optimizer)
    assert world.waited == world.pushed


def test_no_sync_adds_up_gradients(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    before, bias = world.pushed.copy(), model.last.bias.detach().clone()
    for _ in range(2):
        with optimizer.no_sync():
            model.loss().backward()
            model.loss().backward()
        assert not names_pushed(world, before)
    model.loss().backward()
    assert names_pushed(world, before)
    optimizer.step()
    assert set(names_pushed(world, before).values()) == {1}
    assert torch.allclose(bias - model.last.bias, torch.tensor(1.0))  # five passes over two rows


def test_backward_while_a_cuda_graph_is_captured_is_refused_in_a_pass_that_pushes_nothing_too(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays would write gradients that ``step()`` has replaced, and each step would apply old averages."""
    before = world.pushed.copy()
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with (
            optimizer.no_sync(),
            pytest.raises(UsageError, match=r"'last.bias': expected no CUDA graph .*make_graphed_callables"),
        ):
            model.loss().backward()
    assert world.pushed == before
    optimizer.zero_grad()
    train_one_step(model, optimizer)
    assert world.waited == world.pushed


def test_step_after_synchronize_simply_steps(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    for _ in range(2):
        before, bias = world.pushed.copy(), model.last.bias.detach().clone()
        optimizer.zero_grad()
        model.loss().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_value_(model.last.bias, 0.5)
        optimizer.step()
        assert set(names_pushed(world, before).values()) == {1}
        assert torch.allclose(bias - model.last.bias, torch.tensor(0.05))


def test_step_after_a_synchronize_whose_averages_are_all_zeros_simply_steps(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    """They were taken for cleared ones, and pushed again."""
    for _ in range(2):
        before = world.pushed.copy()
        (model.loss() * 0).backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        assert set(names_pushed(world, before).values()) == {1}
    (model.loss() * 0).backward()
    optimizer.synchronize()
    model.zero_grad()
    before = world.pushed.copy()
    optimizer.step()
    assert set(names_pushed(world, before).values()) == {1}, "left out, by the script"


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_gradient_that_is_changed_is_refused_after_fewer_passes_than_expected_too(
    passes: int, world: FakeWorld, model: Model
) -> None:
    """As in the last batches of an epoch."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zps.DistributedOptimizer(sgd, model.named_parameters(), backward_passes_per_step=3)
    for _ in range(passes):
        model.loss().backward()
    nn.utils.clip_grad_value_(model.last.bias, 0.5)
    with pytest.raises(UsageError, match=r"'last.bias': changed since backward computed it"):
        optimizer.step()


def test_the_passes_of_a_step_may_change_during_training(world: FakeWorld, model: Model) -> None:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), backward_passes_per_step=1)
    train_one_step(model, optimizer)
    assert optimizer.backward_passes_per_step == 1
    with pytest.raises(UsageError, match="= 0: expected an integer, at least 1"):
        optimizer.set_backward_passes_per_step(0)
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2
    before = world.pushed.copy()
    model.loss().backward()
    assert world.pushed == before, "in the last pass"
    model.loss().backward()
    assert set(names_pushed(world, before).values()) == {1}
    optimizer.step()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_whose_optimizer_raises_applies_the_same_averages_when_it_is_repeated(
    world: FakeWorld, model: Model, staleness: int
) -> None:
    """It pushed the averages again, which met the other ranks' next gradients."""
    world.staleness = staleness
    optimizer = wrap(model)
    for _ in range(1 + staleness):
        train_one_step(model, optimizer)

    def raise_once(*_: object) -> None:
        hook.remove()
        raise MemoryError("state of Adam")

    hook = optimizer.register_step_pre_hook(raise_once)
    before, bias = world.pushed.copy(), model.last.bias.detach().clone()
    optimizer.zero_grad()
    model.loss().backward()
    with pytest.raises(MemoryError, match="Adam"):
        optimizer.step()
    assert torch.equal(model.last.bias, bias)
    optimizer.step()
    assert set(names_pushed(world, before).values()) == {1}
    assert torch.allclose(bias - model.last.bias, torch.tensor(0.2))
    before = world.pushed.copy()
    train_one_step(model, optimizer)
    assert set(names_pushed(world, before).values()) == {1}


@pytest.mark.parametrize("staleness", [1, 2])
def test_step_after_a_synchronize_without_averages_simply_steps(
    world: FakeWorld, model: Model, staleness: int
) -> None:
    """Those of the first steps come later."""
    world.staleness = staleness
    optimizer, weights = wrap(model), state_of(model)
    for _ in range(staleness + 1):
        assert all(torch.equal(weights[name], each) for name, each in state_of(model).items())
        before = world.pushed.copy()
        model.loss().backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        assert set(names_pushed(world, before).values()) == {1}
    assert not all(torch.equal(weights[name], each) for name, each in state_of(model).items())
    assert optimizer.state_dict()["zenps"] == {"step": staleness + 1}


def test_a_step_number_of_another_consistency_is_not_loaded(
    world: FakeWorld, optimizer: zps.DistributedOptimizer
) -> None:
    """Under bsp a state has none: other ranks, which are only sent this one's, would count differently."""
    before = optimizer._consistency.step
    optimizer.load_state_dict({**optimizer.state_dict(), "zenps": {"step": 1000}})
    assert optimizer._consistency.step == before


def test_backward_after_synchronize_makes_step_average_again(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    before = world.pushed.copy()
    model.loss().backward()
    optimizer.synchronize()
    model.loss().backward()
    optimizer.step()
    assert set(names_pushed(world, before).values()) == {2}
    assert world.waited == world.pushed


def test_a_step_that_ranks_do_not_drop_together_does_not_count_as_thrown_away(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    """Those that take it have not counted it, and would refuse the next push."""

    def disagree(is_dropped: bool, pushes_again: bool) -> NoReturn:
        raise MismatchError("rank 0 drops a step, rank 1 takes it")

    model.loss().backward()
    with optimizer.announcing(disagree), pytest.raises(MismatchError, match="rank 1 takes it"):
        optimizer.zero_grad()
    assert world.waited == world.pushed
    optimizer.zero_grad()
    train_one_step(model, optimizer)
    assert not any("thrown away" in request.options.given for request in world.requests.values())


def test_a_step_that_ranks_do_not_take_together_leaves_residuals_as_they_are(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    def disagree(is_dropped: bool, pushes_again: bool) -> NoReturn:
        raise MismatchError("rank 0 takes a step, rank 1 drops it")

    before, weights = world.pushed.copy(), state_of(model)
    with optimizer.no_sync():
        model.loss().backward()
    with optimizer.announcing(disagree), pytest.raises(MismatchError, match="rank 1 drops it"):
        optimizer.step()
    assert pushes_dropped(world, before) == {True}
    assert all(torch.equal(weights[name], each) for name, each in state_of(model).items())
    assert world.waited == world.pushed


def leave_out_by_scaler(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    scale_and_step(model, optimizer, float("inf"))


def leave_out_after_synchronize(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    optimizer.synchronize()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("leave_out", [leave_out_by_scaler, leave_out_after_synchronize])
def test_a_rank_without_backward_takes_part_after_a_step_that_was_left_out(
    leave_out: Callable[[Model, zps.DistributedOptimizer], None],
    set_to_none: bool,
    world: FakeWorld,
    model: Model,
    optimizer: zps.DistributedOptimizer,
) -> None:
    """Of which only the model has cleared the gradients; the other ranks wait for this one."""
    leave_out(model, optimizer)
    model.zero_grad(set_to_none)
    before = world.pushed.copy()
    optimizer.step()
    assert len(names_pushed(world, before)) == 2
    assert set(names_pushed(world, before).values()) == {1}
    assert world.waited == world.pushed


def test_unfrozen_and_added_parameters_are_pushed(world: FakeWorld) -> None:
    model, late = Model(), nn.Parameter(torch.ones(3))
    model.first.weight.requires_grad_(False)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = model.first.weight.detach().clone()

    model.first.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    for step in range(3):
        before = world.pushed.copy()
        (model.loss() + late.sum()).backward()
        in_backward = 3 if step == 2 else 2
        assert len(names_pushed(world, before)) == in_backward, "once a step has counted its passes"
        optimizer.step()
        optimizer.zero_grad()
        assert set(names_pushed(world, before).values()) == {1}
        assert len(names_pushed(world, before)) == 3
    assert torch.equal(late.detach(), torch.full((3,), -2.0))
    assert not torch.equal(weight, model.first.weight)


def step_of_two_passes(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    for _ in range(2):
        model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def unfreeze(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.first.weight.requires_grad_(True)
    step_of_two_passes(model, optimizer)


def agree_with_one_that_joins(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    optimizer.adopt_agreement(0)


@pytest.mark.parametrize("change", [unfreeze, agree_with_one_that_joins])
def test_several_passes_go_on_after_a_change_of_ranks_or_parameters(
    change: Callable[[Model, zps.DistributedOptimizer], None], world: FakeWorld, model: Model
) -> None:
    """What a pass before the last had pushed could not be computed again."""
    world.keeps_residuals = True
    model.first.weight.requires_grad_(False)
    optimizer = wrap(model)
    step_of_two_passes(model, optimizer)
    change(model, optimizer)
    for _ in range(2):
        before = world.pushed.copy()
        step_of_two_passes(model, optimizer)
        assert set(names_pushed(world, before).values()) == {1}
    assert world.waited == world.pushed


def test_steps_that_were_thrown_away_count_anew_once_a_rank_has_joined(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    """One that joins knows of none; what ranks are given must be equal."""
    model.loss().backward()
    optimizer.zero_grad()
    for said in (True, False):
        before = world.pushed.copy()
        train_one_step(model, optimizer)
        given = [world.requests[name].options.given for name in names_pushed(world, before)]
        assert [bool(each) for each in given] == [said] * len(given)
        optimizer.adopt_agreement(0)


def test_steps_that_one_rank_has_thrown_away_count_anew_once_ranks_have_its_state(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    model.loss().backward()
    optimizer.zero_grad()
    zps.broadcast_optimizer_state(optimizer)
    before = world.pushed.copy()
    train_one_step(model, optimizer)
    names = [name for name in names_pushed(world, before) if name.startswith("optimizer")]
    assert names
    assert not any(world.requests[name].options.given for name in names)
    assert optimizer._consistency.step == 1


def test_one_that_joins_learns_how_many_passes_there_are(
    world: FakeWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.keeps_residuals = True
    optimizer, model_of_other = wrap(model), Model()
    joined = wrap(model_of_other)
    step_of_two_passes(model, optimizer)
    sent: list[object] = []

    def broadcast(value: object, *_: object) -> object:
        sent.append(value)
        return sent[0]

    monkeypatch.setattr(agreement, "broadcast_object", broadcast)
    for each in (optimizer, joined):
        each.adopt_agreement(0)
    of_other = {name.partition("/")[2]: 1 for name in names_pushed(world, Counter())}
    before = world.pushed.copy()
    model_of_other.loss().backward()
    assert not names_pushed(world, before)
    model_of_other.loss().backward()
    pushed = names_pushed(world, before)
    assert {name.partition("/")[2]: times for name, times in pushed.items()} == of_other
    joined.step()
    assert world.pushed - before == pushed, "it asks nothing that ranks have agreed on"
    assert world.waited == world.pushed


def test_new_parameter_with_the_name_of_another_is_refused(world: FakeWorld, model: Model) -> None:
    late = nn.Parameter(torch.ones(3))
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    optimizer.add_param_group({"params": [("last.bias", late)]})
    (model.loss() + late.sum()).backward()
    pushed = world.pushed.copy()
    with pytest.raises(UsageError, match=r"two parameters have the name 'last.bias'"):
        optimizer.step()
    assert world.pushed == pushed


def test_a_second_synchronize_that_is_refused_leaves_nothing_to_step_with(
    world: FakeWorld, model: Model
) -> None:
    """Other ranks may have pushed in it: they wait for what ``zero_grad()`` pushes."""
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    before = state_of(model)
    model.loss().backward()
    optimizer.synchronize()
    model.last.bias.requires_grad_(False)
    optimizer.add_param_group({"params": [("last.bias", nn.Parameter(torch.ones(1)))]})
    for refused in (optimizer.synchronize, optimizer.step):
        with pytest.raises(UsageError, match=r"the name 'last.bias'.*zero_grad\(\) ends this step"):
            refused()
    pushed = world.pushed.copy()
    optimizer.zero_grad()
    assert set(names_pushed(world, pushed).values()) == {1}
    assert all(torch.equal(before[name], each) for name, each in state_of(model).items())


def test_table_that_is_tied_to_a_dense_layer_later_has_a_dense_average(
    model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    before = model.words.weight.detach().clone()
    for _ in range(2):
        (model.words(torch.tensor([1])).sum() + model.words.weight.sum()).backward()
        optimizer.step()
        assert model.words.weight.grad is not None
        assert not model.words.weight.grad.is_sparse
        optimizer.zero_grad()
    expected = torch.full((10, 2), 0.2)
    expected[1] = 0.4
    torch.testing.assert_close(before - model.words.weight, expected)

    model.words(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert model.words.weight.grad is not None
    assert model.words.weight.grad.is_sparse


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_table_without_a_gradient_stays_dense_until_a_rank_has_joined(
    has_joined: bool, world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    """One that joins does not know that the table was dense, and may have no gradient for it either."""
    model.words.weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if has_joined:
        optimizer.adopt_agreement(0)
    model.last.bias.sum().backward()
    optimizer.step()
    (given,) = (each.options.given for name, each in world.requests.items() if "words" in name)
    assert ("dense at present" in given) == (not has_joined)


def test_dense_gradient_that_is_sparse_later(world: FakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    words = nn.Embedding(10, 2, sparse=True)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0))
    words.weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = words.weight.detach().clone()
    words(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    expected = torch.zeros(10, 2)
    expected[[1, 3]] = 1.0
    torch.testing.assert_close(before - words.weight, expected)
    for _ in range(2):
        optimizer.zero_grad()
        words(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
    assert caplog.text.count("gradient of 'parameter0' is sparse now, but was dense in its first step") == 1


def make_state_by_a_step_of_zeros(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def make_state_for_a_checkpoint(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    get_optimizer_state_dict(model, optimizer)


@pytest.mark.parametrize("make_state", [make_state_by_a_step_of_zeros, make_state_for_a_checkpoint])
def test_a_table_is_pushed_sparse_after_a_step_of_zeros_that_makes_the_state(
    make_state: Callable[[Model, zps.DistributedOptimizer], None], world: FakeWorld, model: Model
) -> None:
    """It was taken for dense, in all later steps."""
    optimizer, weights = wrap(model), state_of(model)
    make_state(model, optimizer)
    assert all(torch.equal(weights[name], each) for name, each in state_of(model).items())
    for _ in range(2):
        train_one_step(model, optimizer)
    pushed = [each for name, (each, *_) in world.requests.items() if not name.endswith("kinds")]
    assert sorted(each.is_sparse for each in pushed if each.is_floating_point()) == [False, True]


def test_zeros_of_some_ranks_are_those_of_all(
    world: FakeWorld, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = wrap(model)

    def counts(agreement: ParameterAgreement, has_run_backward: bool) -> list[list[int]]:
        return [[0, 0, 0, number] for number in range(len(agreement.names))]

    monkeypatch.setattr(ParameterAgreement, "_count_kinds", counts)
    optimizer.step()
    none, *zeros = (parameter.grad for parameter in model.parameters())
    assert none is None
    assert all(gradient is not None and not gradient.any() for gradient in zeros)


@pytest.mark.parametrize(
    "make", [lambda: nn.Embedding(10, 2, max_norm=1.0), lambda: nn.EmbeddingBag(10, 2, max_norm=1.0)]
)
def test_max_norm_is_refused(make: Callable[[], nn.Module], world: FakeWorld) -> None:
    table = make()
    with pytest.raises(UsageError, match=r"Embedding.*max_norm.*diverge"):
        zps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    assert not world.pushed


def test_max_norm_is_refused_alone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "_world", LocalWorld(Config()))
    table = nn.Embedding(10, 2, max_norm=1.0)
    with pytest.raises(UsageError, match="max_norm"):
        zps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))


@pytest.mark.parametrize("is_added", [False, True])
def test_max_norm_of_a_table_that_joins_later_is_refused(is_added: bool, model: Model) -> None:
    """Ranks would apply it to the rows that each looks up, as in the first step."""
    table = nn.Embedding(10, 2, max_norm=1.0).requires_grad_(is_added)
    parameters = [*model.parameters()] if is_added else [*model.parameters(), *table.parameters()]
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    train_one_step(model, optimizer)
    if is_added:
        optimizer.add_param_group({"params": table.parameters()})
    table.requires_grad_(True)
    (model.loss() + table(torch.tensor([1, 3])).sum()).backward()
    with pytest.raises(UsageError, match=r"Embedding.*max_norm.*diverge.*; zero_grad\(\) ends this step"):
        optimizer.step()
    optimizer.zero_grad()
    table.requires_grad_(False)
    train_one_step(model, optimizer)


def test_lbfgs_is_refused(world: FakeWorld, model: Model) -> None:
    with pytest.raises(UsageError, match=r"LBFGS.*use another"):
        zps.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    assert not world.pushed


def test_lbfgs_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which evaluates its closure several times in a step."""
    monkeypatch.setattr(PROCESS, "_world", LocalWorld(Config()))
    losses = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        if is_wrapped:
            optimizer = zps.DistributedOptimizer(optimizer, model.named_parameters())

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(torch.eye(3)) - torch.arange(6.0).view(3, 2)).square().sum()
            loss.backward()
            return loss

        losses.append([float(optimizer.step(closure)) for _ in range(3)])  # type: ignore[arg-type]
    assert losses[0] == losses[1]
    assert losses[0][2] < 1e-3 < losses[0][0]


class OfTwo(torch.optim.SGD):
    """Steps by another optimizer, as SAM does."""

    def second_step(self) -> None:
        torch.optim.SGD(self.param_groups).step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.second_step()


@pytest.mark.parametrize("is_synchronized", [False, True])
@pytest.mark.parametrize("method", ["step", "second_step"])
def test_an_optimizer_that_steps_without_its_wrapper_is_named_once(
    method: str, is_synchronized: bool, world: FakeWorld, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    inner = OfTwo(model.parameters(), lr=0.1)
    optimizer = zps.DistributedOptimizer(inner, model.named_parameters())
    other = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    unrelated = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    train_one_step(model, optimizer)
    other.zero_grad()
    for _ in range(2):
        model.loss().backward()
        unrelated.step()
        if is_synchronized:
            optimizer.synchronize()
            other.drop_step()
        getattr(inner, method)()
        inner.zero_grad()
    said = [each for each in caplog.messages if "steps with gradients of this worker alone" in each]
    assert len(said) == (0 if is_synchronized else 2), "one for each wrapper"


def test_it_passes_for_the_wrapped_optimizer(optimizer: zps.DistributedOptimizer) -> None:
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(optimizer, zps.DistributedOptimizer)
    assert not isinstance(optimizer, torch.optim.Adam)


def scale_and_step(model: Model, optimizer: zps.DistributedOptimizer, factor: float = 1.0) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model.loss() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_scaler_in_its_usual_order(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    before = model.last.bias.detach().clone()
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scale_and_step(model, optimizer, factor)
    # Two rows, so that the bias has a gradient of 2.
    assert torch.allclose(before - model.last.bias, torch.tensor(0.4))
    assert world.waited == world.pushed


@pytest.mark.parametrize("is_by_script", [False, True])
def test_only_a_script_that_synchronizes_itself_is_warned_in_horovods_words(
    is_by_script: bool, world: FakeWorld, model: Model
) -> None:
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    optimizer.synchronize()
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if is_by_script:
                model.loss().backward()
                optimizer.synchronize()
                optimizer.step()
            else:
                scale_and_step(model, optimizer)
            optimizer.zero_grad()
    said = [each for each in caught if "without optimizer.skip_synchronize() context" in str(each.message)]
    assert len(said) == (2 if is_by_script else 0)


def test_of_two_optimizers_of_the_same_parameters_each_needs_a_backward_of_its_own(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    other = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for each in (optimizer, other, optimizer):
        each.zero_grad()
        model.loss().backward()
        each.step()
    with pytest.raises(UsageError, match="if another DistributedOptimizer has averaged it, run backward for"):
        other.step()
    other.zero_grad()
    assert world.waited == world.pushed


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_unscales_for_clipping_waits_for_averages(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer, is_enabled: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_enabled)

    def unscale_and_clip() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.last.parameters(), 0.1)

    before = model.last.bias.detach().clone()
    scaler.scale(model.loss()).backward()
    unscale_and_clip()
    with pytest.raises(UsageError, match=r"to clip or unscale, call"):
        scaler.step(optimizer)
    assert torch.equal(model.last.bias, before)
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(model.loss()).backward()
    optimizer.synchronize()
    unscale_and_clip()
    pushed = Counter(world.pushed)
    scaler.step(optimizer)
    assert not torch.equal(model.last.bias, before)
    assert world.pushed == pushed, "averages are not averaged again"


def test_a_scaler_is_refused_where_residuals_would_be_of_another_scale(
    world: FakeWorld, model: Model, optimizer: zps.DistributedOptimizer
) -> None:
    world.keeps_residuals = True
    before = model.last.bias.detach().clone()
    with pytest.raises(UsageError, match=r"sync.values = same, got quantized values.*bfloat16 autocast"):
        scale_and_step(model, optimizer)
    for _ in range(2):  # the first one says that what was pushed is lost
        with contextlib.suppress(UsageError):
            optimizer.zero_grad()
    assert torch.equal(model.last.bias, before)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(model.loss()).backward()
    disabled.step(optimizer)
    assert not torch.equal(model.last.bias, before)
    assert world.waited == world.pushed


def test_alone_a_scaler_needs_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "_world", LocalWorld(Config()))
    model = Model()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.last.bias.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        scale_and_step(model, optimizer)
    # Two rows, so that the bias has a gradient of 2.
    assert torch.allclose(before - model.last.bias, torch.tensor(0.4))
