"""What ranks tell one another before they exchange a tensor."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from torch import Tensor

from zenps.worker.backends.negotiation import description, entries_of, table_of
from zenps.worker.core.request import Options


def said(ranks: int) -> Tensor:
    """The sum of all tables, in which rank r has r rows in its round 100 + r."""
    return torch.stack([table_of(100 + rank, rank, rank, ranks) for rank in range(ranks)]).sum(0)


def calls_of(ranks: int) -> int:
    """How many functions are called to read what so many ranks say."""
    table, calls = said(ranks), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        entries_of(table)
    finally:
        sys.setprofile(None)
    return calls


def test_numbers_and_rows_are_those_of_each_rank() -> None:
    assert entries_of(said(5)) == ([100, 101, 102, 103, 104], [0, 1, 2, 3, 4])


def test_what_many_ranks_say_is_read_without_a_loop() -> None:
    """It took 4 ms of Python for a thousand ranks, for each tensor of a step."""
    assert calls_of(2) == calls_of(200)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(), "dense float32 (3,), summed among workers"),
        (Options(average=True), "dense float32 (3,), averaged among workers"),
        (Options(given="sparse float32 (3,)"), "sparse float32 (3,), summed among workers"),
    ],
)
def test_the_callers_tensor_is_described(options: Options, expected: str) -> None:
    assert description(torch.zeros(3), options) == expected
