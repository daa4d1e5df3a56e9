"""Buckets: which parameters a rank says it has a gradient for."""

from __future__ import annotations

import math
from typing import NamedTuple

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
    bucket = Bucket("b", (used, unused))
    used.grad = torch.ones(2, 3)
    assert presence(bucket) == [1.0, 0.0]
    used.grad = None
    assert presence(bucket) == [0.0, 0.0], "whatever it had before: the residual may be another rank's"


def test_a_parameter_whose_residual_may_be_pushed_is_present_unless_it_is_frozen() -> None:
    """Else weight decay and the optimizer's state would go on without gradients."""
    first, second = (Parameter(torch.ones(2, 3)) for _ in range(2))
    bucket = Bucket("b", (first, second))
    residual = torch.zeros(14)
    residual[7] = 1  # of the second
    assert presence(bucket, residual) == [0.0, 1.0]
    second.requires_grad_(False)
    assert presence(bucket, residual) == [0.0, 0.0]
    first.grad = torch.ones(2, 3)
    assert presence(bucket, residual) == [1.0, 0.0]


def test_norms_are_clipped_together() -> None:
    first, second = (Parameter(torch.ones(2, 3)) for _ in range(2))
    buckets = [Bucket("a", (first,)), Bucket("b", (second,))]
    assert clip_factor(buckets, 1.0) == 1.0, "no gradient"
    first.grad, second.grad = 3 * torch.ones(2, 3), 4 * torch.ones(2, 3)
    norm = 5 * math.sqrt(6)
    assert clip_factor(buckets, 2 * norm) == 1.0
    assert clip_factor(buckets, norm / 2) == pytest.approx(0.5)
    assert buckets[1].fused(0.5).tolist() == [2.0] * 6 + [1.0]


def test_the_norm_of_a_table_that_was_tied_to_a_dense_layer_is_that_of_its_rows_added_up() -> None:
    table, layer = Parameter(torch.ones(4, 1)), Parameter(torch.ones(1, 1))
    bucket = Bucket("a", (table, layer))
    rows = torch.tensor([[2, 2, 1]])
    table.grad = torch.sparse_coo_tensor(rows, torch.ones(3, 1), (4, 1), check_invariants=True)
    layer.grad = torch.full((1, 1), 2.0)
    assert clip_factor([bucket], 1.5) == pytest.approx(0.5)
    assert bucket.fused(0.5).tolist() == [0.0, 0.5, 1.0, 0.0, 1.0, 1.0, 1.0]
    table.grad = torch.empty(0, 1, 1).new_zeros((4, 1)).to_sparse(1)
    assert clip_factor([bucket], 1.0) == pytest.approx(0.5), "without any row"


def test_presence_elements_begin_runs_of_their_own() -> None:
    """A common scale would round 1 to 0 beside large gradients."""
    first, second, unused = Parameter(torch.ones(2, 3)), Parameter(torch.ones(3)), Parameter(torch.ones(2))
    first.grad, second.grad = torch.full((2, 3), 900.0), torch.full((3,), 800.0)
    bucket = Bucket("b", (first, second, unused), run=4)
    fused = bucket.fused(0.5)
    assert fused.tolist() == [450.0] * 6 + [400.0] * 3 + [0.0] * 3 + [1.0, 0.0, 0.0, 0.0] * 2 + [0.0] * 4
    assert bucket.parts == ([(0, 6), (6, 9), (9, 11)], slice(12, 24, 4))
    assert bucket.exact == ((12, 24),)
    bucket.spread(fused)
    assert first.grad.tolist() == [[450.0] * 3] * 2
    assert second.grad.tolist() == [400.0] * 3
    assert unused.grad is None


def test_buckets_are_filled_up_to_the_limit_by_parameters_of_a_kind() -> None:
    """One that is larger than the limit is alone, and what comes after does not fill up those before."""
    sizes = {"a": 3, "b": 9, "c": 1, "d": 3, "e": 1}
    names = {Parameter(torch.ones(size)): name for name, size in sizes.items()}
    names[Parameter(torch.ones(1, dtype=torch.float64))] = "x"
    names[Parameter(torch.ones(1))] = "f"
    buckets = fuse("prefix", names, 4 * 4, 1)
    found = ["".join(names[each] for each in bucket.parameters) for bucket in buckets]
    assert found == ["a", "b", "cd", "ef", "x"]
    assert [bucket.name for bucket in buckets] == [f"prefix/{number}" for number in range(5)]


def test_parameters_of_one_dimension_are_never_sparsified() -> None:
    matrix, vector, other = Parameter(torch.ones(2, 3)), Parameter(torch.ones(3)), Parameter(torch.ones(4, 2))
    buckets = fuse("b", [matrix, vector, other], 1 << 20, 1, sparsifies=True)
    assert [(bucket.parameters, bucket.is_sparsifiable) for bucket in buckets] == [
        ([matrix, other], True),
        ([vector], False),
    ]
    (whole,) = fuse("b", [matrix, vector, other], 1 << 20, 1)
    assert not whole.is_sparsifiable


@pytest.mark.parametrize("fused", [False, True])
def test_averages_have_the_layout_of_their_parameters(fused: bool) -> None:
    """Fused optimizers pair elements by their place in memory."""
    image = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    parameters = [Parameter(each.clone()) for each in (image, torch.randn(4, 3).t(), torch.randn(3, 4))]
    alone = [Parameter(each.detach().clone()) for each in parameters]
    assert [each.stride() for each in alone] == [(12, 1, 6, 3), (1, 3), (4, 1)]
    bucket = Bucket("b", parameters)
    for parameter, other in zip(parameters, alone, strict=True):
        parameter.grad = other.grad = torch.randn_like(other)
    bucket.spread(bucket.fused())
    for each in (parameters, alone):
        torch.optim.Adam(each, lr=0.1, fused=fused).step()
    for parameter, other in zip(parameters, alone, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter, other)


class Streams:
    """Those of a GPU: which one is current, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "main"
        self.asked: list[tuple[str, ...]] = []
        streams = self

        class Stream(NamedTuple):
            name: str

            def wait_stream(self, other: Stream) -> None:
                streams.asked.append((self.name, "waits for", other.name))

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            streams.asked.append((stream.name, "reads", str(tuple(tensor.shape))))

        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(self.current))
        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)


def test_gradients_of_other_streams_are_waited_for_before_they_are_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams(monkeypatch)
    first, second, sparse = Parameter(torch.ones(2)), Parameter(torch.ones(3)), Parameter(torch.ones(4, 1))
    bucket = Bucket("b", (first, second, sparse))
    assert not bucket.is_on_gpu
    first.grad, second.grad, sparse.grad = torch.ones(2), torch.ones(3), torch.ones(4, 1).to_sparse(1)
    for stream in ("main", "side", "main"):
        streams.current = stream
        bucket.note_stream()
    assert bucket.fused().tolist() == [1.0] * (2 + 3 + 4 + 3)
    parts = ("(2,)", "(3,)", "(1, 4)", "(4, 1)")
    assert streams.asked == [("main", "waits for", "side"), *(("main", "reads", part) for part in parts)]
    streams.asked.clear()
    bucket.fused()
    bucket.note_stream()
    bucket.fused()
    assert not streams.asked, "a single stream works in order"
