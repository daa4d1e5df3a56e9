"""Buckets: which parameters a rank says it has a gradient for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from zenps.worker.training.gradients.buckets import Bucket, clip_factor, fuse


def presence(bucket: Bucket, residual: Tensor | None = None) -> list[float]:
    ((begin, end),) = bucket.exact
    fused = bucket.fused()
    if residual is not None:
        bucket.add_presence(fused, residual)
    values: list[float] = fused[begin:end].tolist()
    return values


def test_a_parameter_without_a_gradient_is_absent() -> None:
    used, unused = (Parameter(torch.ones(2, 3)) for _ in range(2))
    bucket = Bucket("b", (used, unused), is_sparsifiable=True)
    used.grad = torch.ones(2, 3)
    assert presence(bucket) == [1.0, 0.0]
    used.grad = None
    assert presence(bucket) == [0.0, 0.0], "whatever it had before: the residual may be another rank's"


def test_a_parameter_whose_residual_may_be_pushed_is_present_unless_it_is_frozen() -> None:
    """Else weight decay and the optimizer's state would go on without gradients."""
    first, second = (Parameter(torch.ones(2, 3)) for _ in range(2))
    bucket = Bucket("b", (first, second), is_sparsifiable=True)
    residual = torch.zeros(14)
    residual[7] = 1  # of the second
    assert presence(bucket, residual) == [0.0, 1.0]
    second.requires_grad_(requires_grad=False)
    assert presence(bucket, residual) == [0.0, 0.0]
    first.grad = torch.ones(2, 3)
    assert presence(bucket, residual) == [1.0, 0.0]


def test_norms_are_clipped_together() -> None:
    first, second = (Parameter(torch.ones(2, 3)) for _ in range(2))
    buckets = [Bucket("a", (first,)), Bucket("b", (second,))]
    assert clip_factor(buckets, 1.0) == 1.0, "no gradient"
    first.grad, second.grad = 3 * torch.ones(2, 3), 4 * torch.ones(2, 3)
    norm = 5 * math.sqrt(6)
    assert clip_factor(buckets, 0.0) == clip_factor(buckets, 2 * norm) == 1.0
    assert clip_factor(buckets, norm / 2) == pytest.approx(0.5)
    assert buckets[1].fused(0.5).tolist() == [2.0] * 6 + [1.0]


def test_parameters_of_one_dimension_are_never_sparsified() -> None:
    matrix, vector, other = Parameter(torch.ones(2, 3)), Parameter(torch.ones(3)), Parameter(torch.ones(4, 2))
    buckets = fuse("b", [matrix, vector, other], 1 << 20, 1, sparsifies=True)
    assert [(bucket.parameters, bucket.is_sparsifiable) for bucket in buckets] == [
        ([matrix, other], True),
        ([vector], False),
    ]
    (whole,) = fuse("b", [matrix, vector, other], 1 << 20, 1)
    assert not whole.is_sparsifiable
