"""Requests: what is refused before anything is sent, and what their options mean."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from zenps.errors import TensorError, UsageError
from zenps.wire.fields import MAX_COLUMNS
from zenps.worker.collectives.raw_bytes import check_strided
from zenps.worker.core.request import (
    Options,
    Purpose,
    Request,
    check_outside_graph,
    check_request,
    table_shape,
    wire_name,
)
from zenps.worker.core.residuals import Residuals

SUMMED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
SUMMED += [torch.int32, torch.int16, torch.int8, torch.uint8]


def check_tensor(tensor: Any, average: bool, purpose: Purpose = "value") -> None:
    check_request(Request(tensor, "weight", Options(average=average, purpose=purpose)))


def without_rows(shape: tuple[int, int]) -> Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.empty(0, *shape[1:]), shape, check_invariants=False)


def test_a_push_while_a_cuda_graph_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would have the compaction alone, and its replays would push nothing."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UsageError, match="expected no CUDA graph to be captured"):
        check_tensor(torch.ones(3), average=True)


@pytest.mark.parametrize(
    ("tensor", "average", "message"),
    [
        ([1.0], True, "expected a torch.Tensor, got list"),
        (None, True, "got NoneType"),
        (torch.ones(3, device="meta"), True, r"device meta: expected cpu or cuda; .* with \.to_empty\(\)"),
        (
            torch.ones(3, dtype=torch.bool),
            False,
            r"dtype torch.bool: expected one of float16, .*uint8; \.int\(\) counts, allreduce\(op='max'\)",
        ),
        (torch.ones(3, dtype=torch.uint32), False, "dtype torch.uint32"),
        (
            torch.ones(3, dtype=torch.complex64),
            True,
            r"dtype torch.complex64: expected one of float16, .*uint8; pass torch\.view_as_real\(tensor\)",
        ),
        (torch.ones(3, dtype=torch.float8_e5m2), True, "dtype torch.float8_e5m2"),
        (
            without_rows((2, 1 << 28)),
            True,
            "rows of 268435456 elements: expected at most .*; divide the rows",
        ),
        (torch.ones([1] * 65), True, "65 dimensions: expected at most 64; flatten the tensor"),
    ],
)
@pytest.mark.parametrize("purpose", ["value", "gradient"])
def test_refused(tensor: Any, average: bool, message: str, purpose: Purpose) -> None:
    with pytest.raises(TensorError, match=message):
        check_tensor(tensor, average, purpose)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_another_layout_is_refused() -> None:
    with pytest.raises(TensorError, match=r"layout torch.sparse_csr: expected strided or sparse COO"):
        check_tensor(torch.eye(3).to_sparse_csr(), average=True)


@pytest.mark.parametrize("dtype", SUMMED)
def test_accepted(dtype: torch.dtype) -> None:
    for tensor in (torch.ones(3), torch.ones(()), torch.ones(0, 2), torch.eye(3).to_sparse()):
        check_tensor(tensor.to(dtype), average=False)
        check_tensor(tensor.to(dtype), average=True)
    check_tensor(torch.ones(3, dtype=torch.bool), average=True)
    check_tensor(torch.nn.Parameter(torch.ones(3)), average=True)
    check_tensor(without_rows((2, MAX_COLUMNS)), average=True)


def test_tensors_of_an_autograd_graph_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = parameter.sum()
    for tensor in (parameter, parameter.data, loss.detach()):
        check_outside_graph(tensor, "loss")
    with torch.no_grad():
        check_outside_graph(loss, "loss")
    with pytest.raises(TensorError, match=r"tensor 'loss' is part of an autograd graph.* pass tensor.detach"):
        check_outside_graph(loss, "loss")


def test_a_broadcast_carries_any_dtype_as_bytes() -> None:
    check_tensor(torch.ones(3, dtype=torch.uint8), average=False, purpose="broadcast")


@pytest.mark.parametrize("name", ["", "x" * 1025, "half a \ud800 character", b"weight", 3, None])
@pytest.mark.parametrize("purpose", ["value", "gradient", "broadcast", "control"])
def test_names_are_strings_that_can_be_sent(name: Any, purpose: Purpose) -> None:
    with pytest.raises(UsageError, match=r"tensor name .* expected a string of 1 to 1024 characters"):
        check_request(Request(torch.ones(3), name, Options(purpose=purpose)))


@pytest.mark.parametrize("name", ["x", "x" * 1024, "Gewicht für Ä/𝄞"])
def test_names_that_can_be_sent(name: str) -> None:
    check_request(Request(torch.ones(3), name))


class Wrapping(Tensor):
    """Has no elements of its own, as a DTensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        made: Wrapping = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError("it is refused before any operation, for it has no elements")


def test_a_tensor_that_wraps_others_is_refused() -> None:
    """What was pushed was read from no memory of the tensor."""
    with pytest.raises(TensorError, match=r"a Wrapping: expected .* \.to_local\(\) of a DTensor"):
        check_tensor(Wrapping(torch.ones(3)), average=True)
    with pytest.raises(TensorError, match=r"broadcast/x: a Wrapping: expected"):
        check_strided(Wrapping(torch.ones(3)), "broadcast/x")
    check_tensor(torch.nn.Parameter(torch.ones(3)), average=True)


@pytest.mark.parametrize("average", [1, 0, None, "no", numpy.True_])
def test_average_is_a_bool(average: Any) -> None:
    """Servers drop a push that says 1, and ranks would wait for ever; NumPy's bool ended the job."""
    with pytest.raises(UsageError, match=r"tensor 'weight': average = .*: expected a bool, True or False"):
        check_tensor(torch.ones(3), average)


@pytest.mark.parametrize("priority", [0.5, "1", None, numpy.True_, torch.tensor(0.5)])
def test_a_priority_is_an_integer(priority: Any) -> None:
    with pytest.raises(UsageError, match=r"tensor 'weight': priority .*: expected an integer"):
        check_request(Request(torch.ones(3), "weight", Options(priority=priority)))


@pytest.mark.parametrize("priority", [numpy.int64(-3), numpy.uint8(3), torch.tensor(3)])
def test_a_priority_may_be_an_integer_of_numpy(priority: Any) -> None:
    check_request(Request(torch.ones(3), "weight", Options(priority=priority)))


def test_an_error_shows_no_more_than_the_beginning_of_what_came() -> None:
    with pytest.raises(UsageError) as raised:
        check_request(Request(torch.ones(3), "x" * 100_000))
    assert len(str(raised.value)) < 150


# ── options ─────────────────────────────────────────────────────────────────────────────────────


def test_by_default_exact_values_of_all_ranks_are_summed() -> None:
    assert Request(torch.ones(3), "weight").options == Options(
        average=False, contributes=True, stands_for=(), priority=0, purpose="value"
    )


@pytest.mark.parametrize(
    ("purpose", "is_reduction"),
    [("gradient", True), ("value", True), ("broadcast", False), ("control", False)],
)
def test_only_tensors_of_the_training_are_reductions(purpose: Purpose, is_reduction: bool) -> None:
    assert Options(purpose=purpose).is_reduction == is_reduction


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sparse", "dense", "table"),
    [((50,), (3,), (50, 3)), ((7, 11), (2,), (77, 2)), ((9,), (2, 3), (9, 6)), ((4,), (), (4, 1)),
     ((), (3,), (1, 3)), ((0, 4), (2,), (0, 2))],
)  # fmt: skip
def test_a_sparse_tensor_is_a_table(
    sparse: tuple[int, ...], dense: tuple[int, ...], table: tuple[int, int]
) -> None:
    indices = torch.empty((len(sparse), 0), dtype=torch.int64)
    tensor = torch.sparse_coo_tensor(
        indices, torch.empty(0, *dense), (*sparse, *dense), check_invariants=False
    )
    assert table_shape(tensor) == table


def test_names_on_the_wire_are_those_of_callers_with_marks_doubled() -> None:
    assert wire_name("layer.weight/0") == "layer.weight/0"
    names = ["x", "x@hosts", "x@@hosts", "x#0", "x##0", "x@#", "x@", "x@@"]
    written = [wire_name(name) for name in names]
    taken = {f"{name}{suffix}" for name in written for suffix in ("@hosts", "#0", "#1", "@hosts#0")}
    assert len(set(written)) == len(names)
    assert not taken.intersection(written)
    assert len(wire_name("@" * 512)) == 1024
    with pytest.raises(UsageError, match="of which each @ and # counts twice"):
        wire_name("@" * 512 + "x")


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("is_summed", [True, False])
def test_options_of_a_round_are_without_residuals(average: bool, is_summed: bool) -> None:
    options = Options(average=average, priority=3, residuals=Residuals())
    assert options.of_round(is_summed) == Options(average=average and not is_summed, priority=3)
    assert Options(average=average).of_round(is_summed) == Options(average=average and not is_summed)
