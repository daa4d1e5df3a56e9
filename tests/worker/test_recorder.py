"""Recorder of pushed rows for ``zenps plan``: what it writes down, and how that ends."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.config.settings import Config
from zenps.observe.metrics import WorkerMetrics
from zenps.observe.recording import Header, Push, read
from zenps.wire.messages import Member, View
from zenps.worker.backends.base import Backend, Session
from zenps.worker.backends.servers import ServerBackend
from zenps.worker.core.pending import Pending, Signal, Waiting
from zenps.worker.core.request import Options, Purpose, Request
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.transfer import Brought
from zenps.worker.recorder import Recorder, open_recorder
from zenps.worker.world import ClusterWorld


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


class Everything(Backend):
    """Takes all requests."""

    partition = "none"

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, request: Request) -> Pending:
        self.begun.append(request.name)
        waiting = Waiting(Signal(), 0.0, Statistics(WorkerMetrics(CollectorRegistry())), Spans())
        return Pending(request.name, request.options, Brought(), Progress(0), waiting)

    def close(self) -> None: ...


def test_what_ranks_tell_one_another_is_left_out_whatever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZENPS_PLAN_TRACE", str(tmp_path))
    monkeypatch.setenv("ZENPS_PLAN_STEPS", "1")
    workers = tuple(Member("worker", rank, "box", 50 + rank, "", "") for rank in range(8))
    lease = SimpleNamespace(view=View(1, 3, workers, (), bytes(8192), 1))
    session, backend = SimpleNamespace(config=Config(), lease=lease), Everything()
    world = ClusterWorld(cast(Session, session), cast(ServerBackend, None), backend, 0, ExitStack())
    purposes: tuple[Purpose, ...] = ("control", "broadcast", "value", "gradient")
    for purpose in purposes:
        world.begin(Request(sparse([1]), purpose, Options(purpose=purpose)))
    assert backend.begun == list(purposes)
    assert [push.tensor for push in recorded(tmp_path)] == ["value", "gradient"]
    with pytest.raises(SystemExit):
        world.begin(Request(sparse([1]), "value"))
    assert backend.begun == list(purposes), "this one is not pushed"


def test_nobody_asked() -> None:
    assert open_recorder(0, 1, {}) is None
