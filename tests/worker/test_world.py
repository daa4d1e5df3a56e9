"""World of one worker: which requests it takes, records and refuses, and whose statistics it shows."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from zenps.codecs.base import ValueForm
from zenps.codecs.values import RUN
from zenps.config.settings import Config, SyncConfig
from zenps.errors import TensorError, UsageError
from zenps.observe.metrics import WorkerMetrics
from zenps.observe.recording import read
from zenps.partition.ring import rebalance
from zenps.schemes.registry import scheme_of
from zenps.wire.scheduler_messages import Member, View
from zenps.worker.backends.base import Backend, Session
from zenps.worker.backends.servers import ServerBackend
from zenps.worker.core.pending import Pending
from zenps.worker.core.request import Options, Purpose, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.spans import Spans
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.steps import Steps
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.core.waiting import Notifier, Waiting
from zenps.worker.encode.sharder import Sharder
from zenps.worker.recorder import open_recorder
from zenps.worker.world import ClusterWorld, LocalWorld

PURPOSES: tuple[Purpose, ...] = ("control", "broadcast", "value", "gradient")
WORKERS = tuple(Member("worker", rank, "box", 50 + rank, "", "") for rank in range(8))
SERVERS = tuple(Member("server", rank, "box", 70 + rank, f"tcp://box:{1 + rank}", "") for rank in range(2))
VIEW = View(1, 3, WORKERS, SERVERS, rebalance(None, [0, 1]).astype("<u2").tobytes(), 1)


class Everything(Backend):
    """Takes all requests."""

    partition = "parallel"

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, request: Request) -> Pending:
        self.begun.append(request.name)
        waiting = Waiting(Notifier(), 0.0, Statistics(WorkerMetrics(CollectorRegistry())), Spans())
        return Pending(request.name, request.options, SuppliedTransfer(), Progress(0), waiting)

    def close(self) -> None: ...


def make_session(config: Config, view: View = VIEW) -> Session:
    """Without a cluster: nothing can be sent."""
    metrics = WorkerMetrics(CollectorRegistry())
    fake = SimpleNamespace(
        config=config, lease=SimpleNamespace(view=view), rank=0, size=1, channel=None,
        statistics=Statistics(metrics), metrics=metrics, spans=Spans(), timeout_seconds=20.0,
        sparsification=None,
    )  # fmt: skip
    return cast(Session, fake)


def make_world(backend: Backend, view: View = VIEW, config: Config | None = None) -> ClusterWorld:
    session = make_session(config or Config(), view)
    recorder = open_recorder(view.rank, len(view.workers))
    return ClusterWorld(session, cast(ServerBackend, None), backend, None, recorder, 0, ExitStack())


def rows() -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (10, 4), check_invariants=True)


def test_only_tensors_of_the_training_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENPS_PLAN_TRACE", str(tmp_path))
    monkeypatch.setenv("ZENPS_PLAN_STEPS", "1")
    backend = Everything()
    world = make_world(backend)
    for purpose in PURPOSES:
        world.begin(Request(rows(), purpose, Options(purpose=purpose)))
    assert backend.begun == list(PURPOSES)
    assert [push.tensor for _, push in read(tmp_path / "worker3")] == ["value", "gradient"]
    with pytest.raises(SystemExit):
        world.begin(Request(rows(), "value"))
    assert backend.begun == list(PURPOSES), "this one is not pushed"


def test_what_cannot_be_synchronised_comes_to_no_backend() -> None:
    backend = Everything()
    world = make_world(backend)
    with pytest.raises(TensorError, match="dtype"):
        world.begin(Request(torch.ones(3, dtype=torch.bool), "weight"))
    with pytest.raises(UsageError, match="tensor name"):
        world.begin(Request(torch.ones(3), ""))
    assert backend.begun == []


def test_a_device_without_memory_is_an_error_that_names_the_tensor() -> None:
    class Full(Everything):
        def begin(self, request: Request) -> Pending:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TensorError, match="tensor 'weight': CUDA out of memory"):
        make_world(Full()).begin(Request(torch.ones(3), "weight"))


def test_a_joining_worker_has_to_get_the_state_of_the_job_first() -> None:
    backend = Everything()
    world = make_world(backend, structs.replace(VIEW, admitted=1))
    assert world.is_joining
    for call in (lambda: world.begin(Request(torch.ones(3), "weight")), world.barrier):
        with pytest.raises(UsageError, match=r"worker 3 has joined a running job.*TrainingState"):
            call()
    assert backend.begun == []
    world.is_joining = False
    world.begin(Request(torch.ones(3), "weight"))
    assert backend.begun == ["weight"]


@pytest.mark.parametrize(
    ("values", "consistency", "expected"),
    [
        ("same", "bsp", (1, False, 0, False)),
        ("float16", "ssp", (1, True, 3, False)),
        ("int8", "ds-sync", (RUN, True, 0, True)),
    ],
)
def test_what_optimizers_read_of_the_settings(
    values: ValueForm, consistency: Literal["bsp", "ssp", "ds-sync"], expected: tuple[int, bool, int, bool]
) -> None:
    sync = SyncConfig(values=values, consistency=consistency, staleness=3)
    world = make_world(Everything(), config=Config(sync=sync))
    got = (world.quantized_run, world.keeps_residuals, world.staleness, world.averages_models)
    assert got == expected


def test_names_with_a_number_sign_are_no_rounds_of_another_tensor() -> None:
    backend = Everything()
    make_world(backend).begin(Request(torch.ones(3), "weight#1"))
    assert backend.begun == ["weight##1"]


def test_what_a_device_still_prepares_is_pushed_before_others_are_waited_for() -> None:
    """They may wait for it."""
    calls: list[str] = []
    world = make_world(Everything())
    lease = SimpleNamespace(
        view=VIEW, barrier=lambda: calls.append("barrier"), admit=lambda: calls.append("admit"), joining=1
    )
    world._session = cast(Session, SimpleNamespace(lease=lease, spans=Spans(), timeout_seconds=20.0))
    world._servers = cast(ServerBackend, SimpleNamespace(flush=lambda until: calls.append("push")))
    world.barrier()
    world.admit()
    assert calls == ["push", "barrier", "push", "admit"]
    assert world.has_joining_workers()
    lease.joining = 0
    assert not world.has_joining_workers()


def test_statistics_are_a_copy_and_name_the_partition_of_the_backend() -> None:
    world = make_world(Everything())
    stats = world.stats()
    assert (stats.partition, stats.rounds) == ("parallel", 0)
    stats.rounds = 7
    assert world.stats().rounds == 0
    assert LocalWorld(Config()).stats().partition == "none"


@pytest.mark.parametrize(
    ("scheme", "partition", "expected"),
    [("zenps", "balanced", "balanced"), ("zenps", "centralized", "centralized"),
     ("omnireduce", "balanced", "parallel")],
)  # fmt: skip
def test_the_partition_is_that_of_the_scheme_or_of_the_settings(
    scheme: str, partition: str, expected: str
) -> None:
    config = Config(sync=SyncConfig(scheme=scheme, partition=partition))
    assert make_servers(config).partition == expected


def make_servers(config: Config) -> ServerBackend:
    session, served = make_session(config), scheme_of(config.sync.scheme)
    return ServerBackend(session, served, Sharder(config, served.wire, VIEW), Steps(session.metrics.steps))


@pytest.mark.parametrize(
    ("tensor", "purpose", "values", "is_kept"),
    [
        (rows(), "gradient", "int8", True),
        (torch.ones(3), "gradient", "bfloat16", True),
        (torch.ones(3), "gradient", "same", False),
        (torch.ones(3), "value", "int8", False),
        (torch.ones(3, dtype=torch.float64), "gradient", "int8", False),
        (torch.ones(0), "gradient", "int8", False),
    ],
)
def test_quantized_gradients_keep_residuals_under_their_name_on_the_wire(
    tensor: Tensor, purpose: Purpose, values: ValueForm, is_kept: bool
) -> None:
    config = Config(sync=SyncConfig(values=values))
    world = make_world(make_servers(config), config=config)
    request = Request(tensor, "weight#1", Options(purpose=purpose, residuals=Residuals()))
    assert world.residual_name(request) == ("weight##1" if is_kept else None)
    assert world.keeps_residuals == (values != "same")
    assert LocalWorld(config).residual_name(request) is None


def test_a_world_of_one_has_the_results_of_a_cluster_of_one() -> None:
    world, dense = LocalWorld(Config()), torch.ones(3, requires_grad=True)
    pending = world.begin(Request(dense, "weight", Options(average=True)))
    assert pending.done()
    result = pending.wait()
    assert torch.equal(result, dense)
    assert (result.requires_grad, result.data_ptr() == dense.data_ptr()) == (False, False)
    assert world.begin(Request(torch.ones(3, 2).t(), "transposed")).wait().is_contiguous()
    indices, values = torch.tensor([[4, 1, 4]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (9,), check_invariants=True)
    result = world.begin(Request(sparse, "rows")).wait()
    assert result.is_coalesced()
    assert (result.indices().tolist(), result.values().tolist()) == ([[1, 4]], [2.0, 4.0])
    with pytest.raises(TensorError):
        world.begin(Request(torch.ones(3, dtype=torch.bool), "weight"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_result_of_a_world_of_one_shares_no_memory_with_what_was_coalesced(device: str) -> None:
    """The meta device takes the way of a GPU."""
    given = torch.eye(4).to_sparse(1).to(device)
    assert given.is_coalesced()
    result = LocalWorld(Config())._reduce(Request(given, "rows")).wait()
    assert result.is_coalesced()
    given_memory, memory = (
        {each.untyped_storage()._cdata for each in (tensor._indices(), tensor._values())}
        for tensor in (given, result)
    )
    assert memory.isdisjoint(given_memory)
