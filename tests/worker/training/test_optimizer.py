"""``DistributedOptimizer`` without a cluster: what it pushes and waits for, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from zenps.errors import DeadlineError, UsageError, ZenPSError
from zenps.worker import api
from zenps.worker.backends.local import Alone
from zenps.worker.core.communicator import Communicator, Pending, Stats


class Answered(Pending):
    def __init__(self, world: World, name: str, outcome: Tensor | ZenPSError) -> None:
        self.name = name
        self._world, self._outcome = world, outcome

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        self._world.waited[self.name] += 1
        if isinstance(self._outcome, ZenPSError):
            raise self._outcome
        return self._outcome


class World(Communicator):
    """A cluster of one rank, whose sums are what it pushed; rounds of names in ``late`` fail."""

    rank = local_rank = 0
    size = local_size = 1
    bucket_bytes = 1 << 20
    run = 1
    ranks = (0,)
    is_elastic = is_joining = False

    def __init__(self) -> None:
        self.stats = Stats()
        self.pushed: Counter[str] = Counter()
        self.priorities: dict[str, int] = {}
        self.waited: Counter[str] = Counter()
        self.late: set[str] = set()

    def push_pull_async(
        self,
        tensor: Tensor,
        name: str,
        *,
        average: bool,
        contributes: bool = True,
        is_gradient: bool = False,
        priority: int = 0,
    ) -> Pending:
        self.pushed[name] += 1
        self.priorities[name] = priority
        assert self.pushed[name] == self.waited[name] + 1, f"{name} is in flight"
        late = DeadlineError(f"{name}: no answer") if name in self.late else None
        result = tensor.detach().coalesce() if tensor.is_sparse else tensor.detach().clone()
        return Answered(self, name, late or result)

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
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(api, "_communicator", world)
    return world


@pytest.fixture
def model(world: World) -> Model:
    return Model()


@pytest.fixture
def optimizer(model: Model) -> zps.DistributedOptimizer:
    """After a step: ranks have agreed on everything."""
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    model.loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_round_that_fails_leaves_no_other_in_flight(
    world: World, model: Model, optimizer: zps.DistributedOptimizer
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


def test_gradients_of_the_first_layers_have_the_highest_priority(
    world: World, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "bucket_bytes", 1)  # each by itself
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(2):
        model.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    by_priority = {priority: name.rpartition("/")[2] for name, priority in world.priorities.items()}
    # Buckets are numbered from the last layer's: last.bias, last.weight, first.bias, first.weight.
    assert [by_priority[-place] for place in range(5)] == ["words.weight", "3", "2", "1", "0"]


def scale_and_step(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model.loss()).backward()
    scaler.step(optimizer)


def step_without_synchronize(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    with optimizer.skip_synchronize():
        optimizer.step()


def synchronize_twice(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    optimizer.synchronize()
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


def drop_after_the_push(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    model.loss().backward()
    model.zero_grad()
    optimizer.step()


def add_to_the_wrapped(model: Model, optimizer: zps.DistributedOptimizer) -> None:
    late = nn.Parameter(torch.ones(3))
    optimizer._inner.add_param_group({"params": [late]})
    (model.loss() + late.sum()).backward()
    optimizer.step()


MISUSE = {
    scale_and_step: "GradScaler",
    step_without_synchronize: "call synchronize",
    synchronize_twice: "inside skip_synchronize",
    clip_after_the_push: "changed since backward pushed it",
    scale_rows_after_the_push: "'words.weight': changed since",
    drop_after_the_push: "changed since",
    add_to_the_wrapped: "frozen or absent",
}


@pytest.mark.parametrize(("misuse", "message"), MISUSE.items(), ids=[misuse.__name__ for misuse in MISUSE])
def test_misuse_that_would_train_wrongly_is_refused(
    misuse: Callable[[Model, zps.DistributedOptimizer], None],
    message: str,
    model: Model,
    optimizer: zps.DistributedOptimizer,
) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UsageError, match=message):
        misuse(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))


def test_parameter_that_is_unfrozen_later_is_refused(world: World) -> None:
    model = Model()
    model.first.weight.requires_grad_(False)
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.loss().backward()
    optimizer.step()
    model.first.weight.requires_grad_(True)
    model.loss().backward()
    with pytest.raises(UsageError, match=r"\(3, 2\).*frozen or absent"):
        optimizer.step()


def test_alone_a_scaler_needs_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_communicator", Alone())
    model = Model()
    optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.last.bias.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        scale_and_step(model, optimizer)
    # Two rows, so that the bias has a gradient of 2.
    assert torch.allclose(before - model.last.bias, torch.tensor(0.4))
