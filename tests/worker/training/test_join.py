"""``zenps.join`` without a cluster: how ranks find out that a block was uneven, and what they say then."""

from __future__ import annotations

import contextlib
import signal
import warnings

import pytest
import torch

import zenps as zps
from tests.worker.training.test_optimizer import FakeWorld, Model, train_one_step, wrap
from zenps.errors import PeerLostError
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Request
from zenps.worker.encode.dense import RootLostError
from zenps.worker.process import PROCESS
from zenps.worker.training.join import ENDED, STEPS


class ElasticWorld(FakeWorld):
    """Ranks 0, which is this one, and 1, whose input has ended at once or has as many batches.

    Args:
        known: the ranks that this one takes for present.
        has_ended: whether the input of rank 1 has ended at once.
    """

    is_elastic = True
    full_size = 2

    def __init__(self, known: tuple[int, ...], *, has_ended: bool) -> None:
        super().__init__()
        self.ranks, self._has_ended = known, has_ended

    def begin(self, request: Request) -> Pending:
        if request.name == "join/next":
            request.tensor[1] = ENDED if self._has_ended else request.tensor[0]
        return super().begin(request)


def train_one_block(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch, scaler: torch.amp.GradScaler | None = None
) -> None:
    monkeypatch.setattr(PROCESS, "_world", world)
    model = Model()
    optimizer = wrap(model)
    with zps.join(optimizer):
        if scaler is None:
            train_one_step(model, optimizer)
        else:
            scaler.scale(model.loss()).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("has_ended", [False, True])
def test_ranks_that_know_of_different_workers_decide_alike_whether_a_block_was_uneven(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a worker leaves an elastic job, the others learn of it at different times."""

    def is_uneven(known: tuple[int, ...]) -> bool:
        world = ElasticWorld(known, has_ended=has_ended)
        train_one_block(world, monkeypatch)
        return any(name.startswith("broadcast/join/") for name in world.pushed)

    assert [is_uneven(known) for known in [(0,), (0, 1), (0, 1, 2)]] == [has_ended] * 3


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_warning_says_that_an_uneven_block_leaves_different_scales(
    has_ended: bool, is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.GradScaler("cpu") if is_scaled else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_one_block(ElasticWorld((0, 1), has_ended=has_ended), monkeypatch, scaler)
    advice = "scaler.load_state_dict(zps.broadcast_object(scaler.state_dict()))"
    assert sum(advice in str(each.message) for each in caught) == (has_ended and is_scaled)


class LongerWorld(FakeWorld):
    """Ranks 0, which is this one, 1 and 2, which have one batch more than this one."""

    full_size = 3
    ranks = (0, 1, 2)

    def begin(self, request: Request) -> Pending:
        if request.name == "join/next":
            request.tensor[1:] = STEPS if self.pushed["join/next"] < 2 else ENDED
        return super().begin(request)


@pytest.mark.parametrize("lost", [(), (1,), (1, 2)])
def test_the_state_is_that_of_the_first_rank_that_is_not_lost_of_those_that_have_taken_all_steps(
    lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROCESS, "_world", LongerWorld())
    model = Model()
    optimizer, asked = wrap(model), list[int]()

    def adopt(root_rank: int, name: str) -> None:
        asked.append(root_rank)
        if root_rank in lost:
            raise RootLostError

    monkeypatch.setattr(optimizer, "adopt", adopt)
    expected: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if lost == (1, 2):
        expected = pytest.raises(PeerLostError, match="from a checkpoint")
    with expected, zps.join(optimizer):
        train_one_step(model, optimizer)
    assert asked == [1, 2][: 1 + len(lost)]


class InterruptedWorld(FakeWorld):
    """A rank that gets Ctrl-C when it has told the others of its first step."""

    def begin(self, request: Request) -> Pending:
        pending = super().begin(request)
        if request.name == "join/next" and self.pushed[request.name] == 1:
            signal.raise_signal(signal.SIGINT)
        return pending


@pytest.mark.usefixtures("interruptible")
def test_a_step_that_ctrl_c_ends_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, its name was in flight, and this rank alone dropped the step."""
    world = InterruptedWorld()
    monkeypatch.setattr(PROCESS, "_world", world)
    model = Model()
    optimizer = wrap(model)
    with zps.join(optimizer):
        model.loss().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        train_one_step(model, optimizer)
        assert world.pushed["join/next"] == 2
    assert world.waited == world.pushed
