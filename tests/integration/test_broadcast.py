"""Parameters, optimizer state and plain objects from one rank to all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from tests.integration.embedding_model import OPTIMIZERS, Model, assert_same, loss_of, make_model, state_of
from tests.worker.collectives.test_loading import Momentum32


def every_dtype(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    numbers = torch.randn(6, 5)
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    dtypes += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]
    state = {str(dtype): (9 * numbers.abs()).to(dtype) for dtype in dtypes}
    state["0-dim"] = torch.tensor(rank + 1)
    state["64-dim"] = torch.randn([1] * 62 + [2, 3])
    state["empty"] = torch.empty(0, 3)
    state["transposed"] = torch.randn(6, 5).t()
    state["expanded"] = torch.tensor([rank + 1.0]).expand(5)
    state["expanded in the middle"] = torch.randn(3, 1, 2).expand(3, 4, 2)
    state["special"] = torch.tensor([float("nan"), -0.0, float("inf")]) * (1 - 2 * rank)
    state["large"] = torch.randn(100_003)
    state["large bool"] = torch.rand(200_001) < 0.5
    return state


def broadcast() -> dict[str, Any]:
    state = every_dtype(zps.rank())
    zps.broadcast_parameters(state, root_rank=1)
    model = make_model() if zps.rank() == 1 else Model().double()
    zps.broadcast_parameters(model.named_parameters(), root_rank=1)
    again = every_dtype(zps.rank())
    zps.broadcast_parameters(again, root_rank=0)
    return {"from 1": state, "model": state_of(model), "from 0": again}


PLAIN = {
    "text": "Zen ∆",
    "bytes": b"\0\xff",
    "numbers": [1, -(2**63), 2**64 - 1, 0.1, float("inf")],
    "nested": {"none": None, "true": True, "list": [[], {}, [1, [2, [3]]]]},
    "long": "x" * 100_000,
    7: "an integer key",
}


def broadcast_objects() -> dict[str, Any]:
    mine = PLAIN if zps.rank() == 0 else object()
    return {
        "plain": zps.broadcast_object(mine),
        "again": zps.broadcast_object([zps.rank()], root_rank=1),
        "tuple": zps.broadcast_object((1, 2)),
        "none": zps.broadcast_object(None),
    }


def broadcast_state(name: str) -> list[dict[str, Any]]:
    """Rank 1 has trained alone; rank 0, fresh and with other hyperparameters, gets its state."""
    model = make_model()
    optimizers = OPTIMIZERS[name](model)
    if zps.rank() == 1:
        for step in range(2):
            loss_of(model, step, 0).backward()
            for optimizer in optimizers:
                optimizer.step()
    else:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 123.0
    if zps.rank() == 1:
        for state in optimizers[0].state.values():
            state["expanded"] = torch.ones(1, dtype=torch.float64).expand(3)
    for optimizer in optimizers:
        zps.broadcast_optimizer_state(optimizer, root_rank=1)
    return [optimizer.state_dict() for optimizer in optimizers]


def broadcast_wide_state() -> dict[str, Any]:
    """Rank 1 has float32 momentum of bfloat16 parameters, and a hook that changes what is loaded."""
    parameter = torch.nn.Parameter(torch.arange(5.0).bfloat16())
    optimizer = Momentum32([parameter])
    if zps.rank() == 1:
        for step in range(3):
            parameter.grad = torch.full((5,), 0.1 * step).bfloat16()
            optimizer.step()

    def negate(loaded: torch.optim.Optimizer) -> None:
        loaded.state[parameter]["momentum"].neg_()

    optimizer.register_load_state_dict_post_hook(negate)
    zps.broadcast_optimizer_state(optimizer, root_rank=1)
    return optimizer.state_dict()


def broadcast_laid_out_state() -> tuple[int, ...]:
    """Rank 1 alone has state, of a parameter that lies in memory column by column."""
    parameter = torch.nn.Parameter(torch.randn(4, 3).t())
    optimizer = torch.optim.Adam([parameter], fused=True)
    if zps.rank() == 1:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    zps.broadcast_optimizer_state(optimizer, root_rank=1)
    stride: tuple[int, ...] = optimizer.state[parameter]["exp_avg"].stride()
    return stride


def train_with_values() -> tuple[str, list[tuple[Any, ...]]]:
    """The error of a value that cannot be sent, and the values of each rank's own, twice."""
    torch.manual_seed(zps.rank())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 + zps.rank())
    refused = attempt(zps.TrainingState, model, [optimizer], what=object()).text
    random.seed(zps.rank())
    state = zps.TrainingState(
        model,
        [optimizer],
        epoch=zps.rank(),
        schedule=scheduler.state_dict(),
        sources=(random.getstate(), {"cpu": [torch.get_rng_state()]}),
    )
    seen = []
    for _ in range(2):
        scheduler.load_state_dict(state.schedule)
        random.setstate(state.sources[0])
        torch.set_rng_state(state.sources[1]["cpu"][0])
        seen.append((state.epoch, scheduler.step_size, random.random(), torch.rand(1).item()))
        state.sync()
    return refused, seen


def broadcast_what_differs() -> dict[str, Any]:
    here = zps.rank() == 1
    cases = {
        "dtype": {"weight": torch.ones(3, dtype=torch.bfloat16 if here else torch.float16)},
        "shape": {"weight": torch.ones(4 if here else 3)},
        "memory": {"weight": torch.ones(1).expand(3) if here else torch.arange(3.0)},
        "name": {"weight": torch.ones(3)} | ({"extra": torch.ones(1)} if here else {}),
    }
    return {case: attempt(zps.broadcast_parameters, tensors) for case, tensors in cases.items()}


def broadcast_what_one_rank_cannot() -> dict[str, Any]:
    """Rank 0 is the root, unless ranks disagree about that. Each line fails on one rank alone."""
    is_root = zps.rank() == 0
    model = torch.nn.Linear(2, 2)
    unpacked, broken = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    if is_root:
        unpacked.param_groups[0]["what"] = object()
        broken.state_dict = lambda: 1 / 0  # type: ignore[assignment,return-value]
    no_tensor: Any = {"weight": torch.ones(3) if is_root else 7}
    none_at_root: Any = {"weight": 7 if is_root else torch.ones(3)}
    return {
        "no plain data": attempt(zps.broadcast_optimizer_state, unpacked),
        "no state": attempt(zps.broadcast_optimizer_state, broken),
        "no object": attempt(zps.broadcast_object, object()),
        "no tensor": attempt(zps.broadcast_parameters, no_tensor),
        "no tensor of the root": attempt(zps.broadcast_parameters, none_at_root),
        "two roots": attempt(zps.broadcast_object, "x", zps.rank()),
        "no root": attempt(zps.broadcast_object, "x", 1 - zps.rank()),
        "no rank": attempt(zps.broadcast_object, "x", 0 if is_root else 7),
        "no number": attempt(zps.broadcast_object, "x", 0 if is_root else "0"),
        "nowhere a rank": attempt(zps.broadcast_object, "x", 7 if is_root else -1),
        "parameters": attempt(zps.broadcast_parameters, {"weight": torch.ones(3)}, zps.rank()),
        "afterwards": zps.broadcast_object("well", 1),
    }


def run_all() -> dict[str, Any]:
    results: dict[str, Any] = {f"state {name}": broadcast_state(name) for name in OPTIMIZERS}
    results["wide"] = broadcast_wide_state()
    results["laid out"] = broadcast_laid_out_state()
    results["differs"] = broadcast_what_differs()
    results["one"] = broadcast_what_one_rank_cannot()
    results |= {"broadcast": broadcast(), "objects": broadcast_objects()}
    return results | {"values": train_with_values()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    with Cluster(settings={"cluster.deadline_seconds": 10}) as cluster:
        return cluster.run(run_all)


def test_values_of_a_training_may_be_states_of_schedulers_and_of_random_numbers(
    results: list[dict[str, Any]],
) -> None:
    (refused, seen), (also_refused, seen_too) = (outcome["values"] for outcome in results)
    assert "expected plain data" in refused
    assert "rank 0 had nothing to broadcast" in also_refused
    assert seen == seen_too
    assert seen[0] == seen[1], "of the same states"
    assert seen[0][:2] == (0, 3)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_parameters(results: list[dict[str, Any]], root: int) -> None:
    wanted = every_dtype(root)
    for outcome in results:
        got = outcome["broadcast"][f"from {root}"]
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name].contiguous().view(-1).view(torch.uint8),
                               tensor.contiguous().view(-1).view(torch.uint8)), name  # fmt: skip
        assert_same(outcome["broadcast"]["model"], make_model().state_dict())


@pytest.mark.parametrize(
    ("case", "how"),
    {
        "dtype": "'weight' is torch.float16 (3,) there and torch.bfloat16 (3,) here",
        "shape": "'weight' is torch.float32 (3,) there and torch.float32 (4,) here",
        "memory": "is torch.float32 (3,) there and torch.float32 (3,) expanded in dimension(s) 0 here",
        "name": "'extra' is missing there and torch.float32 (1,) here",
    }.items(),
)
def test_ranks_with_other_parameters(results: list[dict[str, Any]], case: str, how: str) -> None:
    for rank, outcome in enumerate(results):
        error = outcome["differs"][case]
        assert isinstance(error, Raised), error
        assert error.kind == "MismatchError"
        assert "rank(s) 1 have other parameters than rank 0" in error.text
        assert error.text.endswith("give all ranks the same names, shapes and dtypes")
        assert (how in error.text) == (rank == 1)


def test_broadcast_object(results: list[dict[str, Any]]) -> None:
    for outcome in results:
        assert outcome["objects"] == {"plain": PLAIN, "again": [1], "tuple": [1, 2], "none": None}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(results: list[dict[str, Any]], name: str) -> None:
    first, second = (outcome[f"state {name}"] for outcome in results)
    assert name == "sgd" or any(state["state"] for state in second)
    for got, wanted in zip(first, second, strict=True):
        assert got["param_groups"] == wanted["param_groups"]
        assert got["state"].keys() == wanted["state"].keys()
        for key, values in wanted["state"].items():
            torch.testing.assert_close(got["state"][key], values, rtol=0, atol=0)


def test_state_is_equal_on_all_ranks_whatever_its_dtype(results: list[dict[str, Any]]) -> None:
    first, second = (outcome["wide"] for outcome in results)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert second["state"][0]["momentum"].dtype == torch.float32
    # The sum of 0.9 · 0.1 and 0.2, negated.
    assert second["state"][0]["momentum"][0].item() == pytest.approx(-0.29, rel=0.01)


def test_state_has_the_layout_of_its_parameter_on_all_ranks(results: list[dict[str, Any]]) -> None:
    """A fused optimizer would pair other elements on each rank."""
    assert [outcome["laid out"] for outcome in results] == [(1, 3), (1, 3)]


@pytest.mark.parametrize(
    ("case", "on_root", "elsewhere"),
    [
        ("no plain data", "UsageError: cannot send list", "UsageError: rank 0 had nothing to broadcast"),
        ("no state", "ZeroDivisionError: division by zero", "UsageError: rank 0 had nothing to broadcast"),
        ("no object", "UsageError: cannot send object", "UsageError: rank 0 had nothing to broadcast"),
        (
            "no tensor",
            "MismatchError: rank(s) 1 have other parameters",
            "TensorError: broadcast/weight: expected",
        ),
        (
            "no tensor of the root",
            "TensorError: broadcast/weight: expected",
            "MismatchError: rank(s) 1 have other parameters than rank 0; 'weight' is not a tensor",
        ),
        ("two roots", "MismatchError: broadcast of 'object'", "MismatchError: broadcast of 'object'"),
        ("no root", "MismatchError: broadcast of 'object'", "MismatchError: broadcast of 'object'"),
        ("no rank", "MismatchError: broadcast of 'object'", "MismatchError: broadcast of 'object'"),
        ("no number", "MismatchError: broadcast of 'object'", "MismatchError: broadcast of 'object'"),
        (
            "nowhere a rank",
            "UsageError: root_rank 7: expected 0 to 1",
            "UsageError: root_rank -1: expected 0 to 1",
        ),
        (
            "parameters",
            "MismatchError: broadcast of 'parameters'",
            "MismatchError: broadcast of 'parameters'",
        ),
    ],
)
def test_what_one_rank_cannot_broadcast_is_an_error_on_all(
    results: list[dict[str, Any]], case: str, on_root: str, elsewhere: str
) -> None:
    for outcome, wanted in zip(results, (on_root, elsewhere), strict=True):
        error = outcome["one"][case]
        assert isinstance(error, Raised)
        assert f"{error.kind}: {error.text}".startswith(wanted)
        assert outcome["one"]["afterwards"] == "well"
