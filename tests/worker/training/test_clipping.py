"""Gradient clipping beside torch's, which takes the same gradients made dense."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import zenps as zps
from zenps.errors import TensorError, UsageError

SHAPES = ((20, 3), (20, 3), (4, 5, 2), (7,), (0, 3))


def sparse(shape: tuple[int, ...], sparse_dim: int, rows: int, dtype: torch.dtype) -> Tensor:
    """With duplicates, some of which cancel out."""
    indices = torch.stack([torch.randint(size, (rows,)) for size in shape[:sparse_dim]])
    values = torch.randn(rows, *shape[sparse_dim:]).to(dtype)
    twice = torch.cat([indices, indices[:, :2]], 1), torch.cat([values, -values[:2]])
    return torch.sparse_coo_tensor(*twice, shape, check_invariants=True)


def gradients(dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    torch.manual_seed(3)
    return [
        sparse(SHAPES[0], 1, 9, dtype),
        None,
        sparse(SHAPES[1], 1, 0, dtype).coalesce(),
        sparse(SHAPES[2], 2, 6, dtype),
        torch.randn(7).to(dtype),
        torch.empty(0, 3, dtype=dtype),
    ]


def with_gradients(given: Sequence[Tensor | None], *, dense: bool = False) -> list[Parameter]:
    parameters = []
    for gradient in given:
        parameter = Parameter(torch.zeros(3 if gradient is None else gradient.shape, dtype=torch.float64))
        if gradient is not None:
            parameter = Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
            parameter.grad = gradient.to_dense() if dense else gradient
        parameters.append(parameter)
    return parameters


def assert_alike(ours: Sequence[Parameter], theirs: Sequence[Parameter]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        if other.grad is None:
            assert own.grad is None
            continue
        assert own.grad is not None
        torch.testing.assert_close(own.grad.to_dense(), other.grad)
        assert not own.grad.is_sparse or own.grad.is_coalesced()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("norm_type", [2.0, 1, 0.5, 3, math.inf, "inf"])
def test_norm_as_torch_has_it_of_dense_gradients(
    norm_type: float, max_norm: float, foreach: bool | None
) -> None:
    ours, theirs = with_gradients(gradients()), with_gradients(gradients()[:5], dense=True)
    norm = zps.clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, wanted)
    assert_alike(ours[:5], theirs)
    assert not norm.requires_grad


@pytest.mark.parametrize("foreach", [None, False])
def test_value_as_torch_has_it_of_dense_gradients(foreach: bool | None) -> None:
    ours, theirs = with_gradients(gradients()), with_gradients(gradients(), dense=True)
    zps.clip_grad_value_(iter(ours), 0.5, foreach)
    torch.nn.utils.clip_grad_value_(theirs, 0.5)
    assert_alike(ours, theirs)
    assert max(each.grad.to_dense().abs().max() for each in ours[:5] if each.grad is not None) == 0.5


def test_gradients_keep_their_memory_and_their_dtypes() -> None:
    table = gradients(torch.float16)[0]
    assert table is not None
    first, second = with_gradients([table.coalesce(), torch.ones(4)])
    values = first.grad._values()  # type: ignore[union-attr]
    norm = zps.clip_grad_norm_([first, second], 1.0)
    assert first.grad is not None
    assert first.grad._values().data_ptr() == values.data_ptr()
    assert (first.grad.dtype, norm.dtype) == (torch.float16, torch.float32)
    assert zps.clip_grad_norm_(first, 1.0).dtype == torch.float16, "a single tensor"


def test_nothing_to_clip() -> None:
    assert zps.clip_grad_norm_([], 1.0) == 0
    assert zps.clip_grad_norm_(with_gradients([None, torch.empty(0, 3)]), 1.0, math.inf) == 0
    zps.clip_grad_value_([], 1.0)


def test_a_norm_that_is_not_finite() -> None:
    rows = torch.tensor([[1.0], [math.nan]]).to_sparse(1)
    (parameter,) = with_gradients([rows])
    with pytest.raises(RuntimeError, match="non-finite"):
        zps.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    assert parameter.grad is not None
    assert parameter.grad.to_dense()[0] == 1
    assert zps.clip_grad_norm_(parameter, 1.0).isnan()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_refused() -> None:
    (parameter,) = with_gradients([torch.ones(3)])
    for norm_type in (0, -1.0, -math.inf, math.nan):
        with pytest.raises(UsageError, match="expected more than 0, or infinity"):
            zps.clip_grad_norm_(parameter, 1.0, norm_type)
    compressed = Parameter(torch.eye(3).to_sparse_csr())
    compressed.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(TensorError, match=r"layout torch.sparse_csr: expected strided or sparse COO"):
        zps.clip_grad_value_(compressed, 1.0)
