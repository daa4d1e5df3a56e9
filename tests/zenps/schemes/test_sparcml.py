"""Which of SparCML's three algorithms is taken."""

from __future__ import annotations

import pytest

from zenps.schemes.builtin.sparcml import choose, is_worth_dense

ROWS = 4_000_000
ROW_BYTES = 64


@pytest.mark.parametrize(
    ("share", "ranks", "chosen"),
    [
        (0.00002, 8, "recursive doubling"),  # latency counts
        (0.02, 8, "recursive doubling"),  # nearly disjoint: nothing is sent twice
        (0.2, 8, "split"),  # 0.83 of all rows together
        (0.2, 2, "recursive doubling"),  # one direct exchange
        (0.5, 8, "dense split"),
        (0.9, 1, "recursive doubling"),  # nothing to exchange
    ],
)
def test_choice(share: float, ranks: int, chosen: str) -> None:
    assert choose(ROWS, ROW_BYTES, [share * ROWS] * ranks) == chosen


@pytest.mark.parametrize(("columns", "least"), [(1, 500), (3, 750), (15, 938)])
def test_switch_to_dense_is_where_indices_make_up_for_the_rest(columns: int, least: int) -> None:
    """The paper's δ: half of all rows where index and value take as much, and more with wider rows."""
    assert not is_worth_dense(least - 1, 1000, 4 * columns)
    assert is_worth_dense(least, 1000, 4 * columns)


def test_a_table_without_rows() -> None:
    assert choose(0, ROW_BYTES, [0] * 4) == "dense split"
