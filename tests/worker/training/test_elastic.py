"""A worker's rounds where others are lost and admitted, and the training state."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import zenps as zps
from tests.worker.encode.test_transfer import make_ranges
from tests.worker.training.test_optimizer import FakeWorld
from zenps.buffers import BufferPool
from zenps.errors import DeadlineError, PeerLostError, UsageError
from zenps.wire.messages import FromServer, Push, Result, Wanted
from zenps.wire.scheduler_messages import Member
from zenps.worker.collectives.allgather import allgather_int
from zenps.worker.core.transfer import Answer, Sharding
from zenps.worker.encode.dense import DenseTransfer, RootLostError, WholeTransfer
from zenps.worker.encode.quantizer import Unchanged
from zenps.worker.process import PROCESS
from zenps.worker.rounds.states import Action, Deliver, Fail, Outgoing, Reshard, Round, SendGiveUp, SendPush
from zenps.worker.rounds.tracker import WorkerRounds
from zenps.worker.training import elastic

ALL = frozenset({0, 1, 2})
FRAMES = (memoryview(b""), memoryview(b"values"))


class Place(NamedTuple):
    epoch: int
    row: int


class Worker:
    """Rounds under a first ring, and whatever comes after; what has to be resharded is at once."""

    def __init__(self) -> None:
        self.rounds = WorkerRounds(30.0)
        self.view(1, ALL)

    def view(self, ring_epoch: int, workers: frozenset[int]) -> list[Action]:
        self.ring_epoch = ring_epoch
        server = Member("server", 0, "box", 50, "tcp://box:1", "")
        return self._resharded(self.rounds.on_view(ring_epoch, [server], workers))

    def submit(self, tensor: str = "t", step: int = 0) -> Round:
        round_ = Round(tensor, step, self.ring_epoch, make_outgoing(tensor, step, self.ring_epoch))
        self.rounds.submit(round_, 0.0)
        return round_

    def reply(self, message: FromServer, frames: Sequence[memoryview] = ()) -> list[Action]:
        return self._resharded(self.rounds.on_reply(0, message, frames, 0.0))

    def answer(self, round_: Round) -> Action:
        (action,) = self.reply(Result(self.ring_epoch, round_.tensor, round_.step, 0, 2, "coo"), FRAMES)
        return action

    def _resharded(self, actions: Sequence[Action]) -> list[Action]:
        following: list[Action] = []
        for action in actions:
            if isinstance(action, Reshard):
                round_ = action.round
                outgoing = make_outgoing(round_.tensor, round_.step, self.ring_epoch)
                following += self.rounds.on_resharded(round_, self.ring_epoch, None, outgoing, 0.0)
            else:
                following.append(action)
        return following


def make_outgoing(tensor: str, step: int, ring_epoch: int) -> Sequence[Outgoing]:
    push = Push(ring_epoch, 0, tensor, step, 0, 1, "sparse", "float32", (8, 4), 4, 4, 2, "coo", True)
    return [Outgoing(0, push, FRAMES)]


@pytest.fixture
def worker() -> Worker:
    return Worker()


# ── losses ──────────────────────────────────────────────────────────────────────────────────────


def test_a_round_in_flight_outlives_another_worker(worker: Worker) -> None:
    round_ = worker.submit()
    assert worker.view(1, ALL - {2}) == []
    assert isinstance(worker.answer(round_), Deliver)


@pytest.mark.parametrize("at_once", [True, False])
def test_but_not_a_change_of_the_ring_as_well(worker: Worker, at_once: bool) -> None:
    round_ = worker.submit()
    if not at_once:
        worker.view(1, ALL - {2})
    fail, *told = worker.view(2, ALL - {2})
    assert isinstance(fail, Fail)
    assert {type(action) for action in told} == {SendGiveUp}
    assert fail.round is round_
    assert isinstance(fail.error, PeerLostError)
    assert "tensor 't', step 0: rank(s) 2 were lost, and servers have changed" in str(fail.error)
    assert worker.rounds.in_flight == 0


def test_what_began_after_the_loss_is_pushed_again(worker: Worker) -> None:
    worker.view(1, ALL - {2})
    worker.submit()
    (push,) = worker.view(2, ALL - {2})
    assert isinstance(push, SendPush)


def test_a_round_that_has_ended_is_kept_for_others_whoever_is_lost(worker: Worker) -> None:
    round_ = worker.submit()
    worker.answer(round_)
    assert worker.view(2, ALL - {2}) == []
    (push,) = worker.reply(Wanted(2, "t", 0, 0))
    assert isinstance(push, SendPush)


# ── joining workers ─────────────────────────────────────────────────────────────────────────────


def test_an_admission_resets_steps_and_watermark(worker: Worker) -> None:
    worker.answer(worker.submit())
    worker.rounds.on_watermark(2)
    assert (worker.rounds.kept, worker.rounds.watermark) == (1, 2)
    assert worker.rounds.reset() == []
    assert worker.view(2, ALL) == []
    assert (worker.rounds.kept, worker.rounds.in_flight, worker.rounds.watermark) == (0, 0, 0)
    assert isinstance(worker.answer(worker.submit()), Deliver)
    worker.rounds.on_watermark(1)
    assert worker.rounds.watermark == 1


def test_what_is_in_flight_at_an_admission_fails(worker: Worker) -> None:
    round_ = worker.submit()
    (fail,) = worker.rounds.reset()
    assert isinstance(fail, Fail)
    assert (fail.round, type(fail.error)) == (round_, UsageError)
    assert "wait for it before TrainingState.commit()" in str(fail.error)
    assert worker.view(2, ALL) == []


# ── broadcasts ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [3, 70_000])
def test_what_no_rank_contributed_to_is_an_error_where_one_should_have(count: int) -> None:
    tensor = torch.ones(count)
    result = Result(1, "x", 0, 0, 0, "none")
    nothing, coder = (memoryview(b""),), Unchanged(tensor.dtype)
    for contributes in (False, True):
        transfer: WholeTransfer | DenseTransfer
        if count == 3:
            transfer = WholeTransfer(tensor, Sharding(None, 1, 0), contributes, coder)
        else:
            transfer = DenseTransfer(
                tensor, Sharding(make_ranges(count, [0]), 1, 0), BufferPool(1 << 20), contributes, coder
            )
        assert not transfer.on_answer(Answer(0, result, nothing))
        if contributes:
            assert not transfer.finish().any()
            continue
        with pytest.raises(PeerLostError, match="the root is not in the job"):
            transfer.finish()


# ── a training state, alone ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def alone() -> Iterator[None]:
    zps.init()
    yield
    zps.shutdown()


@pytest.mark.usefixtures("alone")
def test_a_state_holds_values_and_leaves_a_lone_worker_as_it_is() -> None:
    model = torch.nn.Linear(2, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = zps.TrainingState(model=model, optimizers=[optimizer], step=3, name="x", best=[0.5, None])
    state.step += 1
    state.commit()
    assert (state.step, state.name, state.best) == (4, "x", [0.5, None])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(AttributeError, match="no value 'epoch'"):
        _ = state.epoch


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, steps], milestones=[3])


@pytest.mark.usefixtures("alone")
def test_a_scheduler_goes_on_from_the_state_that_was_brought() -> None:
    """Its milestones are a Counter, and arrived as a dict: it raised AttributeError at the first of them."""
    rates: list[list[float]] = []
    for is_resumed in (False, True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = scheduler_of(optimizer)
        rates.append([])
        for step in range(9):
            optimizer.step()
            scheduler.step()
            rates[-1] += map(float, scheduler.get_last_lr())
            if is_resumed and step == 1:
                state = zps.TrainingState(scheduler=scheduler.state_dict())
                scheduler.load_state_dict(state.scheduler)
    assert rates[0] == rates[1]
    assert rates[0][-1] == pytest.approx(0.001), "after three milestones"


@pytest.mark.usefixtures("alone")
def test_values_keep_their_class_or_are_refused() -> None:
    values = [Counter({3: 2, 1: 1}), OrderedDict(b=torch.ones(1), a=(Counter(),)), {}, torch.Size([2])]
    brought = zps.TrainingState(values=values).values
    assert [type(each) for each in brought] == [Counter, OrderedDict, dict, tuple]
    assert brought == values
    assert list(brought[1]) == ["b", "a"]
    assert type(brought[1]["a"][0]) is Counter
    for value, reason in (
        (Place(3, 4), r"state Place\(epoch=3, row=4\): would arrive as a tuple; pass its _asdict"),
        (defaultdict(int, a=1), r"'a': 1\}\): would arrive as a dict; pass a dict of it"),
    ):
        with pytest.raises(UsageError, match=reason):
            zps.TrainingState(values=[value])


@pytest.mark.usefixtures("alone")
def test_a_state_brings_all_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.ones(2), persistent=False)
    brought: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(elastic, "broadcast_parameters", lambda tensors, root: brought.update(tensors))
    zps.TrainingState(model=model)
    assert brought.keys() == {*dict(model.named_parameters()), *dict(model.named_buffers())}
    assert all(brought[name].data_ptr() == buffer.data_ptr() for name, buffer in model.named_buffers())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["commit", "sync", "_model"])
def test_values_do_not_hide_what_a_state_can_do(name: str) -> None:
    values: dict[str, Any] = {name: 1}
    with pytest.raises(UsageError, match=f"value '{name}'"):
        zps.TrainingState(None, (), **values)


@pytest.mark.usefixtures("alone")
def test_optimizers_are_a_list() -> None:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(UsageError, match=r"expected a list of optimizers, got SGD; pass \[optimizer\]"):
        zps.TrainingState(optimizers=optimizer)


@pytest.mark.usefixtures("alone")
def test_a_worker_that_joins_has_no_state_before_it_got_that_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS.world, "is_joining", True, raising=False)
    said: list[int] = []

    def gather(has_state: int, name: str) -> dict[int, int]:
        said.append(has_state)
        if len(said) == 1:
            raise DeadlineError(name)
        return {0: 1}  # another rank has it

    monkeypatch.setattr(elastic, "allgather_int", gather)
    with pytest.raises(DeadlineError):
        zps.TrainingState(step=0)
    assert PROCESS.world.is_joining
    zps.TrainingState(step=0)
    assert said == [0, 0]
    assert not PROCESS.world.is_joining


@pytest.mark.usefixtures("alone")
def test_ranks_choose_another_root_if_theirs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    there, asked = {0: 1, 2: 1, 3: 1}, []

    def broadcast(state: Callable[[], object], root: int, name: str) -> object:
        asked.append(root)
        if root == 0:
            del there[0]
            raise RootLostError
        return state()

    monkeypatch.setattr(elastic, "allgather_int", lambda has_state, name: dict(there))
    monkeypatch.setattr(elastic, "broadcast_state", broadcast)
    assert zps.TrainingState(step=3).step == 3
    assert asked == [0, 2]


class Shared:
    """A sparsification whose state ``adopt`` replaces."""

    def __init__(self, state: dict[str, int]) -> None:
        self.state = state

    @property
    def has_shared_state(self) -> bool:
        return bool(self.state)

    def shared_state(self) -> dict[str, int]:
        if -1 in self.state.values():
            raise RuntimeError("out of memory")
        return self.state

    def adopt(self, shared: dict[str, int]) -> None:
        self.state = shared


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("holders", "holder"), [((), 0), ((1, 2), 1), ((0, 1, 2), 0)])
def test_a_root_without_a_sparsifier_state_gets_that_of_another_rank(
    holders: Sequence[int], holder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROCESS.world, "sparsification", Shared({}), raising=False)
    asked = {}

    def broadcast(state: Callable[[], object], root: int, name: str) -> object:
        asked[name] = root
        return state()

    def gather(said: int, name: str) -> dict[int, int]:
        return dict.fromkeys(holders if name == "state/sparsifier" else (0, 1, 2), 1)

    monkeypatch.setattr(elastic, "allgather_int", gather)
    monkeypatch.setattr(elastic, "broadcast_state", broadcast)
    zps.TrainingState(step=3)
    assert asked == {"sparsifier": holder, "values": 0}


@pytest.mark.usefixtures("alone")
def test_a_sparsifier_state_that_cannot_be_given_is_asked_for_where_all_ranks_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS.world, "sparsification", Shared({"weight": -1}), raising=False)
    said = {}

    def gather(value: int, name: str) -> dict[int, int]:
        said[name] = value
        return {0: 1}

    monkeypatch.setattr(elastic, "allgather_int", gather)
    with pytest.raises(RuntimeError, match="out of memory"):
        zps.TrainingState(step=3)
    assert said["state/sparsifier"] == 1


@pytest.mark.usefixtures("alone")
def test_optimizers_are_drained_before_workers_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, world = torch.nn.Linear(2, 1), PROCESS.world
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = zps.TrainingState(model=model, optimizers=[optimizer])
    calls: list[object] = []
    monkeypatch.setattr(optimizer, "drain", lambda: calls.append("drain"))
    monkeypatch.setattr(optimizer, "adopt_agreement", calls.append)
    monkeypatch.setattr(world, "admit", lambda: calls.append("admit"))
    monkeypatch.setattr(world, "is_elastic", True, raising=False)
    state.commit()
    assert not calls, "nobody joins"
    monkeypatch.setattr(world, "has_joining_workers", lambda: True)
    state.commit()
    assert calls[:3] == ["drain", "admit", 0]


def train_and_make_equal(
    steps: int, make_equal: Callable[[torch.nn.Module, zps.DistributedOptimizer], object]
) -> list[float]:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    make_equal(model, optimizer)
    assert model.weight.grad is None
    return model.weight.flatten().tolist()


def test_what_is_in_flight_when_ranks_are_made_equal_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was thrown away, except by commit()."""
    world = FakeWorld()
    world.staleness = 2
    monkeypatch.setattr(PROCESS, "_world", world)
    for steps in (0, 1, 3):
        drained = train_and_make_equal(steps, lambda _, optimizer: optimizer.drain())
        assert drained == [-0.5 * steps] * 2
        assert train_and_make_equal(steps, lambda *each: zps.TrainingState(each[0], each[1:])) == drained
        assert world.waited == world.pushed


def test_averages_that_have_failed_do_not_keep_ranks_from_being_made_equal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = FakeWorld()
    world.staleness = 2
    monkeypatch.setattr(PROCESS, "_world", world)

    def make_equal(model: torch.nn.Module, optimizer: zps.DistributedOptimizer) -> None:
        zps.TrainingState(model, [optimizer])
        assert world.pushed["state/root"] == 1

    monkeypatch.setattr(world, "late", Late(".1/bucket"))
    assert train_and_make_equal(3, make_equal) == [-0.5 * 2] * 2
    assert "averages of an earlier step were lost" in caplog.text


class Late(set[str]):
    """Rounds of the names that contain a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __contains__(self, name: object) -> bool:
        return self._text in str(name)


def test_a_worker_that_joins_applies_nothing_before_it_has_the_state_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, calls = FakeWorld(), list[object]()
    monkeypatch.setattr(PROCESS, "_world", world)
    model = torch.nn.Linear(2, 1)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    def gather(has_state: int, name: str) -> dict[int, int]:
        calls.append(has_state)
        return {0: 1}

    monkeypatch.setattr(optimizer, "end_steps", lambda applies: calls.append("drain"))
    monkeypatch.setattr(elastic, "allgather_int", gather)
    monkeypatch.setattr(world, "is_joining", True)
    state = zps.TrainingState(optimizers=[optimizer])
    assert calls[0] == 0
    calls.clear()
    state.sync()
    assert calls[:2] == ["drain", 1]


@pytest.mark.usefixtures("alone")
def test_answers_of_0_are_left_out() -> None:
    assert (allgather_int(0, "x"), allgather_int(7, "x")) == ({}, {0: 7})
