"""Training loops that people have, on several ranks against one process that sees the concatenated batch.

Each loop is written once: alone, its losses are the means over ranks, and its optimizers are not wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from tests.integration.embedding_model import Model, assert_same, loss_of, make_model, state_of

RANKS = 2
STEPS = 6

State = dict[str, Tensor]


class Loop:
    """What differs between a rank and a process alone."""

    def __init__(self, alone: bool) -> None:
        self._ranks = list(range(RANKS)) if alone else [zps.rank()]
        self._alone = alone

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> Any:
        if self._alone:
            return optimizer
        return zps.DistributedOptimizer(optimizer, model.named_parameters() if model is not None else None)

    def loss(self, model: Model, step: int, part: int = 0) -> Tensor:
        return self.mean(lambda rank: loss_of(model, step, rank, part))

    def mean(self, loss: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([loss(rank) for rank in self._ranks]).mean()

    def no_sync(self, optimizer: Any) -> Any:
        return nullcontext() if self._alone else optimizer.no_sync()

    def synchronize(self, optimizer: Any) -> None:
        if not self._alone:
            optimizer.synchronize()


def sgd(model: nn.Module, lr: float = 0.2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# ── loops ───────────────────────────────────────────────────────────────────────────────────────


def several_losses(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            loop.loss(model, step, part).backward()
        optimizer.step()
    return state_of(model)


def a_second_loss_from_step_3_on(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(1 + (step >= 3)):
            loop.loss(model, step, part).backward()
        optimizer.step()
    return state_of(model)


def fewer_passes_at_last(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(4 if step < STEPS - 1 else 1):
            loop.loss(model, step, part).backward()
        optimizer.step()
    return state_of(model)


def a_layer_in_some_passes(loop: Loop) -> State:
    """As an expert that each rank sends other micro-batches to: to which, differs from step to step."""
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)

    def loss(step: int, rank: int, part: int) -> Tensor:
        whole = loss_of(model, step, rank, part)
        uses_never = (step + rank + part) % 3 == 0 or (step >= 2 and rank == 0)
        return whole + model.never.weight.square().sum() if uses_never else whole

    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            loop.mean(partial(loss, step, part=part)).backward()
        optimizer.step()
    return state_of(model)


def accumulation_without_sync(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with loop.no_sync(optimizer):
            for part in range(2):
                loop.loss(model, step, part).backward()
        loop.loss(model, step, 2).backward()
        optimizer.step()
    return state_of(model)


def batches_thrown_away(loop: Loop) -> State:
    """In the first step nothing is pushed early; in later ones it is."""
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        if step not in (0, 3, 4):
            optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def batches_thrown_away_by_the_model(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        if step != 3:
            optimizer.step()
        model.zero_grad()
    return state_of(model)


def _adversaries() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return generator, critic


def _noise(step: int, rank: int, kind: int, columns: int) -> Tensor:
    seeded = torch.Generator().manual_seed(100 * step + 10 * rank + kind)
    return torch.randn((5, columns), generator=seeded, dtype=torch.float64)


def gan(loop: Loop, clear: Callable[[nn.Module, Any], None] | None = None) -> State:
    """As in PyTorch's DCGAN: two backward passes for the critic, and one for the generator. That one computes
    gradients of the critic, too, which nobody wants.
    """
    generator, critic = _adversaries()
    of_critic, of_generator = loop.wrap(sgd(critic, 0.05)), loop.wrap(sgd(generator, 0.05))
    clear = clear or (lambda _, optimizer: optimizer.zero_grad())
    for step in range(STEPS):
        clear(critic, of_critic)
        loop.mean(lambda rank, step=step: -critic(_noise(step, rank, 0, 4)).mean()).backward()  # type: ignore[misc]
        loop.mean(
            lambda rank, step=step: critic(generator(_noise(step, rank, 1, 3)).detach()).mean()  # type: ignore[misc]
        ).backward()
        of_critic.step()
        clear(generator, of_generator)
        loop.mean(lambda rank, step=step: -critic(generator(_noise(step, rank, 2, 3))).mean()).backward()  # type: ignore[misc]
        of_generator.step()
    return {**critic.state_dict(prefix="critic."), **generator.state_dict(prefix="generator.")}


def gan_cleared_by_the_modules(loop: Loop) -> State:
    return gan(loop, lambda module, _: module.zero_grad())


def scaler_in_its_usual_order(loop: Loop) -> State:
    """In step 1 a gradient overflows, on one rank."""
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        overflow = [1.0, float("inf") if step == 1 else 1.0]
        loss = loop.mean(lambda rank, step=step, by=overflow: loss_of(model, step, rank) * by[rank])  # type: ignore[misc]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return state_of(model)


def scaler_and_clipping(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loop.loss(model, step)).backward()
        loop.synchronize(optimizer)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.dense(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    return state_of(model)


def clipping_from_a_hook(loop: Loop) -> State:
    """Runs once the averages are there."""
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.dense(), 0.05)

    optimizer.register_step_pre_hook(clip)
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.loss(model, step).backward()
        optimizer.step()
    return state_of(model)


def progressive_unfreezing(loop: Loop) -> State:
    model = make_model()
    layers: list[nn.Module] = [model.words, model.hidden, model.extra]
    for layer in layers:
        layer.requires_grad_(False)
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        if step % 2 == 0:
            layers.pop().requires_grad_(True)
        optimizer.zero_grad()
        loop.loss(model, step).backward()
        optimizer.step()
    return state_of(model)


def gradients_kept_in_place(loop: Loop) -> State:
    """Backward adds to zeros in the tensors that averages came in."""
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return state_of(model)


def gradients_never_cleared(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model, 0.01), model)
    for step in range(STEPS):
        loop.loss(model, step).backward()
        optimizer.step()
    return state_of(model)


def step_left_out_after_synchronize(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        loss = loop.loss(model, step)
        if step == 3:  # not by backward
            used = [
                each
                for each in model.dense()
                if each is not model.never.weight and each is not model.never.bias
            ]
            for parameter, gradient in zip(
                used, torch.autograd.grad(loss, used, allow_unused=True), strict=True
            ):
                parameter.grad = gradient
        else:
            loss.backward()
        if step == 2:
            loop.synchronize(optimizer)
        else:
            optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def groups_added(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(torch.optim.SGD(model.out.parameters(), lr=0.2), model)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": [*model.hidden.parameters(), model.rare.weight], "lr": 0.1})
        if step == 4:
            optimizer.add_param_group({"params": [model.words.weight, model.bag.weight]})
        optimizer.zero_grad()
        model.zero_grad()
        loop.loss(model, step).backward()
        optimizer.step()
    return state_of(model)


def table_tied_later(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loop.loss(model, step)
        if step in (2, 3):
            loss = loss + 0.01 * model.words.weight.square().sum()
        loss.backward()
        optimizer.step()
    return state_of(model)


def compiled_step(loop: Loop) -> State:
    model = make_model()
    optimizer = loop.wrap(sgd(model), model)
    step_compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.loss(model, step).backward()
        step_compiled()
    return state_of(model)


LOOPS: dict[str, Callable[[Loop], State]] = {
    loop.__name__: loop
    for loop in (
        several_losses,
        a_second_loss_from_step_3_on,
        fewer_passes_at_last,
        a_layer_in_some_passes,
        accumulation_without_sync,
        batches_thrown_away,
        batches_thrown_away_by_the_model,
        gan,
        gan_cleared_by_the_modules,
        scaler_in_its_usual_order,
        scaler_and_clipping,
        clipping_from_a_hook,
        progressive_unfreezing,
        gradients_kept_in_place,
        gradients_never_cleared,
        step_left_out_after_synchronize,
        groups_added,
        table_tied_later,
        compiled_step,
    )
}

# ── uneven inputs ───────────────────────────────────────────────────────────────────────────────

UNEVEN = [2, 7]
"""Batches by rank."""


def uneven() -> State:
    model = make_model()
    optimizer = zps.DistributedOptimizer(sgd(model), model.named_parameters())
    second = make_model()
    other = zps.DistributedOptimizer(torch.optim.Adagrad(second.parameters(), lr=0.1))
    with zps.join(optimizer, other):
        for step in range(UNEVEN[zps.rank()]):
            for each, its_model in ((optimizer, model), (other, second)):
                each.zero_grad()
                loss_of(its_model, step, zps.rank()).backward()
                if step != 4:
                    each.step()
    return {
        f"{number}.{name}": each
        for number, its in enumerate((model, second))
        for name, each in state_of(its).items()
    }


def uneven_in_one_process() -> State:
    """Averages are divided by the number of all ranks."""
    states: State = {}
    makers: list[Callable[[Model], torch.optim.Optimizer]]
    makers = [sgd, lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1)]
    for number, make in enumerate(makers):
        model = make_model()
        optimizer = make(model)
        for step in range(max(UNEVEN)):
            optimizer.zero_grad()
            losses = [loss_of(model, step, rank) for rank in range(RANKS) if step < UNEVEN[rank]]
            (torch.stack(losses).sum() / RANKS).backward()
            if step != 4:
                optimizer.step()
        states |= {f"{number}.{name}": each for name, each in state_of(model).items()}
    return states


class Uneven:
    """A loop whose ranks have :data:`UNEVEN` batches, inside ``join``; or a process alone has all of them."""

    def __init__(self, alone: bool) -> None:
        self.model = make_model()
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.optimizer: Any = sgd if alone else zps.DistributedOptimizer(sgd, self.model.named_parameters())
        self._alone = alone

    def loss(self, number: int, part: int = 0) -> Tensor:
        if not self._alone:
            return loss_of(self.model, number, zps.rank(), part)
        losses = [loss_of(self.model, number, rank, part) for rank in range(RANKS) if number < UNEVEN[rank]]
        return torch.stack(losses).sum() / RANKS

    def is_last(self, number: int) -> bool:
        return not self._alone and number + 1 == UNEVEN[zps.rank()]

    def synchronize(self) -> None:
        if not self._alone:
            self.optimizer.synchronize()

    def run(self, step: Callable[[Uneven, int], None]) -> State:
        with nullcontext() if self._alone else zps.join(self.optimizer):
            for number in range(max(UNEVEN) if self._alone else UNEVEN[zps.rank()]):
                self.optimizer.zero_grad()
                self.loss(number).backward()
                step(self, number)
        momenta = [state["momentum_buffer"].to_dense() for state in self.optimizer.state.values()]
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return {
            **state_of(self.model),
            "momenta": torch.cat([each.flatten() for each in momenta]),
            "lr": rates,
        }


def clipped(loop: Uneven, _: int) -> None:
    loop.synchronize()
    nn.utils.clip_grad_norm_(loop.model.dense(), 0.05)
    loop.optimizer.step()


def scaled(loop: Uneven, _: int) -> None:
    loop.synchronize()
    for parameter in loop.model.dense():
        if parameter.grad is not None:
            parameter.grad /= 64
    loop.optimizer.step()


def left_out(loop: Uneven, number: int) -> None:
    loop.synchronize()
    if number != 4:
        loop.optimizer.step()


def with_another_rate(loop: Uneven, number: int) -> None:
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = 0.2 / (number + 2)


def with_leftovers(loop: Uneven, number: int) -> None:
    """As a GAN's generator leaves gradients in its critic."""
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.loss(number, 1).backward()


def with_more_passes(loop: Uneven, number: int) -> None:
    """As a loss that is added late: the first pass has pushed gradients already."""
    if number >= 4:
        loop.loss(number, 1).backward()
    loop.optimizer.step()


def with_leftovers_computed_again(loop: Uneven, number: int) -> None:
    """Only by the rank whose input has ended: the other one computes them once, or has ended before."""
    loop.optimizer.step()
    if number + 1 in UNEVEN:
        loop.optimizer.zero_grad()
        loop.loss(number, 1).backward()
        if loop.is_last(number):
            loop.loss(number, 1).backward()


UNEVEN_STEPS = {
    each.__name__: each
    for each in (
        *(clipped, scaled, left_out, with_another_rate, with_leftovers),
        *(with_more_passes, with_leftovers_computed_again),
    )
}


def scaled_in_two_blocks() -> State:
    """The scale doubles in every third step, and rank 1 has two batches in the first block."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(sgd(model), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for batches in ([3, 2][zps.rank()], 2):
        with zps.join(optimizer):
            for step in range(batches):
                scaler.scale(loss_of(model, step, zps.rank())).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        scaler.load_state_dict(zps.broadcast_object(scaler.state_dict()))
    return {**state_of(model), "scale": torch.tensor(scaler.get_scale())}


def disagree_once() -> list[Any]:
    """In one step of a join, rank 1 alone throws its batch away; then training goes on."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(sgd(model), model.named_parameters())
    outcomes = []
    with zps.join(optimizer):
        for step in range(5):
            loss_of(model, step, 0).backward()
            if (step, zps.rank()) == (2, 1):
                outcomes.append(attempt(optimizer.zero_grad))
            else:
                if (step, zps.rank()) == (2, 0):  # its gradients would be pushed again
                    loss_of(model, step, 0).backward()
                outcomes.append(attempt(optimizer.step))
            optimizer.zero_grad()
    return [*outcomes, state_of(model)]


# ── ranks that differ ───────────────────────────────────────────────────────────────────────────


def drops_alone() -> list[Any]:
    """Rank 0 throws a batch away that rank 1 takes."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(sgd(model), model.named_parameters())
    outcomes = []
    for step in range(4):
        loss_of(model, step, 0).backward()
        if step != 2 or zps.rank() == 1:
            outcomes.append(attempt(optimizer.step))
        optimizer.zero_grad()
    return outcomes


def passes_alone() -> list[Any]:
    """Rank 0 runs backward twice in a later step."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(sgd(model), model.named_parameters())
    outcomes: list[Any] = []
    for step in range(4):
        if outcomes and isinstance(outcomes[-1], Raised):
            break
        loss_of(model, step, 0).backward()
        if step == 2 and zps.rank() == 0:
            loss_of(model, step, 0).backward()
        outcomes.append(attempt(optimizer.step))
        optimizer.zero_grad()
    return outcomes


def more_passes_than_said() -> list[Any]:
    """Rank 1 runs backward once more than the script says in the second step, and throws that away."""
    model = make_model()
    optimizer = zps.DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=2)
    outcomes: list[Any] = []
    for step in range(3):
        for part in range(2):
            loss_of(model, step, zps.rank(), part).backward()
        if step == 1 and zps.rank() == 1:
            outcomes.append(attempt(loss_of(model, step, 1, 2).backward))
        else:
            outcomes.append(attempt(optimizer.step))
        optimizer.zero_grad()
    return outcomes


def joins_in_another_order() -> Any:
    models = [make_model(), make_model()]
    optimizers = [zps.DistributedOptimizer(sgd(model)) for model in models]

    def train() -> None:
        with zps.join(*optimizers):
            for number in (0, 1) if zps.rank() == 0 else (1, 0):
                loss_of(models[number], 0, 0).backward()
                optimizers[number].step()

    return attempt(train)


def misuse_of_join() -> dict[str, Any]:
    optimizer = zps.DistributedOptimizer(sgd(make_model()))

    def nested() -> None:
        with zps.join(optimizer), zps.join(optimizer):
            pass

    def none() -> None:
        with zps.join():
            pass

    def plain() -> None:
        with zps.join(sgd(make_model())):  # type: ignore[arg-type]
            pass

    def listed() -> None:
        with zps.join([optimizer]):  # type: ignore[arg-type]
            pass

    return {call.__name__: attempt(call) for call in (nested, none, plain, listed)}


def run_loops() -> dict[str, Any]:
    return {name: attempt(loop, Loop(alone=False)) for name, loop in LOOPS.items()}


def run_all() -> dict[str, Any]:
    results = run_loops()
    results["uneven"] = attempt(uneven)
    results["misuse of join"] = misuse_of_join()
    for name, step in UNEVEN_STEPS.items():
        results[name] = attempt(Uneven(alone=False).run, step)
    results["scaled in two blocks"] = attempt(scaled_in_two_blocks)
    results["disagree"] = disagree_once()
    results["drops alone"] = drops_alone()
    results["more passes than said"] = more_passes_than_said()
    return results


def run_to_the_deadline() -> dict[str, Any]:
    return {"joins": joins_in_another_order(), "passes alone": passes_alone()}


# ── in the test process ─────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    # Small buckets, so that there are several; a deadline, in case a rank waits for nothing.
    settings = {"sync.bucket_bytes": 1024, "cluster.deadline_seconds": 20}
    with Cluster(settings=settings) as cluster:
        yield cluster.run(run_all, seconds=200)  # some thirty loops; torch compiles one


@pytest.fixture(scope="module")
def late_results() -> Iterator[list[dict[str, Any]]]:
    with Cluster(settings={"cluster.deadline_seconds": 4}) as cluster:
        yield cluster.run(run_to_the_deadline)


@pytest.mark.parametrize("name", LOOPS)
def test_loop_gives_what_one_process_gives(results: list[dict[str, Any]], name: str) -> None:
    wanted = LOOPS[name](Loop(alone=True))
    for outcome in results:
        assert not isinstance(outcome[name], Raised), outcome[name]
        assert_same(outcome[name], wanted)
    first, second = (outcome[name] for outcome in results)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"sync.levels": 2},
        {"sync.scheme": "auto"},
        {"sync.partition": "parallel", "kernels.backend": "torch"},
    ],
    ids=str,
)
def test_loops_under_other_settings(settings: dict[str, object]) -> None:
    with Cluster(settings={"sync.bucket_bytes": 1024, "cluster.deadline_seconds": 10, **settings}) as cluster:
        outcomes = cluster.run(run_loops)
    for name, loop in LOOPS.items():
        wanted = loop(Loop(alone=True))
        for outcome in outcomes:
            assert not isinstance(outcome[name], Raised), outcome[name]
            assert_same(outcome[name], wanted)


def run_gan() -> Any:
    return attempt(gan, Loop(alone=False))


def test_a_gan_trains_where_gradients_leave_residuals() -> None:
    """What it throws away was not pushed before."""
    settings = {"sync.sparsifier": "topk", "sync.density": 0.1, "sparsifier.least_bytes": 0}
    with Cluster(settings=settings) as cluster:
        first, second = cluster.run(run_gan)
    assert not isinstance(first, Raised), first
    assert not isinstance(second, Raised), second
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_ranks_whose_input_has_ended_step_with_the_others(results: list[dict[str, Any]]) -> None:
    wanted = uneven_in_one_process()
    for outcome in results:
        assert not isinstance(outcome["uneven"], Raised), outcome["uneven"]
        assert_same(outcome["uneven"], wanted)


@pytest.mark.parametrize("name", UNEVEN_STEPS)
def test_ranks_whose_input_has_ended_get_what_the_others_have_applied(
    results: list[dict[str, Any]], name: str
) -> None:
    first, second = (outcome[name] for outcome in results)
    assert not isinstance(first, Raised), first
    assert not isinstance(second, Raised), second
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert_same(first, Uneven(alone=True).run(UNEVEN_STEPS[name]))


def test_ranks_with_the_scale_of_rank_0_step_alike_after_an_uneven_block(
    results: list[dict[str, Any]],
) -> None:
    first, second = (outcome["scaled in two blocks"] for outcome in results)
    assert not isinstance(first, Raised), first
    assert not isinstance(second, Raised), second
    assert first["scale"] == 2048
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_step_on_which_ranks_in_a_join_disagree_is_lost_alone(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        *steps, weights = outcome["disagree"]
        assert [isinstance(each, Raised) for each in steps] == [False, False, True, False, False]
        assert "drops a step of optimizer 0" in steps[2].text
        assert all(torch.equal(weights[key], results[0]["disagree"][-1][key]) for key in weights)


def test_misuse_of_join_is_refused(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        errors = outcome["misuse of join"]
        assert {error.kind for error in errors.values()} == {"UsageError"}
        assert "no other join" in errors["nested"].text
        assert "got none" in errors["none"].text
        assert errors["plain"].text.endswith("got SGD")
        assert errors["listed"].text.endswith("got list; pass them one by one, as in join(*optimizers)")


def test_a_rank_that_alone_throws_a_batch_away_is_noticed_in_the_next_step(
    results: list[dict[str, Any]],
) -> None:
    for outcome in results:
        last = outcome["drops alone"][-1]
        assert isinstance(last, Raised)
        assert last.kind == "MismatchError"
        assert "1 step(s) thrown away" in last.text


def test_a_rank_that_alone_runs_backward_again_is_noticed(late_results: list[dict[str, Any]]) -> None:
    for outcome in late_results:
        last = outcome["passes alone"][-1]
        assert isinstance(last, Raised)
        assert last.kind == "DeadlineError"
    assert ":backward ran again" in late_results[0]["passes alone"][-1].text
    assert "rank(s) 1" in late_results[0]["passes alone"][-1].text
    assert "this rank ran backward again" in late_results[0]["passes alone"][-1].text


def test_a_rank_that_runs_backward_more_often_than_it_said_is_refused_at_once(
    results: list[dict[str, Any]],
) -> None:
    first, second = (outcome["more passes than said"] for outcome in results)
    assert first == [None] * 3
    assert (second[0], second[2]) == (None, None), "zero_grad() has ended the step"
    assert second[1].kind == "UsageError"
    assert "backward_passes_per_step: expected step() after at most 2 passes" in second[1].text


def test_joins_that_step_in_another_order_are_refused(late_results: list[dict[str, Any]]) -> None:
    for outcome in late_results:
        assert outcome["joins"].kind == "MismatchError"
        assert "rank 1 takes a step of optimizer 1" in outcome["joins"].text
