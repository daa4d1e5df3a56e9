"""What a push_pull must return, computed the slow and obvious way in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduce_in_rank_order(tensors: Sequence[Tensor], average: bool) -> Tensor:
    """The sum, or average, of one tensor per rank: added in order 0, 1, …, rounded once at the end."""
    if tensors[0].is_sparse:
        return _reduce_sparse(tensors, average)
    total = _dequantized(tensors[0]).clone()
    for tensor in tensors[1:]:
        total += _dequantized(tensor)
    return _divided(total, len(tensors), average).to(tensors[0].dtype)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal in layout, shape, dtype and every bit; but a NaN equals any other."""
    assert (got.layout, got.shape, got.dtype) == (expected.layout, expected.shape, expected.dtype)
    if got.is_sparse:
        assert got.is_coalesced()
        assert got.sparse_dim() == expected.sparse_dim()
        assert torch.equal(got.indices(), expected.indices())
        got, expected = got.values(), expected.values()
    assert got.shape == expected.shape
    bits = _BITS[got.dtype.itemsize]
    same = got.contiguous().view(bits) == expected.contiguous().view(bits)
    if got.dtype.is_floating_point:
        same |= got.isnan() & expected.isnan()
    assert same.all(), f"{(~same).sum()} of {same.numel()} elements differ:\n{got}\n{expected}"


def _reduce_sparse(tensors: Sequence[Tensor], average: bool) -> Tensor:
    totals: dict[tuple[int, ...], Tensor] = {}
    for tensor in tensors:
        for index, row in _compacted(tensor).items():
            totals[index] = totals[index] + _dequantized(row) if index in totals else _dequantized(row)
    first = tensors[0]
    indices = sorted(totals)
    rows = [_divided(totals[index], len(tensors), average).to(first.dtype) for index in indices]
    values = torch.stack(rows) if rows else torch.empty((0, *first._values().shape[1:]), dtype=first.dtype)
    as_tensor = torch.tensor(indices, dtype=torch.int64).reshape(len(indices), first.sparse_dim()).t()
    return torch.sparse_coo_tensor(as_tensor, values, first.shape, is_coalesced=True, check_invariants=True)


def _compacted(tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
    """One rank's rows: duplicates added in order of occurrence, then rounded to travel."""
    sums: dict[tuple[int, ...], Tensor] = {}
    for index, row in zip(tensor._indices().t().tolist(), tensor._values(), strict=True):
        key = tuple(index)
        sums[key] = sums[key] + _dequantized(row) if key in sums else _dequantized(row)
    return {key: row.to(tensor.dtype) for key, row in sums.items()}


def _dequantized(tensor: Tensor) -> Tensor:
    return tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype))


def _divided(total: Tensor, size: int, average: bool) -> Tensor:
    return total / size if average else total
