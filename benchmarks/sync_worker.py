"""One worker of ``bench_sync.py``: synchronises the same gradients with ZenPS and with gloo, by turns.

Runs under ``zenps launch``. Rank 0 writes a :class:`Block` as JSON. Each timed call starts at a barrier,
and the time of a step is that of its slowest rank. The ways take turns within every step, so that other
load on the machine affects all of them alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import zenps as zps

OURS = "zenps"
WARM_UP_STEPS = 3
COUNTED_STEPS = 3
SMALL_BYTES = 1024
SMALL_TURNS, SMALL_CALLS = 10, 100

# torch 2.13 renamed it. all_gather, with its list of outputs, costs gloo one more copy.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Case(msgspec.Struct, frozen=True):
    """The gradient that every worker synchronises: a fresh embedding gradient in each step."""

    rows: int
    dim: int
    ids: int
    """Look-ups per worker and step, duplicates included."""
    skew: float
    """Ids are drawn as ``rand**skew * rows``: 1 is uniform, 5 is close to Zipf."""
    steps: int
    device: str = "cpu"
    """Where the gradients lie: "cpu", or "cuda", a GPU that all workers share."""


class Timing(msgspec.Struct):
    """The times of one way."""

    p50_seconds: float
    p95_seconds: float
    processor_seconds: float | None = None
    """Of one worker's process in a call, with all its threads: the mean over ranks, its median over calls.
    Servers are processes of their own. None in results from before it was measured."""


class Traffic(msgspec.Struct):
    """Means per worker and step, and the bytes that all processes together put on the wire."""

    unique_rows: float
    """Pushed, after duplicates were summed."""
    union_rows: float
    """Pulled: every row that any worker pushed."""
    pushed_bytes: float
    pulled_bytes: float
    wire_bytes: dict[str, int]
    """Per step, by way: the loopback device's counter, headers and acknowledgements included."""


class Block(msgspec.Struct):
    """All ways, measured by turns in one cluster."""

    table: dict[str, Timing]
    """The case's embedding gradient; a step takes as long as its slowest rank."""
    small: dict[str, Timing]
    """A dense float32 tensor of 1 KB, one call right after another; of the rank whose calls take longest."""
    traffic: Traffic
    imbalance: float
    """Rows pushed to the busiest server over the mean of all, on the worst rank."""


class Elapsed(NamedTuple):
    """Seconds of one call on one rank."""

    wall: float
    processor: float


class Way(NamedTuple):
    """A way to synchronise: ``call`` is timed, on the result of ``prepare``."""

    call: Callable[[Tensor], Tensor]
    prepare: Callable[[Tensor], Tensor] = lambda gradient: gradient


def main() -> None:
    case_json, gloo_store, output = sys.argv[1:]
    case = msgspec.json.decode(case_json, type=Case)
    torch.set_num_threads(1)
    zps.init()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{gloo_store}",
        rank=zps.rank(),
        world_size=zps.size(),
        timeout=timedelta(minutes=2),
    )
    block = measure(case)
    if zps.rank() == 0:
        Path(output).write_bytes(msgspec.json.encode(block))
    dist.barrier()
    dist.destroy_process_group()
    zps.shutdown()


def measure(case: Case) -> Block:
    """Every way on ``case``, after a check that all give the same sum."""
    ways = _table_ways(case)
    check(ways, _gradient(case, 0))
    timed_steps = WARM_UP_STEPS + case.steps
    elapsed = [_timed_by_turns(ways, _gradient(case, 1 + step)) for step in range(timed_steps)]
    traffic = _count(ways, [_gradient(case, 1 + timed_steps + step) for step in range(COUNTED_STEPS)])
    imbalance = float(_over_ranks([zps.stats().imbalance]).max())
    return Block(_summarise(ways, elapsed), _measure_small(case.device), traffic, imbalance)


def check(ways: dict[str, Way], gradient: Tensor) -> None:
    """Raises AssertionError if a way's sum differs from that of ZenPS."""
    ours = ways[OURS].call(gradient)
    for name, way in ways.items():
        theirs = way.call(way.prepare(gradient))
        if theirs.is_sparse:
            theirs = theirs.coalesce()
            assert torch.equal(ours.indices(), theirs.indices()), f"{name}: other rows than ours"
        else:
            theirs = theirs.sparse_mask(ours)
        # Sums of thousands of terms of size 1, added in other orders.
        torch.testing.assert_close(theirs.values(), ours.values(), rtol=1e-5, atol=2e-3)


def _gradient(case: Case, step: int) -> Tensor:
    """A gradient as that of ``nn.Embedding(sparse=True)``: unsorted, with duplicates."""
    generator = torch.Generator().manual_seed(step * zps.size() + zps.rank())
    drawn = torch.rand(case.ids, generator=generator, dtype=torch.float64)
    ids = (drawn**case.skew * case.rows).long()
    values = torch.randn(case.ids, case.dim, generator=generator)
    shape = (case.rows, case.dim)
    there = ids.unsqueeze(0).to(case.device), values.to(case.device)
    return torch.sparse_coo_tensor(*there, shape, check_invariants=False)


def _table_ways(case: Case) -> dict[str, Way]:
    dense = torch.empty(case.rows, case.dim, device=case.device)

    def fill(gradient: Tensor) -> Tensor:
        return dense.zero_().index_add_(0, gradient._indices()[0], gradient._values())

    return {
        OURS: Way(lambda gradient: zps.push_pull(gradient, "table", average=False)),
        "gloo dense": Way(_all_reduce, fill),
        "gloo sparse": Way(_all_reduce, Tensor.clone),
        "gloo gather": Way(_gather_and_coalesce),
    }


def _all_reduce(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def _gather_and_coalesce(gradient: Tensor) -> Tensor:
    """``all_gather`` of the coalesced gradients, padded to the longest, then their sum."""
    mine = gradient.coalesce()
    counts = torch.empty(dist.get_world_size(), dtype=torch.int64)
    _all_gather(counts, torch.tensor([mine._nnz()]))
    longest = int(counts.max())
    indices, values = (
        _gather_padded(part, longest, counts.tolist()) for part in (mine.indices()[0], mine.values())
    )
    union = torch.sparse_coo_tensor(indices.unsqueeze(0), values, gradient.shape, check_invariants=False)
    return union.coalesce()


def _gather_padded(part: Tensor, longest: int, counts: Sequence[int]) -> Tensor:
    padded = part.new_empty(longest, *part.shape[1:])
    padded[: len(part)] = part
    gathered = part.new_empty(len(counts), *padded.shape)
    _all_gather(gathered.view(-1, *part.shape[1:]), padded)
    return torch.cat([rank[:count] for rank, count in zip(gathered, counts, strict=True)])


def _timed_by_turns(ways: dict[str, Way], gradient: Tensor) -> list[Elapsed]:
    elapsed = []
    for way in ways.values():
        prepared = way.prepare(gradient)
        _settle(prepared)
        dist.barrier()
        elapsed.append(_timed(way, prepared))
    return elapsed


def _timed(way: Way, prepared: Tensor) -> Elapsed:
    """Times one call on this rank. Its result is dropped once the clocks have stopped."""
    began, processor_began = time.perf_counter(), time.process_time()
    result = way.call(prepared)
    _settle(result)
    elapsed = Elapsed(time.perf_counter() - began, time.process_time() - processor_began)
    del result
    return elapsed


def _settle(tensor: Tensor) -> None:
    """Waits until a tensor is there."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _count(ways: dict[str, Way], gradients: Sequence[Tensor]) -> Traffic:
    """Rows and bytes of further steps, untimed."""
    before = zps.stats()
    wire_bytes = [[_wire_bytes(way, gradient) for way in ways.values()] for gradient in gradients]
    after = zps.stats()
    medians = torch.tensor(wire_bytes).median(dim=0).values.tolist()
    steps = len(gradients)
    return Traffic(
        unique_rows=_mean_over_ranks(sum(map(_count_unique, gradients)) / steps),
        union_rows=sum(_gather_and_coalesce(gradient)._nnz() for gradient in gradients) / steps,
        pushed_bytes=_mean_over_ranks((after.pushed_bytes - before.pushed_bytes) / steps),
        pulled_bytes=_mean_over_ranks((after.pulled_bytes - before.pulled_bytes) / steps),
        wire_bytes=dict(zip(ways, medians, strict=True)),
    )


def _count_unique(gradient: Tensor) -> int:
    return len(set(gradient._indices()[0].tolist()))


def _wire_bytes(way: Way, gradient: Tensor) -> int:
    """The bytes on the loopback device during one call on all ranks, headers included."""
    prepared = way.prepare(gradient)
    dist.barrier()
    before = _loopback_bytes()
    dist.barrier()
    way.call(prepared)
    dist.barrier()
    return _loopback_bytes() - before


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(counters[0])


def _measure_small(device: str) -> dict[str, Timing]:
    """A dense tensor of 1 KB, whose time is all latency."""
    tensor = torch.ones(SMALL_BYTES // 4, device=device)
    ways = {
        OURS: Way(lambda given: zps.push_pull(given, "small")),
        "gloo dense": Way(_all_reduce, Tensor.clone),
    }
    elapsed: dict[str, list[Elapsed]] = {name: [] for name in ways}
    for _ in range(SMALL_TURNS):
        for name, way in ways.items():
            dist.barrier()
            calls = [_timed(way, way.prepare(tensor)) for _ in range(WARM_UP_STEPS + SMALL_CALLS)]
            elapsed[name] += calls[WARM_UP_STEPS:]
    return {name: _summarise_small(calls) for name, calls in elapsed.items()}


def _summarise_small(calls: list[Elapsed]) -> Timing:
    """Quantiles over calls, of the rank where they are greatest."""
    p50, p95 = _over_ranks(_quantiles([call.wall for call in calls])).amax(dim=0).tolist()
    return Timing(p50, p95, _over_ranks([call.processor for call in calls]).mean(dim=0).median().item())


def _summarise(ways: dict[str, Way], elapsed: list[list[Elapsed]]) -> dict[str, Timing]:
    """Quantiles over steps of the slowest rank's time; ``elapsed`` is this rank's, by step and way."""
    by_rank = _over_ranks(elapsed)[:, WARM_UP_STEPS:]
    slowest = by_rank[..., 0].amax(dim=0).T.tolist()
    processor = by_rank[..., 1].mean(dim=0).median(dim=0).values.tolist()
    walls = map(_quantiles, slowest)
    return {
        name: Timing(p50, p95, each) for name, (p50, p95), each in zip(ways, walls, processor, strict=True)
    }


def _quantiles(seconds: list[float]) -> list[float]:
    """The median and the 95th percentile."""
    wanted = torch.tensor([0.5, 0.95], dtype=torch.float64)
    return torch.tensor(seconds, dtype=torch.float64).quantile(wanted).tolist()


def _over_ranks(numbers: object) -> Tensor:
    """Each rank's ``numbers``, stacked by rank."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    stacked = mine.new_empty(dist.get_world_size(), *mine.shape)
    _all_gather(stacked.view(-1, *mine.shape[1:]), mine)
    return stacked


def _mean_over_ranks(number: float) -> float:
    return float(_over_ranks([number]).mean())


if __name__ == "__main__":
    main()
