"""Recorder of pushed rows for ``zenps plan``: what it writes down, and how that ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from zenps.observe.recording import Header, Push, read
from zenps.worker.recorder import Recorder, open_recorder


def sparse(rows: list[int]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), torch.ones(len(rows), 4), (10, 4), check_invariants=True
    )


def recorded(folder: Path) -> list[Push]:
    return [push for _, push in read(folder / "worker3")]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    found = open_recorder(3, 8, {"ZENPS_PLAN_TRACE": str(tmp_path), "ZENPS_PLAN_STEPS": "2"})
    assert found is not None
    return found


def test_rows_are_sorted_and_different(recorder: Recorder, tmp_path: Path) -> None:
    recorder.note(sparse([7, 2, 7, 0]), "t")
    recorder.note(sparse([]), "t")
    first, second = recorded(tmp_path)
    assert (first.tensor, first.step, first.shape, first.sparse_dims, first.item_bytes) == (
        "t",
        0,
        (10, 4),
        1,
        4,
    )
    assert (first.row_numbers().tolist(), first.pushed) == ([0, 2, 7], 3)
    assert (second.step, second.row_numbers().tolist()) == (1, [])
    assert [header for header, _ in read(tmp_path / "worker3")] == 2 * [Header(rank=3, workers=8)]


def test_several_sparse_dimensions_number_rows_together(recorder: Recorder, tmp_path: Path) -> None:
    indices = torch.tensor([[0, 1, 1], [2, 0, 0]])
    recorder.note(torch.sparse_coo_tensor(indices, torch.ones(3).half(), (2, 3), check_invariants=True), "t")
    (push,) = recorded(tmp_path)
    assert (push.row_numbers().tolist(), push.columns, push.item_bytes) == ([2, 3], 1, 2)


def test_of_dense_tensors_what_is_not_zero_is_counted(recorder: Recorder, tmp_path: Path) -> None:
    recorder.note(torch.tensor([[0.0, 1.0], [0.0, 2.0]], requires_grad=True), "t")
    (push,) = recorded(tmp_path)
    assert (push.shape, push.sparse_dims, push.pushed, push.rows) == ((2, 2), 0, 2, b"")


def test_integers_are_left_out(recorder: Recorder, tmp_path: Path) -> None:
    for _ in range(5):
        recorder.note(torch.ones(2, dtype=torch.int64), "kinds")
    assert recorded(tmp_path) == []


def test_it_ends_the_process_when_it_has_enough(recorder: Recorder, tmp_path: Path) -> None:
    for _ in range(2):
        recorder.note(sparse([1]), "a")
        recorder.note(sparse([1]), "b")
    for _ in range(2):  # one who catches it gets it again
        with pytest.raises(SystemExit) as ended:
            recorder.note(sparse([1]), "a")
        assert ended.value.code == 0
    assert len(recorded(tmp_path)) == 4


def test_nobody_asked() -> None:
    assert open_recorder(0, 1, {}) is None
