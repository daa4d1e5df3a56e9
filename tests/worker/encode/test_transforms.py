"""Transforms: what travels in a tensor's place, and that its sum comes back as the tensor's."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.integration.reference import assert_same_bits, reduce_in_rank_order
from tests.worker.encode.test_transfer import KERNELS, NAN, SPARSE_SHAPES, SUMMED, any_sparse, sparse
from zenps.errors import ProtocolError, TensorError
from zenps.worker.encode.transforms import ByElement, Densified, ToHost, wire_transforms

# A dense tensor of the others does not fit into memory.
SMALL_SHAPES = [(outer, dense) for outer, dense in SPARSE_SHAPES if torch.Size(outer).numel() <= 10_000]


@settings(deadline=None, max_examples=100)
@given(
    shape=st.sampled_from(SPARSE_SHAPES),
    nnz=st.sampled_from([0, 1, 5, 40]),
    dtype=st.sampled_from(SUMMED),
    seed=st.integers(0, 1 << 30),
)
def test_by_element_and_back_nothing_changes(
    shape: tuple[tuple[int, ...], tuple[int, ...]], nnz: int, dtype: torch.dtype, seed: int
) -> None:
    outer, dense = shape
    tensor = any_sparse(outer, dense, nnz, dtype, torch.Generator().manual_seed(seed))
    indices, values = tensor._indices().clone(), tensor._values().clone()
    transform = ByElement(tensor, KERNELS)
    travels = transform.apply(tensor)
    assert travels.is_coalesced()
    if torch.Size(dense).numel() > 1:
        assert travels.shape == (tensor.numel(),)
        assert travels._values().dim() == 1
    assert_same_bits(transform.undo(travels), reduce_in_rank_order([tensor], average=False))
    assert torch.equal(tensor._indices(), indices)
    assert torch.equal(tensor._values().nan_to_num(), values.nan_to_num())


def test_by_element_each_element_of_a_row_has_a_key() -> None:
    tensor = sparse([4, 1, 4], torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (9, 2))
    travels = ByElement(tensor, KERNELS).apply(tensor)
    assert travels.indices().tolist() == [[2, 3, 8, 9]]
    assert travels.values().tolist() == [3.0, 4.0, 6.0, 8.0]


def test_a_sum_by_element_may_have_the_rows_of_other_ranks() -> None:
    tensor = sparse([4], torch.ones(1, 2), (9, 2))
    total = sparse([0, 1, 8, 9], torch.arange(4.0), (18,)).coalesce()
    result = ByElement(tensor, KERNELS).undo(total)
    assert result.indices().tolist() == [[0, 4]]
    assert result.values().tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("elements", [[2, 3, 8], [3, 4], [2, 3, 4], [2, 8]])
def test_a_sum_of_parts_of_rows_is_refused(elements: list[int]) -> None:
    tensor = sparse([4], torch.ones(1, 2), (9, 2))
    total = sparse(elements, torch.ones(len(elements)), (18,)).coalesce()
    with pytest.raises(ProtocolError, match="elements that do not form whole rows of 2"):
        ByElement(tensor, KERNELS).undo(total)


def test_in_an_elastic_job_a_sum_lacks_elements_that_only_a_lost_rank_has_pushed() -> None:
    tensor = sparse([4], torch.ones(1, 2), (9, 2))
    total = sparse([1, 8, 9, 12], torch.arange(1.0, 5.0), (18,)).coalesce()
    result = ByElement(tensor, KERNELS, is_elastic=True).undo(total)
    assert result.is_coalesced()
    assert result.indices().tolist() == [[0, 4, 6]]
    assert result.values().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 0.0]]


@settings(deadline=None, max_examples=100)
@given(
    shape=st.sampled_from(SMALL_SHAPES),
    nnz=st.sampled_from([0, 1, 5, 40]),
    dtype=st.sampled_from(SUMMED),
    seed=st.integers(0, 1 << 30),
)
def test_a_densified_tensor_comes_back_with_the_rows_that_are_not_zero(
    shape: tuple[tuple[int, ...], tuple[int, ...]], nnz: int, dtype: torch.dtype, seed: int
) -> None:
    outer, dense = shape
    tensor = any_sparse(outer, dense, nnz, dtype, torch.Generator().manual_seed(seed))
    transform, summed = Densified(tensor, KERNELS), reduce_in_rank_order([tensor], average=False)
    travels = transform.apply(tensor)
    assert (travels.layout, travels.shape, travels.dtype) == (torch.strided, tensor.shape, dtype)
    result = transform.undo(travels)
    assert (result.shape, result.dtype, result.sparse_dim()) == (tensor.shape, dtype, tensor.sparse_dim())
    assert result.is_coalesced()
    rows = summed.values().reshape(summed._nnz(), torch.Size(dense).numel())
    kept = (rows != 0).any(1)
    assert torch.equal(result.indices(), summed.indices()[:, kept])
    assert torch.equal(result.values().nan_to_num(), summed.values()[kept].nan_to_num())


def test_a_densified_tensor_has_lost_which_zeros_were_touched() -> None:
    tensor = sparse([1, 3, 5], torch.tensor([[0.0, 0.0], [NAN, 0.0], [-0.0, 2.0]]), (9, 2))
    transform = Densified(tensor, KERNELS)
    assert transform.undo(transform.apply(tensor)).indices().tolist() == [[3, 5]]


@pytest.mark.parametrize("row", [-1, 10, 12, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize("columns", [1, 2, 3, 4])
@pytest.mark.parametrize("transform", [ByElement, Densified])
def test_rows_outside_the_tensor_are_refused_before_they_are_written(
    transform: type[ByElement | Densified], row: int, columns: int
) -> None:
    tensor = sparse([row], torch.ones(1, columns), (10, columns))
    with pytest.raises(TensorError, match="expected 0 to 9;"):
        transform(tensor, KERNELS).apply(tensor)


@pytest.mark.parametrize("transform", [ByElement, Densified])
def test_an_index_outside_its_own_dimension_is_refused(transform: type[ByElement | Densified]) -> None:
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0], [30]]), torch.ones(1, 5), (20, 30, 5), check_invariants=False
    )
    with pytest.raises(TensorError, match=r"sparse indices outside the shape \(20, 30\)"):
        transform(tensor, KERNELS).apply(tensor)


class OnDevice:
    """A sparse tensor of the CPU that says it is not there."""

    is_cpu = False

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize("transform", [ByElement, Densified])
@pytest.mark.parametrize("indices", [[[50]], [[-1]], [[0], [5]], [[10], [0]], [[-1], [2]]])
def test_on_a_device_indices_are_checked_before_anything_is_written_by_them(
    transform: type[ByElement | Densified], indices: list[list[int]]
) -> None:
    shape = (50, 3) if len(indices) == 1 else (10, 5, 3)
    tensor = torch.sparse_coo_tensor(torch.tensor(indices), torch.ones(1, 3), shape, check_invariants=False)
    with pytest.raises(TensorError, match="expected 0 to 49"):
        transform(tensor, KERNELS).apply(cast(Tensor, OnDevice(tensor)))


def test_on_a_device_all_rows_of_the_shape_are_densified() -> None:
    empty = torch.zeros(0, 3).to_sparse(1)
    for tensor in (any_sparse((7, 11), (2,), 40, torch.float32, torch.Generator()), empty):
        densified = Densified(tensor, KERNELS).apply(cast(Tensor, OnDevice(tensor)))
        assert torch.equal(densified.nan_to_num(), tensor.to_dense().nan_to_num())


def test_a_tensor_goes_to_the_host_and_back() -> None:
    """A device that has no data stands in for a GPU: only the way back can be seen here."""
    tensor = torch.ones(3, requires_grad=True)
    transform = ToHost(torch.device("cpu"))
    travels = transform.apply(tensor)
    assert (travels.device.type, travels.requires_grad, travels.tolist()) == ("cpu", False, [1.0] * 3)
    assert transform.undo(travels) is travels
    assert ToHost(torch.device("meta")).undo(travels).device.type == "meta"


@pytest.mark.parametrize(("keys", "expected"), [("rows", None), ("elements", ByElement), ("none", Densified)])
def test_schemes_transform_sparse_tensors_alone(
    keys: Literal["rows", "elements", "none"], expected: type[ByElement | Densified] | None
) -> None:
    table = sparse(torch.tensor([1]), torch.ones(1, 3), (4, 3))
    made = [type(transform) for transform in wire_transforms(keys, table, KERNELS)]
    assert made == ([] if expected is None else [expected])
    assert wire_transforms(keys, torch.ones(4, 3), KERNELS) == []
