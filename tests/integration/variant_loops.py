"""Training loops, as people write them, and what they are made of."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

from tests.integration import variant_models as models
from tests.integration.parties import Party

STEPS = 4
BATCH = 6

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.2)]


def call(model: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = model(ids)
    return result


@dataclass(frozen=True)
class Variant:
    """A training.

    Args:
        forward: how the model is called.
        options: of ``DistributedOptimizer``.
        wrapped: False if the loop averages gradients without ``DistributedOptimizer``.
    """

    model: Callable[[], nn.Module] = models.tables
    optimizer: Optimizers = sgd
    loop: Callable[[Training], None] = field(default_factory=lambda: plain)
    forward: Callable[[nn.Module, Tensor], Tensor] = call
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    wrapped: bool = True


class Training:
    """A variant in the hands of a party: what loops are made of."""

    def __init__(self, name: str, variant: Variant, party: Party) -> None:
        self.name, self.variant, self.party = name, variant, party
        self.extra: dict[str, Tensor] = {}
        self.build()

    def build(self) -> None:
        """A new model and optimizers, as at the start of a script."""
        torch.manual_seed(7)
        with _default_dtype(self.variant.dtype):
            self.model = self.variant.model()
        self.party.watch(self.model)
        self.called = self.model
        self.optimizers = [self.wrap(each) for each in self.variant.optimizer(self.model)]
        self.optimizer = self.optimizers[0]

    def wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.variant.wrapped:
            return self.party.keep(optimizer)
        return self.party.wrap(optimizer, self.model, **self.variant.options)

    def loss(self, step: int, rank: int, part: int = 0, size: int = BATCH) -> Tensor:
        seed = 1000 * step + 10 * rank + part
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)  # for dropout
        # Skewed, so that batches repeat ids and ranks share some.
        ids = (models.ROWS * torch.rand((size, 3), generator=generator) ** 2).long()
        wanted = torch.randn((size, 1), generator=generator, dtype=torch.float64).to(self.variant.dtype)
        return nn.functional.mse_loss(self.variant.forward(self.called, ids), wanted)

    def clear(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, step: int, part: int = 0) -> None:
        self.party.backward(partial(self.loss, step, part=part))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Parameters, and what the loop adds. Buffers are each rank's own."""
        return {name: each.detach().clone() for name, each in self.model.named_parameters()} | self.extra


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ── loops ───────────────────────────────────────────────────────────────────────────────────────


def plain(training: Training, steps: range = range(STEPS)) -> None:
    for step in steps:
        training.clear()
        training.backward(step)
        training.step()


def passes_by_step(training: Training, passes: tuple[int, ...]) -> None:
    for step in range(STEPS):
        training.clear()
        for part in range(passes[step]):
            training.backward(step, part)
        training.step()


def no_sync(training: Training) -> None:
    for step in range(STEPS):
        training.clear()
        with training.party.no_sync(training.optimizer):
            training.backward(step, 0)
        training.backward(step, 1)
        training.step()


def closure(training: Training) -> None:
    for step in range(STEPS):

        def evaluate(step: int = step) -> None:
            training.clear()
            training.backward(step)

        training.optimizer.step(evaluate)


def clipped(training: Training, clip: Callable[[Any], Any]) -> None:
    for step in range(STEPS):
        training.clear()
        training.backward(step)
        training.party.synchronize(training.optimizer)
        clip(training.model.parameters())
        training.step()


def clipped_in_a_hook(training: Training) -> None:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)

    training.optimizer.register_step_pre_hook(clip)
    plain(training)


def retained_graph(training: Training) -> None:
    for step in range(STEPS):
        graphs: dict[int, Tensor] = {}

        def loss(rank: int, step: int = step, graphs: dict[int, Tensor] = graphs) -> Tensor:
            return graphs.setdefault(rank, training.loss(step, rank))

        training.clear()
        training.party.backward(loss, retain_graph=True)
        training.party.backward(lambda rank, loss=loss: loss(rank).square())  # type: ignore[misc]
        training.step()


def gradient_penalty(training: Training) -> None:
    """Backward through a backward."""

    def loss(rank: int, step: int) -> Tensor:
        value = training.loss(step, rank)
        first = next(training.model.parameters())
        (gradient,) = torch.autograd.grad(value, first, create_graph=True)
        return value + 0.1 * gradient.square().sum()

    for step in range(STEPS):
        training.clear()
        training.party.backward(partial(loss, step=step))
        training.step()


def two_losses(training: Training) -> None:
    """One optimizer's loss leaves gradients in the parameters of the other, as a GAN's does."""
    for step in range(STEPS):
        for part, optimizer in enumerate(training.optimizers):
            optimizer.zero_grad()
            training.backward(step, part)
            optimizer.step()


def batch_thrown_away(training: Training) -> None:
    for step in range(STEPS):
        training.clear()
        training.backward(step)
        if step != 2:
            training.step()


def zeros_in_place(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.step()
        training.clear(set_to_none=False)


def cleared_by_the_model(training: Training) -> None:
    for step in range(STEPS):
        training.model.zero_grad()
        training.backward(step)
        training.step()


def never_cleared(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.step()


def uneven_last_batch(training: Training) -> None:
    """Each example weighs the same: ranks scale their means by their shares of the last batch."""
    for step in range(STEPS):
        sizes = [BATCH, BATCH // 3 if step == STEPS - 1 else BATCH]
        mean = training.party.mean(
            lambda rank, sizes=sizes: torch.tensor(float(sizes[rank]), dtype=torch.float64),  # type: ignore[misc]
            f"{training.name}/size",
        )
        training.clear()
        training.party.backward(
            lambda rank, step=step, sizes=sizes, mean=mean: (  # type: ignore[misc]
                training.loss(step, rank, size=sizes[rank]) * (sizes[rank] / mean)
            )
        )
        training.step()


def hooks_on_gradients(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    plain(training)


def resumed(training: Training) -> None:
    plain(training, range(2))
    file = io.BytesIO()
    torch.save([training.model.state_dict(), *(each.state_dict() for each in training.optimizers)], file)
    file.seek(0)
    of_model, *of_optimizers = torch.load(file)
    training.build()
    training.model.load_state_dict(of_model)
    for optimizer, state in zip(training.optimizers, of_optimizers, strict=True):
        optimizer.load_state_dict(state)
    plain(training, range(2, STEPS))


def unfrozen(training: Training) -> None:
    """The frozen layers join after two steps; the optimizer has had them all along."""
    plain(training, range(2))
    training.model.requires_grad_(True)
    plain(training, range(2, STEPS))


def frozen_later(training: Training) -> None:
    plain(training, range(2))
    training.clear()
    training.model.get_submodule("out").requires_grad_(False)
    plain(training, range(2, STEPS))


def group_added(training: Training) -> None:
    plain(training, range(2))
    training.model.zero_grad()
    training.optimizer.add_param_group({"params": training.model.get_submodule("hidden").parameters()})
    plain(training, range(2, STEPS))


def another_optimizer(training: Training) -> None:
    """Adam at first, then SGD."""
    plain(training, range(2))
    training.clear()
    training.optimizers = [training.wrap(torch.optim.SGD(training.model.parameters(), lr=0.1))]
    plain(training, range(2, STEPS))


def averaged_weights(training: Training, **options: Any) -> None:
    """Stochastic weight averaging, or an exponential moving average."""
    average = AveragedModel(training.model, **options)
    for step in range(STEPS):
        plain(training, range(step, step + 1))
        average.update_parameters(training.model)
    training.extra = {f"average {name}": each.detach() for name, each in average.named_parameters()}


def compiled_step(training: Training) -> None:
    step_compiled = torch.compile(training.optimizer.step, backend="eager")
    for step in range(STEPS):
        training.clear()
        training.backward(step)
        step_compiled()


def scaled(training: Training, **options: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", **options)
    for step in range(STEPS):
        training.clear()
        training.party.backward(lambda rank, step=step: scaler.scale(training.loss(step, rank)))  # type: ignore[misc]
        for optimizer in training.optimizers:
            scaler.step(optimizer)
        scaler.update()


def finding_anomalies(training: Training) -> None:
    with torch.autograd.set_detect_anomaly(True):
        plain(training)


def evaluated_between(training: Training) -> None:
    for step in range(STEPS):
        plain(training, range(step, step + 1))
        training.model.eval()
        with torch.no_grad():
            value = training.party.mean(partial(training.loss, step), f"{training.name}/eval")
        training.extra[f"evaluated {step}"] = value
        training.model.train()


def by_hand(training: Training) -> None:
    for step in range(STEPS):
        training.clear()
        training.backward(step)
        training.party.push_pull(training.model.parameters(), training.name)
        training.step()


def in_parallel(training: Training) -> None:
    """DDP with our hook."""
    training.called = training.party.parallel(training.model)
    plain(training)


def scheduled(training: Training, make: Callable[[Any], Any]) -> None:
    schedule = make(training.optimizer)
    for step in range(STEPS):
        plain(training, range(step, step + 1))
        schedule.step()


def on_plateau(training: Training) -> None:
    """The loss that decides is that of all ranks."""
    schedule = schedules.ReduceLROnPlateau(training.optimizer, factor=0.5, patience=0, threshold=0.5)
    for step in range(STEPS):
        plain(training, range(step, step + 1))
        with torch.no_grad():
            schedule.step(training.party.mean(partial(training.loss, step), f"{training.name}/loss"))
    training.extra["lr"] = torch.tensor(training.optimizer.param_groups[0]["lr"])
