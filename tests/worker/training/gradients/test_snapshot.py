"""Hashes of gradients, on the host and as a device makes them: which edits they notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zenps.worker.encode.sparse import as_table
from zenps.worker.training.gradients import snapshot
from zenps.worker.training.gradients.snapshot import Snapshot, first_changed

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


@pytest.fixture(params=["host", "device"])
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        monkeypatch.setattr(
            snapshot, "_hash", lambda part: snapshot._device_hash(part.resolve_neg().contiguous())
        )


def one_element(gradient: Tensor) -> None:
    gradient.view(-1)[-1] += 1


def all_signs(gradient: Tensor) -> None:
    gradient.neg_()


def two_swapped(gradient: Tensor) -> None:
    gradient.view(-1)[[0, -1]] = gradient.view(-1)[[-1, 0]]


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize("edit", [one_element, all_signs, two_swapped])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 1020, 1021, 2042, 5000])
def test_edit_is_noticed(edit: Callable[[Tensor], None], dtype: torch.dtype, count: int) -> None:
    untouched, edited = (nn.Parameter(torch.zeros(count, dtype=dtype)) for _ in range(2))
    for parameter in (untouched, edited):
        parameter.grad = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    snapshots = {
        parameter: Snapshot(parameter.grad) for parameter in (untouched, edited) if parameter.grad is not None
    }
    assert first_changed(snapshots) is None
    assert edited.grad is not None
    edit(edited.grad.data)
    assert first_changed(snapshots) is edited


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(
    "gradient",
    [
        torch.tensor(2.0),
        torch.zeros(0, 3),
        torch.rand(4, 6).t(),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(1).expand(8),
        torch.rand(1, 5)[:, 1],
        torch.rand(2, 3, device="meta"),
        torch._neg_view(torch.rand(4)),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
    ],
    ids=[
        *("scalar", "empty", "transposed", "channels last", "expanded", "lone", "meta"),
        *("negated", "sparse", "CSR"),
    ],
)
def test_gradient_of_any_form_is_unchanged(gradient: Tensor) -> None:
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    with torch.no_grad():
        taken = Snapshot(gradient)
    assert taken.is_of(gradient)
    assert snapshot._are_unchanged([taken])
    assert parameter.grad is None
    assert first_changed({parameter: taken}) is parameter  # it was dropped


@pytest.mark.parametrize("sparse_dim", [1, 2])
def test_backward_adds_rows_to_a_gradient_without_any_that_was_looked_at(sparse_dim: int) -> None:
    """As of a micro-batch that looks nothing up. torch refuses to resize memory that NumPy has seen."""
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64)
    values = torch.empty((0, 2) if sparse_dim == 1 else 0)
    gradient = torch.sparse_coo_tensor(indices, values, (3, 2), check_invariants=True)
    before = Snapshot(gradient)
    as_table(gradient)
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = gradient
    gradient += torch.ones(3, 2).to_sparse(sparse_dim)
    assert torch.equal(gradient.to_dense(), torch.ones(3, 2))
    assert first_changed({parameter: before}) is parameter
