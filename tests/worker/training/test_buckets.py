"""Buckets: which parameters a rank says it has a gradient for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from zenps.worker.training.buckets import Bucket, fuse


def presence(bucket: Bucket) -> list[float]:
    ((begin, end),) = bucket.exact
    values: list[float] = bucket.fused()[begin:end].tolist()
    return values


@pytest.mark.parametrize(("is_sparsifiable", "later"), [(False, [0.0, 0.0]), (True, [1.0, 0.0])])
def test_a_parameter_whose_residual_may_be_pushed_is_present(
    is_sparsifiable: bool, later: list[float]
) -> None:
    used, unused = (Parameter(torch.ones(2, 3)) for _ in range(2))
    bucket = Bucket("b", (used, unused), is_sparsifiable=is_sparsifiable)
    used.grad = torch.ones(2, 3)
    assert presence(bucket) == [1.0, 0.0]
    used.grad = None
    assert presence(bucket) == later


def test_parameters_of_one_dimension_are_never_sparsified() -> None:
    matrix, vector, other = Parameter(torch.ones(2, 3)), Parameter(torch.ones(3)), Parameter(torch.ones(4, 2))
    buckets = fuse("b", [matrix, vector, other], 1 << 20, 1, sparsifies=True)
    assert [(bucket.parameters, bucket.is_sparsifiable) for bucket in buckets] == [
        ([matrix, other], True),
        ([vector], False),
    ]
    (whole,) = fuse("b", [matrix, vector, other], 1 << 20, 1)
    assert not whole.is_sparsifiable
