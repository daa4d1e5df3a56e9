"""Small trainings, as people write them: a table of models, optimizers, schedules and loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zenps as zps
from tests.integration import variant_loops as loops
from tests.integration import variant_models as models
from tests.integration.variant_loops import STEPS, Optimizers, Variant, call, sgd


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


adam = over(torch.optim.Adam, lr=0.02)


# ── how a model is called ───────────────────────────────────────────────────────────────────────


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


_mlp = partial(Variant, models.mlp)
_decaying = beside(over(torch.optim.SGD, lr=0.05), over(torch.optim.AdamW, lr=0.02, weight_decay=0.5))


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
    "adam fused, channels last": Variant(models.channels_last, over(torch.optim.Adam, lr=0.02, fused=True)),
    "sgd fused, channels last": Variant(
        models.channels_last, over(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    ),
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
    "decay of unused parameters": Variant(models.unused, over(torch.optim.AdamW, lr=0.02, weight_decay=0.5)),
    "decay of parameters used at first": Variant(models.used_at_first, _decaying),
    "decay of parameters used later": Variant(models.used_later, _decaying),
    "groups": _mlp(grouped),
    # Schedules
    "step schedule": Variant(loop=partial(loops.scheduled, make=partial(schedules.StepLR, step_size=2))),
    "one cycle": _mlp(
        over(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(loops.scheduled, make=partial(schedules.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1)),
    ),
    "cosine": Variant(loop=partial(loops.scheduled, make=partial(schedules.CosineAnnealingLR, T_max=STEPS))),
    "warm-up": Variant(
        loop=partial(
            loops.scheduled, make=lambda optimizer: schedules.LambdaLR(optimizer, lambda n: (n + 1) / STEPS)
        )
    ),
    "plateau": Variant(loop=loops.on_plateau),
    # Loops
    "accumulation": Variant(
        loop=partial(loops.passes_by_step, passes=(2,) * STEPS), options={"backward_passes_per_step": 2}
    ),
    "several losses": Variant(loop=partial(loops.passes_by_step, passes=(3,) * STEPS)),
    "more passes later": Variant(loop=partial(loops.passes_by_step, passes=(1, 2, 1, 3))),
    "fewer passes later": Variant(loop=partial(loops.passes_by_step, passes=(3, 3, 1, 2))),
    "no_sync": Variant(loop=loops.no_sync),
    "closure": Variant(loop=loops.closure),
    "clipped norm": _mlp(loop=partial(loops.clipped, clip=partial(nn.utils.clip_grad_norm_, max_norm=0.05))),
    "clipped norm, sparse": Variant(
        loop=partial(loops.clipped, clip=partial(zps.clip_grad_norm_, max_norm=0.05))
    ),
    "clipped value": _mlp(
        loop=partial(loops.clipped, clip=partial(nn.utils.clip_grad_value_, clip_value=0.01))
    ),
    "clipped in a hook": _mlp(loop=loops.clipped_in_a_hook),
    "retained graph": Variant(loop=loops.retained_graph),
    "gradient penalty": _mlp(loop=loops.gradient_penalty),
    "two losses": Variant(optimizer=beside(sgd, adam), loop=loops.two_losses),
    "batch thrown away": Variant(loop=loops.batch_thrown_away),
    "zeros in place": Variant(loop=loops.zeros_in_place),
    "cleared by the model": Variant(loop=loops.cleared_by_the_model),
    "never cleared": Variant(optimizer=over(torch.optim.SGD, lr=0.01), loop=loops.never_cleared),
    "uneven last batch": Variant(loop=loops.uneven_last_batch),
    "hooks on gradients": _mlp(loop=loops.hooks_on_gradients),
    "resumed": Variant(optimizer=beside(over(torch.optim.SparseAdam, lr=0.05), adam), loop=loops.resumed),
    "unfrozen": Variant(models.frozen, loop=loops.unfrozen),
    "frozen later": Variant(loop=loops.frozen_later),
    "group added": Variant(
        optimizer=lambda model: [torch.optim.SGD(model.get_submodule("out").parameters(), lr=0.2)],
        loop=loops.group_added,
    ),
    "another optimizer": _mlp(adam, loops.another_optimizer),
    "moving average": Variant(loop=partial(loops.averaged_weights, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    "weights averaged": Variant(loop=loops.averaged_weights),
    "compiled step": Variant(loop=loops.compiled_step),
    "compiled model": _mlp(forward=compiled),
    "autocast": _mlp(forward=under_autocast, dtype=torch.float32),
    "scaler disabled": Variant(loop=partial(loops.scaled, enabled=False)),
    "scaler": Variant(loop=partial(loops.scaled, init_scale=1024.0)),
    "anomalies": Variant(loop=loops.finding_anomalies),
    "evaluated between": Variant(models.dropout, loop=loops.evaluated_between),
    "checkpoint": Variant(forward=checkpointed),
    "checkpoint, reentrant": Variant(forward=partial(checkpointed, reentrant=True)),
    "functional call": Variant(forward=functionally),
    "by hand": Variant(loop=loops.by_hand, wrapped=False),
    "by hand, adam": _mlp(adam, loops.by_hand, wrapped=False),
    "ddp": _mlp(adam, loops.in_parallel, wrapped=False),
    "ddp, tables": Variant(loop=loops.in_parallel, wrapped=False),
}
