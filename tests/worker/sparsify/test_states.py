"""States of sparsification: a resumed job, and one that workers join, lose nothing of what residuals have."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.sparsify.test_sparsification import SIZE, gradient, make, options, transform
from zenps.errors import UsageError
from zenps.sparsifiers.base import Momentum, Sparsifier
from zenps.sparsifiers.micro import Micro
from zenps.worker.core.request import Request, name_in_turn
from zenps.worker.core.residuals import Residuals
from zenps.worker.sparsify.agreed import Agreed

torch.set_num_threads(1)


@pytest.mark.parametrize(
    "wrong",
    [None, [], {}, {"tensors": 3}],
    ids=str,
)
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected that of sparsifier_state_dict"):
        make().load_state_dict(wrong)


@pytest.mark.parametrize("name", ["topk", "dgc", "exdyna"])
def test_a_damaged_state_names_its_tensor(name: str) -> None:
    sparsification, residuals = make(f"sync.sparsifier={name}"), Residuals()
    sparsification.transform(Request(gradient(0), "layer", options(residuals)), 0)
    state = sparsification.state_dict()
    whole = state["tensors"]["layer"]
    damaged = [{key: value for key, value in whole.items() if key != missing} for missing in whole]
    damaged += [whole | {"residual": 3}, whole | {"step": "x"}, {}]
    if name != "topk":
        inner = {
            key: value[:-1] if isinstance(value, Tensor) else value
            for key, value in whole["sparsifier"].items()
        }
        damaged += [whole | {"sparsifier": inner}, whole | {"sparsifier": {}}]
    for each in damaged:
        again = make(f"sync.sparsifier={name}")
        again.load_state_dict(state | {"tensors": {"layer": each}})
        with pytest.raises(UsageError, match=r"sparsifier state of tensor 'layer': .*expected"):
            again.transform(Request(gradient(0), "layer", options(Residuals())), 0)


def test_steps_continue_from_a_state_and_begin_anew_when_workers_join() -> None:
    """Then the tensor's step is 0 again on all ranks, and a joining worker has no state."""
    sparsification, residuals = make(), Residuals()
    for step in range(5):
        made = transform(sparsification, gradient(0), step, options(residuals))
        assert made.gradient.step.number == step
    again, others = make(), Residuals()
    again.load_state_dict(sparsification.state_dict())
    numbers = [
        transform(again, gradient(0), step, options(others)).gradient.step.number for step in (0, 1, 0, 1)
    ]
    assert numbers == [5, 6, 0, 1]


def test_what_ranks_have_learned_together_is_forgotten_when_workers_join() -> None:
    """Unless it is shared with them."""
    sparsification, residuals = make("sync.sparsifier=micro"), Residuals()

    def sparsifier_in(step: int) -> Sparsifier:
        made = sparsification.transform(Request(gradient(0), "layer", options(residuals)), step)
        assert isinstance(made, Agreed)
        return made.gradient.sparsifier

    first = sparsifier_in(0)
    assert sparsifier_in(1) is first
    assert sparsifier_in(0) is not first


def test_momentum_stays_when_workers_join() -> None:
    sparsification, residuals = make("sync.sparsifier=dgc"), Residuals()
    given, tensor = options(residuals, momentum=Momentum(0.5, nesterov=False)), torch.ones(SIZE)
    kept = set(range(SIZE))
    for _ in range(2):
        kept -= set(transform(sparsification, tensor, 0, given).apply(tensor)._indices()[0].tolist())
        residuals.end_step()
    assert residuals.of("layer", SIZE, 1)[min(kept)] == 1 + 1.5


def test_momentum_stays_when_only_the_rank_is_another() -> None:
    residuals = Residuals()
    given, tensor = options(residuals, momentum=Momentum(0.5, nesterov=False)), torch.ones(SIZE)
    transform(make("sync.sparsifier=dgc"), tensor, 0, given).apply(tensor)
    before = residuals.feedback("layer", SIZE, torch.float32).sparsifier
    assert before is not None
    state = before.state_dict()["momentum"].clone()
    assert state.any()
    residuals.end_step()
    transform(make("sync.sparsifier=dgc", "cluster.workers=2"), tensor, 0, given)
    now = residuals.feedback("layer", SIZE, torch.float32).sparsifier
    assert now is not None
    assert now.task.world == 2
    assert torch.equal(now.state_dict()["momentum"], state)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["sync.sparsifier=exdyna"], ["sync.sparsifier=topk"]),
        (["sync.sparsifier=topk"], ["sync.sparsifier=dgc"]),
        (["sync.sparsifier=dgc"], ["sync.sparsifier=dgc", "sparsifier.mask_momentum=off"]),
        (["sync.sparsifier=randomk"], ["sync.sparsifier=randomk", "sync.seed=3"]),
        (["sync.sparsifier=topk"], ["sync.sparsifier=topk", "cluster.workers=2"]),
    ],
)
def test_a_residual_goes_on_in_a_job_of_other_settings(before: list[str], now: list[str]) -> None:
    """That of the first job selected in all others."""
    residuals = Residuals()
    made = make(*before).transform(Request(gradient(0), "layer", options(residuals)), 0)
    assert made is not None
    made.apply(gradient(0))
    left = residuals.feedback("layer", SIZE, torch.float32).residual.clone()
    assert left.any()
    job, whole = make(*now), gradient(1)
    for step in range(2):
        job.transform(Request(whole, "layer", options(residuals)), step)
        feedback = residuals.feedback("layer", SIZE, torch.float32)
        assert type(feedback.sparsifier) is job.kind
        task, config = feedback.sparsifier.task, job._config
        assert (task.settings, task.seed) == (config.sparsifier, config.sync.seed)
        assert task.world == config.cluster.workers
        assert torch.equal(feedback.residual, left)


def test_a_joining_worker_gets_what_ranks_share() -> None:
    sparsification, residuals = make(), Residuals()
    for step in range(5):
        transform(sparsification, gradient(step), step, options(residuals)).apply(gradient(step))
    joined, its_own, again = make(rank=1), Residuals(), make(rank=2)
    joined.adopt(sparsification.shared_state())
    again.adopt(joined.shared_state())  # before the one that has joined has pushed anything
    for each, its_residuals in ((joined, its_own), (again, Residuals())):
        made = [transform(each, gradient(0), step, options(its_residuals)) for step in (0, 1, 0)]
        assert [one.gradient.step.number for one in made] == [5, 6, 0], "once"
        assert not made[0].gradient.residual.any()
    assert joined.shared_state()["layer"] == {"elements": SIZE, "step": 1}


@pytest.mark.parametrize("name", ["topk", "micro"])
def test_what_a_rank_has_loaded_is_shared_with_one_that_has_nothing_to_load(name: str) -> None:
    """An elastic job may be saved without a lost rank, and resumed with all."""
    saved, residuals = make(f"sync.sparsifier={name}"), Residuals()
    for step in range(5):
        saved.transform(Request(gradient(0), "layer", options(residuals)), step)
    resumed, without = make(f"sync.sparsifier={name}"), make(f"sync.sparsifier={name}", rank=1)
    resumed.load_state_dict(saved.state_dict())
    shared = resumed.shared_state()
    assert shared == saved.shared_state()
    for each in (resumed, without):
        each.adopt(shared)
        made = each.transform(Request(gradient(0), "layer", options(Residuals())), 0)
        assert made is not None
        assert made.gradient.step.number == 5


def test_a_joining_worker_keeps_a_residual_that_it_has_loaded_and_takes_the_steps_of_the_others() -> None:
    running, residuals, joining = make(), Residuals(), make()
    transform(running, gradient(0), 0, options(residuals)).apply(gradient(0))
    joining.load_state_dict(copy.deepcopy(running.state_dict()))
    left = residuals.of("layer", SIZE, 1)[:, 0].clone()
    for step in range(1, 5):
        transform(running, gradient(0), step, options(residuals)).apply(gradient(0))
    joining.adopt(running.shared_state())
    assert joining.shared_state() == running.shared_state()
    made = transform(joining, gradient(0), 0, options(Residuals()))
    assert made.gradient.step.number == 5
    assert torch.equal(made.gradient.residual, left)


def test_a_loaded_state_that_is_damaged_is_not_shared() -> None:
    made, residuals = make(), Residuals()
    transform(made, gradient(0), 0, options(residuals))
    state = made.state_dict()
    for damaged in (None, {}, {"step": 3, "residual": 3}):
        again = make()
        again.load_state_dict(state | {"tensors": {"layer": damaged}})
        assert again.shared_state() == {}


class Stateless(Micro):
    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise KeyError("threshold")


class Unsaved(Stateless):
    def state_dict(self) -> Mapping[str, Any]:
        raise RuntimeError("it has none")


def test_errors_of_a_plug_in_about_its_state_name_it_and_lose_nothing() -> None:
    sparsification, joined = make("sync.sparsifier=micro"), make("sync.sparsifier=micro")
    sparsification.kind = joined.kind = Stateless
    others, residuals = Residuals(), Residuals()
    sparsification.transform(Request(gradient(0), "layer", options(others)), 0)
    joined.adopt(sparsification.shared_state())
    for _ in range(2):  # again: what the others share is not lost by the first error
        with pytest.raises(UsageError, match=r"Stateless: KeyError\('threshold'\) in load_state_dict"):
            joined.transform(Request(gradient(0), "layer", options(residuals)), 0)
    resumed = make("sync.sparsifier=micro")
    resumed.kind = Stateless
    resumed.load_state_dict(sparsification.state_dict())
    with pytest.raises(UsageError, match=r"tensor 'layer': Stateless: KeyError"):
        resumed.transform(Request(gradient(0), "layer", options(Residuals())), 0)
    unsaved = make("sync.sparsifier=micro")
    unsaved.kind, residuals = Unsaved, Residuals()
    unsaved.transform(Request(gradient(0), "layer", options(residuals)), 0)
    with pytest.raises(UsageError, match=r"Unsaved: RuntimeError\('it has none'\) in state_dict"):
        unsaved.state_dict()


def test_a_shared_state_of_a_tensor_that_has_another_size_now_is_not_taken() -> None:
    sparsification, residuals, joined = make(), Residuals(), make(rank=1)
    transform(sparsification, gradient(0), 0, options(residuals))
    joined.adopt(sparsification.shared_state())
    longer = gradient(0, 2 * SIZE)
    assert transform(joined, longer, 0, options(Residuals())).gradient.step.number == 0


def test_what_no_tensor_has_taken_yet_is_saved_again() -> None:
    """A resumed job may be saved again before it has pushed anything, or each of its tensors."""
    made, residuals = make(), Residuals()
    for name in ("one", "other"):
        made.transform(Request(gradient(0), name, options(residuals)), 0)
        residuals.of(name, SIZE, 1).fill_(3)
    for pushed in (0, 1):
        resumed, its_own = make(), Residuals()
        resumed.load_state_dict(made.state_dict())
        for name in ("one", "other")[:pushed]:
            resumed.transform(Request(gradient(0), name, options(its_own)), 0)
            its_own.of(name, SIZE, 1).fill_(4)
        found = {name: state["residual"].mean() for name, state in resumed.state_dict()["tensors"].items()}
        assert found == {"one": 4 if pushed else 3, "other": 3}


def test_what_was_loaded_last_is_saved_though_its_tensor_has_another_residual_still() -> None:
    made, residuals = make(), Residuals()
    transform(made, gradient(0), 0, options(residuals))
    state = made.state_dict()
    state["tensors"]["layer"]["residual"] = torch.full((SIZE,), 3.0)
    made.load_state_dict(state)
    assert made.state_dict()["tensors"]["layer"]["residual"].mean() == 3
    assert transform(made, gradient(0), 1, options(residuals)).gradient.residual.mean() == 3


BSP, SSP = (), ("sync.consistency=ssp", "sync.staleness=2")


def state_of(sets: tuple[str, ...], names: Sequence[str]) -> dict[str, Any]:
    made, residuals = make(*sets), Residuals()
    for name in names:
        made.transform(Request(gradient(0), name, options(residuals)), 0)
    return made.state_dict()


@pytest.mark.parametrize("is_old", [False, True])
def test_a_state_of_another_staleness_is_refused(is_old: bool) -> None:
    """Its tensors have other names: their residuals would never be pushed."""
    turns = [name_in_turn("optimizer0", turn, "layer") for turn in range(3)]
    states = {BSP: state_of(BSP, ["optimizer0/layer"]), SSP: state_of(SSP, turns)}
    if is_old:  # of a version that did not save it
        for state in states.values():
            del state["staleness"]
    for saved, here in itertools.product(states, repeat=2):
        if saved == here:
            make(*here).load_state_dict(states[saved])
            continue
        expected = {BSP: "staleness is 2, expected 0", SSP: "staleness is 0, expected 2"}[here]
        with pytest.raises(UsageError, match=f"{expected}, as here; .* same settings"):
            make(*here).load_state_dict(states[saved])


def test_tensors_that_are_made_after_all_states_were_taken_begin_without() -> None:
    sparsification, residuals = make(), Residuals()
    sparsification.transform(Request(gradient(0), "layer", options(residuals)), 0)
    again, others = make(), Residuals()
    again.load_state_dict(sparsification.state_dict())
    with pytest.raises(UsageError, match=r"expected one of tensor 'other', got layer.*zenps.init"):
        again.transform(Request(gradient(0), "other", options(others)), 0)
    assert again.transform(Request(gradient(0), "layer", options(others)), 0) is not None
    assert again.transform(Request(gradient(0), "other", options(others)), 0) is not None
