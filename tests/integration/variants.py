"""Small trainings, as people write them: a table of models, optimizers, schedules and loops."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zenps as zps
from tests.integration import variant_models as models
from tests.integration.parties import Party

STEPS = 4
BATCH = 6

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def over(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Optimizers:
    """One optimizer over all parameters."""
    return lambda model: [kind(model.parameters(), **options)]


def beside(sparse: Optimizers, dense: Optimizers) -> Optimizers:
    """One optimizer over the tables, another over the rest."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        tables = nn.ModuleList(m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        rest = nn.ParameterList(p for n, p in model.named_parameters() if not n.startswith(("words", "bag")))
        return [*sparse(tables), *dense(rest)]

    return make


def grouped(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Weights decay, biases do not."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    biases = [each for each in model.parameters() if each.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=0.05)]


def matrices(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon takes matrices only."""
    rest = [each for each in model.parameters() if each.dim() != 2]
    return [
        torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.02),
        torch.optim.AdamW(rest, lr=0.05),
    ]


sgd = over(torch.optim.SGD, lr=0.2)
adam = over(torch.optim.Adam, lr=0.02)


# ── how a model is called ───────────────────────────────────────────────────────────────────────


def call(model: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = model(ids)
    return result


def under_autocast(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call(model, ids).float()


def functionally(model: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (ids,))
    return result


def checkpointed(model: nn.Module, ids: Tensor, reentrant: bool = False) -> Tensor:
    # A reentrant checkpoint needs an input that wants a gradient.
    blank = torch.zeros((), requires_grad=True)
    result: Tensor = torch.utils.checkpoint.checkpoint(lambda _: model(ids), blank, use_reentrant=reentrant)
    return result


def compiled(model: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = torch.compile(model, backend="eager")(ids)
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
        self.model = self.variant.model().to(self.variant.dtype)
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
        self.party.backward(lambda rank: self.loss(step, rank, part))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Parameters, and what the loop adds. Buffers are each rank's own."""
        return {name: each.detach().clone() for name, each in self.model.named_parameters()} | self.extra


# ── loops ───────────────────────────────────────────────────────────────────────────────────────


def plain(training: Training, steps: range = range(STEPS)) -> None:
    for step in steps:
        training.clear()
        training.backward(step)
        training.step()


def several_passes(training: Training, passes: int = 2) -> None:
    for step in range(STEPS):
        training.clear()
        for part in range(passes):
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
        training.party.backward(lambda rank, loss=loss: loss(rank).square())
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
            lambda rank, sizes=sizes: torch.tensor(float(sizes[rank]), dtype=torch.float64),
            f"{training.name}/size",
        )
        training.clear()
        training.party.backward(
            lambda rank, step=step, sizes=sizes, mean=mean: (
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
        training.party.backward(lambda rank, step=step: scaler.scale(training.loss(step, rank)))
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
            value = training.party.mean(
                lambda rank, step=step: training.loss(step, rank), f"{training.name}/eval"
            )
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
            schedule.step(
                training.party.mean(
                    lambda rank, step=step: training.loss(step, rank), f"{training.name}/loss"
                )
            )
    training.extra["lr"] = torch.tensor(training.optimizer.param_groups[0]["lr"])


_mlp = partial(Variant, models.mlp)


VARIANTS: dict[str, Variant] = {
    **{f"model {make.__name__}": Variant(make) for make in models.MODELS},
    "model float32": Variant(dtype=torch.float32),
    "model bfloat16": Variant(dtype=torch.bfloat16),
    "model mlp bfloat16": _mlp(dtype=torch.bfloat16),
    # Optimizers
    "sgd momentum": Variant(optimizer=over(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "sgd nesterov": _mlp(over(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "sgd weight decay": _mlp(over(torch.optim.SGD, lr=0.1, weight_decay=0.1)),
    "sgd dampening": _mlp(over(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)),
    "sgd maximize": _mlp(over(torch.optim.SGD, lr=0.01, maximize=True)),
    "sgd fused": _mlp(over(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "sgd foreach": Variant(optimizer=over(torch.optim.SGD, lr=0.1, foreach=True)),
    "adagrad": Variant(optimizer=over(torch.optim.Adagrad, lr=0.1)),
    "adagrad decay": _mlp(over(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1)),
    "adadelta": _mlp(over(torch.optim.Adadelta, lr=1.0)),
    "adam": _mlp(adam),
    "adam amsgrad": _mlp(over(torch.optim.Adam, lr=0.02, amsgrad=True)),
    "adam fused": _mlp(over(torch.optim.Adam, lr=0.02, fused=True)),
    "adam foreach": _mlp(over(torch.optim.Adam, lr=0.02, foreach=True)),
    "adam, rate in a tensor": _mlp(over(torch.optim.Adam, lr=torch.tensor(0.02))),
    "adamw": _mlp(over(torch.optim.AdamW, lr=0.02, weight_decay=0.1)),
    "adamax": _mlp(over(torch.optim.Adamax, lr=0.02)),
    "nadam": _mlp(over(torch.optim.NAdam, lr=0.02)),
    "radam": _mlp(over(torch.optim.RAdam, lr=0.02)),
    "rmsprop": _mlp(over(torch.optim.RMSprop, lr=0.02)),
    "rmsprop centered": _mlp(over(torch.optim.RMSprop, lr=0.02, centered=True, momentum=0.5)),
    "asgd": _mlp(over(torch.optim.ASGD, lr=0.1)),
    "rprop": _mlp(over(torch.optim.Rprop, lr=0.02)),
    "adafactor": _mlp(over(torch.optim.Adafactor, lr=0.02)),
    "muon beside adamw": _mlp(matrices),
    "sparse adam beside adamw": Variant(
        optimizer=beside(over(torch.optim.SparseAdam, lr=0.05), over(torch.optim.AdamW, lr=0.05))
    ),
    "adagrad beside fused sgd": Variant(
        optimizer=beside(over(torch.optim.Adagrad, lr=0.05), over(torch.optim.SGD, lr=0.05, fused=True))
    ),
    "groups": _mlp(grouped),
    # Schedules
    "step schedule": Variant(loop=partial(scheduled, make=partial(schedules.StepLR, step_size=2))),
    "one cycle": _mlp(
        over(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(scheduled, make=partial(schedules.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1)),
    ),
    "cosine": Variant(loop=partial(scheduled, make=partial(schedules.CosineAnnealingLR, T_max=STEPS))),
    "warm-up": Variant(
        loop=partial(
            scheduled, make=lambda optimizer: schedules.LambdaLR(optimizer, lambda n: (n + 1) / STEPS)
        )
    ),
    "plateau": Variant(loop=on_plateau),
    # Loops
    "accumulation": Variant(loop=several_passes, options={"backward_passes_per_step": 2}),
    "several losses": Variant(loop=partial(several_passes, passes=3)),
    "no_sync": Variant(loop=no_sync),
    "closure": Variant(loop=closure),
    "clipped norm": _mlp(loop=partial(clipped, clip=partial(nn.utils.clip_grad_norm_, max_norm=0.05))),
    "clipped norm, sparse": Variant(loop=partial(clipped, clip=partial(zps.clip_grad_norm_, max_norm=0.05))),
    "clipped value": _mlp(loop=partial(clipped, clip=partial(nn.utils.clip_grad_value_, clip_value=0.01))),
    "clipped in a hook": _mlp(loop=clipped_in_a_hook),
    "retained graph": Variant(loop=retained_graph),
    "gradient penalty": _mlp(loop=gradient_penalty),
    "two losses": Variant(optimizer=beside(sgd, adam), loop=two_losses),
    "batch thrown away": Variant(loop=batch_thrown_away),
    "zeros in place": Variant(loop=zeros_in_place),
    "cleared by the model": Variant(loop=cleared_by_the_model),
    "never cleared": Variant(optimizer=over(torch.optim.SGD, lr=0.01), loop=never_cleared),
    "uneven last batch": Variant(loop=uneven_last_batch),
    "hooks on gradients": _mlp(loop=hooks_on_gradients),
    "resumed": Variant(optimizer=beside(over(torch.optim.SparseAdam, lr=0.05), adam), loop=resumed),
    "unfrozen": Variant(models.frozen, loop=unfrozen),
    "frozen later": Variant(loop=frozen_later),
    "group added": Variant(
        optimizer=lambda model: [torch.optim.SGD(model.get_submodule("out").parameters(), lr=0.2)],
        loop=group_added,
    ),
    "another optimizer": _mlp(adam, another_optimizer),
    "moving average": Variant(loop=partial(averaged_weights, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    "weights averaged": Variant(loop=averaged_weights),
    "compiled step": Variant(loop=compiled_step),
    "compiled model": _mlp(forward=compiled),
    "autocast": _mlp(forward=under_autocast, dtype=torch.float32),
    "scaler disabled": Variant(loop=partial(scaled, enabled=False)),
    "scaler": Variant(loop=partial(scaled, init_scale=1024.0)),
    "anomalies": Variant(loop=finding_anomalies),
    "evaluated between": Variant(models.dropout, loop=evaluated_between),
    "checkpoint": Variant(forward=checkpointed),
    "checkpoint, reentrant": Variant(forward=partial(checkpointed, reentrant=True)),
    "functional call": Variant(forward=functionally),
    "by hand": Variant(loop=by_hand, wrapped=False),
    "by hand, adam": _mlp(adam, by_hand, wrapped=False),
    "ddp": _mlp(adam, in_parallel, wrapped=False),
    "ddp, tables": Variant(loop=in_parallel, wrapped=False),
}
