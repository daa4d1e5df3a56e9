"""The sum on one host, in pieces and threads: the bits of a server's, whatever the pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.reference import assert_same_bits
from zenps.buffers import BufferPool
from zenps.kernels.cpu import CpuKernels
from zenps.worker.backends.hierarchical import adder as sums
from zenps.worker.backends.hierarchical.adder import Adder
from zenps.worker.backends.hierarchical.transfer import Form, Payload
from zenps.worker.core.pending import LeftError

KERNELS = CpuKernels(BufferPool(keep_bytes=0))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NO_ROWS = torch.empty(0, dtype=torch.int64)


@pytest.fixture(scope="module")
def adder() -> Iterator[Adder]:
    adder = Adder(KERNELS, ranks=3)
    yield adder
    adder.close()


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CHUNK_BYTES", 64)


def put_together(adder: Adder, pieces: list[Payload], form: Form) -> Payload:
    rows = sum(len(piece.rows) for piece in pieces)
    target = form.view(torch.empty(form.size_bytes(rows), dtype=torch.uint8), rows)
    adder.copy(pieces, target)
    return target


@given(data=st.data())
@settings(deadline=None)
def test_sparse(adder: Adder, data: st.DataObject) -> None:
    size, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    dtype, divisor = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, size]))
    keys = st.lists(st.integers(0, 60), unique=True).map(sorted)
    parts = []
    for rank in range(size):
        rows = torch.tensor(data.draw(keys), dtype=torch.int64)
        generator = torch.Generator().manual_seed(rank)
        parts.append(Payload(rows, torch.randn((len(rows), columns), generator=generator).to(dtype)))
    form = Form(torch.Size((61, columns)), dtype, 1)
    pieces = adder.add(parts, form, divisor)
    whole = put_together(adder, pieces, form)
    rows, values = KERNELS.aggregate(parts, divisor)
    assert torch.equal(whole.rows, rows)
    assert_same_bits(whole.values, values)


def test_sparse_in_several_pieces(adder: Adder) -> None:
    parts = [
        Payload(torch.arange(first, 1000, 3), torch.ones(len(range(first, 1000, 3)), 2)) for first in range(3)
    ]
    pieces = adder.add(parts, Form(torch.Size((1000, 2)), torch.float32, 1), 1)
    assert len(pieces) > 50
    assert max(len(piece.rows) for piece in pieces) < 5 * 1000 / len(pieces)
    assert torch.equal(torch.cat([piece.rows for piece in pieces]), torch.arange(1000))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 7, 1000])
def test_dense(adder: Adder, dtype: torch.dtype, elements: int) -> None:
    values = torch.randn((3, elements), generator=torch.Generator().manual_seed(0)).to(dtype)
    form = Form(torch.Size((elements,)), dtype, -1)
    pieces = adder.add([Payload(NO_ROWS, each) for each in values], form, 3)
    wide = values.double() if dtype == torch.float64 else values.float()
    expected = (((wide[0] + wide[1]) + wide[2]) / 3).to(dtype)
    assert_same_bits(put_together(adder, pieces, form).values, expected)


def test_nothing_begins_once_threads_have_ended() -> None:
    adder = Adder(KERNELS, ranks=2)
    adder.close()
    part = Payload(torch.arange(3), torch.ones(3, 2))
    with pytest.raises(LeftError, match="about to end"):
        adder.add([part, part], Form(torch.Size((3, 2)), torch.float32, 1), 1)


def test_a_system_without_a_thread_to_spare_does_not_end_the_process(
    adder: Adder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(adder._executor, "map", refuse)
    part = Payload(torch.arange(3), torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="new thread") as raised:
        adder.add([part, part], Form(torch.Size((3, 2)), torch.float32, 1), 1)
    assert not isinstance(raised.value, LeftError)
