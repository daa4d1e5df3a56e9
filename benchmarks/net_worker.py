"""One worker of ``bench_net.py``: measures one scheme on every workload, between shaped links.

Each call starts at a barrier, on a fresh gradient, and takes as long as its slowest rank. The shapers of the
host's link count the bytes of a step. Before a scheme is timed, its sum must be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from hosts import Host
from processors import now
from torch import Tensor
from workloads import WORKLOADS, Workload

import zenps as zps
from zenps.worker.backends.choice import ROUNDS
from zenps.worker.core.request import Options, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.process import PROCESS

GLOO: Final = "gloo dense"
"""PyTorch's ``all_reduce``, named like a scheme; making the gradient dense is not timed."""

BFLOAT16: Final = "zenps-bfloat16"
"""``zenps`` with ``sync.values = "bfloat16"``, named like a scheme."""

QUANTIZE_ERROR: Final = 2**-8
"""Greatest error of its sums: each worker rounds its rows once, and the server the sum, by at most 2⁻⁹."""
EXACT_ERROR: Final = 1e-6
"""Greatest error of other sums: up to a thousand duplicates are added in any order."""

WARM_UP_STEPS: Final = 2
"""Untimed steps. The first builds tables of positions, and is checked; the last tells a step's duration."""

SLOW_SECONDS: Final = 4.0
"""If the last untimed step takes longer than this, it is the only measurement."""

ENOUGH_SECONDS: Final = 8.0
"""The budget of the timed steps, of which there are at least three."""
FEWEST_STEPS: Final = 3

UNKNOWN: Final = "unknown"
"""The commit of code that is in no checkout, or of measurements that did not record it."""

TIMEOUT: Final = timedelta(minutes=3)

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one cluster's workers.

    Attributes:
        scheme: what ``sync.scheme`` may be, :data:`GLOO` or :data:`BFLOAT16`.
        workers: one on each host.
        mbit: of each link in each direction, in Mbit/s.
        workloads: their names.
        scale: how many times the rows of each.
        steps: that are timed at most.
    """

    scheme: str
    workers: int
    mbit: float
    workloads: tuple[str, ...]
    scale: float
    steps: int

    def workload(self, name: str) -> Workload:
        """The workload of that name, in the size of this task."""
        return WORKLOADS[name].resized(self.scale)


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One scheme on one workload.

    Attributes:
        warm_up_steps: what came before.
        seconds: of the slowest rank, by step.
        out_bytes, in_bytes: by host, what left and reached it, headers included; the mean over steps.
        pushed_bytes, pulled_bytes: by worker and step, as ``zenps.stats()`` has it; 0 for :data:`GLOO`.
        stolen: of the processor time that the machine wanted meanwhile, the share that others got.
        commit: of the code that was measured.
    """

    workload: str
    scheme: str
    workers: int
    mbit: float
    warm_up_steps: int
    seconds: list[float]
    out_bytes: list[float]
    in_bytes: list[float]
    pushed_bytes: float
    pulled_bytes: float
    stolen: float
    commit: str = UNKNOWN

    @property
    def key(self) -> tuple[str, str, int, float]:
        """The key of a measurement, unique in a report."""
        return self.workload, self.scheme, self.workers, self.mbit


class Step(NamedTuple):
    """One call on this rank."""

    seconds: float
    out_bytes: int
    in_bytes: int
    pushed_bytes: int
    pulled_bytes: int


def work(task: Task, rank: int, host: Host, sets: Sequence[str], store: str, output: Path) -> None:
    """Measures. Rank 0 writes a list of :class:`Measurement` as JSON.

    Args:
        rank, host: this worker's.
        sets: settings of the cluster.
        store: where the ranks find one another for gloo, ``tcp://host:port``.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=task.workers, timeout=TIMEOUT)
    if task.scheme != GLOO:
        zps.init(sets=sets)
    measurements = [_measure(task, name, host) for name in task.workloads]
    if rank == 0:
        output.write_bytes(msgspec.json.encode(measurements))
    dist.barrier()
    zps.shutdown()
    dist.destroy_process_group()


def _measure(task: Task, name: str, host: Host) -> Measurement:
    workload, rank = task.workload(name), dist.get_rank()
    call = _all_reduce(workload) if task.scheme == GLOO else _push_pull(name)
    result, _ = _step(call, workload.gradient(rank, 0), host)
    _check(result, workload, QUANTIZE_ERROR if task.scheme == BFLOAT16 else EXACT_ERROR)
    del result
    warm_up_steps = count_warm_up_steps(task.scheme)
    for step in range(1, warm_up_steps - 1):
        _step(call, workload.gradient(rank, step), host)
    begin = now()
    _, last = _step(call, workload.gradient(rank, warm_up_steps - 1), host)
    count = count_steps(float(_over_ranks([last.seconds]).max()), task.steps)
    gradients = (workload.gradient(rank, warm_up_steps + step) for step in range(count))
    steps = [_step(call, gradient, host)[1] for gradient in gradients] or [last]
    by_rank = _over_ranks(steps)  # rank × step × number
    mean = by_rank.mean(dim=1)
    return Measurement(
        workload=name,
        scheme=task.scheme,
        workers=task.workers,
        mbit=task.mbit,
        warm_up_steps=warm_up_steps - (0 if count else 1),
        seconds=by_rank[:, :, 0].amax(dim=0).tolist(),
        out_bytes=mean[:, 1].tolist(),
        in_bytes=mean[:, 2].tolist(),
        pushed_bytes=float(mean[:, 3].mean()),
        pulled_bytes=float(mean[:, 4].mean()),
        stolen=now().stolen_since(begin),
    )


def count_warm_up_steps(scheme: str) -> int:
    """The number of untimed steps; for auto, until it has chosen."""
    return WARM_UP_STEPS + (ROUNDS if scheme == "auto" else 0)


def count_steps(seconds: float, most: int) -> int:
    """The number of timed steps, if the last untimed one took ``seconds``; 0: that one is the measurement."""
    if seconds > SLOW_SECONDS:
        return 0
    return min(most, max(FEWEST_STEPS, int(ENOUGH_SECONDS / seconds)))


def _push_pull(name: str) -> Callable[[Tensor], Callable[[], Tensor]]:
    options = Options(purpose="gradient", residuals=Residuals())
    return lambda gradient: lambda: PROCESS.world.begin(Request(gradient, name, options)).wait()


def _all_reduce(workload: Workload) -> Callable[[Tensor], Callable[[], Tensor]]:
    dense = torch.empty(workload.shape)

    def prepare(gradient: Tensor) -> Callable[[], Tensor]:
        dense.zero_().index_add_(0, gradient._indices()[0], gradient._values())
        return call

    def call() -> Tensor:
        dist.all_reduce(dense)
        return dense

    return prepare


def _step(
    prepare: Callable[[Tensor], Callable[[], Tensor]], gradient: Tensor, host: Host
) -> tuple[Tensor, Step]:
    call, stats = prepare(gradient), zps.stats() if zps.is_initialized() else None
    out_before, in_before = host.carried_bytes()
    dist.barrier()
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    dist.barrier()
    out_after, in_after = host.carried_bytes()
    pushed = pulled = 0
    if stats is not None:
        now = zps.stats()
        pushed, pulled = now.pushed_bytes - stats.pushed_bytes, now.pulled_bytes - stats.pulled_bytes
    return result, Step(seconds, out_after - out_before, in_after - in_before, pushed, pulled)


def _check(result: Tensor, workload: Workload, most_error: float) -> None:
    """Raises AssertionError where ``result`` is not the sum of step 0, or not the same on all ranks.

    Args:
        most_error: of the sum, relative, by Frobenius' norm.
    """
    if result.is_sparse:
        result = result.coalesce()
    else:
        (rows,) = (result != 0).view(workload.rows, -1).any(1).nonzero(as_tuple=True)
        result = torch.sparse_coo_tensor(
            rows.unsqueeze(0), result[rows], workload.shape, is_coalesced=True, check_invariants=False
        )
    if dist.get_rank() == 0:
        gradients = [workload.gradient(rank, 0) for rank in range(dist.get_world_size())]
        wanted = torch.sparse_coo_tensor(
            torch.cat([gradient._indices() for gradient in gradients], dim=1),
            torch.cat([gradient._values() for gradient in gradients]),
            workload.shape,
            check_invariants=False,
        ).coalesce()
        assert torch.equal(result.indices(), wanted.indices()), f"{workload.name}: other rows than expected"
        error = float((result.values() - wanted.values()).norm() / wanted.values().norm())
        assert error <= most_error, f"{workload.name}: wrong by {error:.1e}, expected {most_error:.1e}"
    numbers = result.indices().double().sum().item(), result.values().double().abs().sum().item()
    digests = _over_ranks(numbers)
    torch.testing.assert_close(digests, digests[:1].expand_as(digests), rtol=1e-6, atol=0)


def _over_ranks(numbers: object) -> Tensor:
    """Each rank's ``numbers``, stacked by rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    stacked = mine.new_empty(dist.get_world_size(), *mine.shape)
    _all_gather(stacked.view(-1, *mine.shape[1:]), mine)
    return stacked
