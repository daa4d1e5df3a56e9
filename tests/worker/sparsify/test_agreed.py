"""Agreed exchange: the sum at the union, whatever ring serves each of its rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec import structs
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.server.reducers.reduction import read, reduce
from tests.worker.encode.test_reshard import view_of
from tests.worker.encode.test_transfer import make_push
from tests.worker.host_accelerator import HostAccelerator
from tests.worker.sparsify.test_sparsification import gradient, options
from zenps.config.settings import Config
from zenps.config.sources import load
from zenps.observe.metrics import WorkerMetrics
from zenps.schemes.registry import scheme_of
from zenps.worker.core.request import Parts, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.statistics import Progress, Statistics
from zenps.worker.core.transfer import Answer, EncodedTensor, OneRound, Transfer
from zenps.worker.encode.accelerator import Accelerator
from zenps.worker.encode.planner import Planner
from zenps.worker.encode.sharder import Sharder
from zenps.worker.sparsify.agreed import COUNTS, VALUES, Agreed, AgreedTransfer
from zenps.worker.sparsify.sparsification import make_sparsification

RANKS, SIZE = 3, 400_000
RINGS = ([0, 1], [1], [2, 5, 9], [0, 5])
SETS = (f"cluster.workers={RANKS}", "sync.sparsifier=exdyna", "sync.density=0.1", "sync.chunk_bytes=16KiB")
EXACT = ((SIZE - 300, SIZE),)


class Rank:
    """One rank, whose servers are simulated."""

    def __init__(self, rank: int, *sets: str, gpu: Accelerator | None = None) -> None:
        config: Config = load(sets=[*SETS, *sets], environ={}).config
        self.metrics = WorkerMetrics(CollectorRegistry())
        statistics = Statistics(self.metrics)
        self.scheme = scheme_of("zenps")
        self.sharder = Sharder(config, self.scheme.wire, view_of(RINGS[0]))
        self.planner = Planner(config, self.scheme, self.sharder)
        made = make_sparsification(config, rank, statistics)
        assert made is not None
        if gpu is not None:
            made._accelerators.of = lambda _: gpu  # type: ignore[assignment]
        self.sparsification = made
        self.residuals = Residuals()
        self.statistics = statistics
        self.changes: dict[str, Any] = {}
        """Options of pushes."""

    def begin(self, tensor: Tensor, step: int) -> tuple[Agreed, AgreedTransfer]:
        request = Request(tensor, "layer", options(self.residuals, exact=EXACT, **self.changes))
        agreed = self.sparsification.transform(request, step)
        assert isinstance(agreed, Agreed)
        indices = agreed.apply(tensor)
        request = request._replace(tensor=indices)
        first = self._one_round(request, agreed.expected)
        return agreed, AgreedTransfer("layer", request.options, agreed, first, self._one_round)

    def _one_round(self, request: Request, rows: int = 0) -> OneRound:
        transfer = self.planner.begin(request, rows)
        assert isinstance(transfer, OneRound)
        return transfer


def answers_to(pushes: Sequence[EncodedTensor], name: str) -> list[Answer]:
    """What servers answer to one round of all ranks, in any order. Counts are summed; nothing is averaged."""
    answers = []
    for index, chunk in enumerate(pushes[0].chunks):
        payloads = []
        for rank, encoded in enumerate(pushes):
            own = encoded.chunks[index]
            assert (own.server, own.chunk) == (chunk.server, chunk.chunk), "all ranks shard alike"
            push = structs.replace(make_push(encoded, own, rank, average=False), tensor=name)
            payloads.append(read(push, [memoryview(bytes(frame)) for frame in own.frames]))
        result, frames = reduce(payloads)
        answers.append(Answer(chunk.server, result, [memoryview(bytes(frame)) for frame in frames]))
    random.Random(len(answers)).shuffle(answers)
    return answers


class Job:
    """All ranks, and the ring that serves them."""

    def __init__(self, seed: int, *sets: str, gpu: Accelerator | None = None) -> None:
        self.ranks = [Rank(rank, *sets, gpu=gpu) for rank in range(RANKS)]
        self._chosen = random.Random(seed)

    def step(self, number: int, change: bool) -> list[Tensor]:
        """What each rank gets; the rings change in the middle of rounds if ``change``."""
        tensors = [gradient(100 * number + rank, SIZE) for rank in range(RANKS)]
        return self.push(tensors, number, change=change)

    def push(self, tensors: Sequence[Tensor], number: int, change: bool) -> list[Tensor]:
        """As :meth:`step`, of these gradients."""
        begun = [rank.begin(tensor, number) for rank, tensor in zip(self.ranks, tensors, strict=True)]
        transfers = [transfer for _, transfer in begun]
        open_rounds = [list(transfer.begin()) for transfer in transfers]
        assert [transfer.unbegun for transfer in transfers] == [(VALUES, COUNTS)] * RANKS
        while open_rounds[0]:
            encoded = [rounds.pop(0) for rounds in open_rounds]
            for following, rounds in zip(self._run(transfers, encoded, change), open_rounds, strict=True):
                rounds += following
            assert not any(transfer.unbegun for transfer in transfers)
        results = [agreed.undo(transfer.finish()) for agreed, transfer in begun]
        report = transfers[0].report(Progress(0))
        assert report.pushed_bytes < report.dense_bytes // 8
        return results

    def _run(
        self, transfers: Sequence[Transfer], encoded: list[EncodedTensor], change: bool
    ) -> list[Sequence[EncodedTensor]]:
        """Runs one round of all ranks, if ``change`` with some of its answers from a ring that goes."""
        name = "layer" + encoded[0].suffix
        if change:
            lost, view = answers_to(encoded, name), view_of(self._chosen.choice(RINGS))
            for number, (rank, transfer) in enumerate(zip(self.ranks, transfers, strict=True)):
                for answer in lost[: self._chosen.randrange(len(lost))]:
                    assert not transfer.on_answer(answer)
                rank.sharder.follow(view)
                encoded[number] = rank.sharder.reshard(name, encoded[number])
                transfer.restart(encoded[number])
        following: list[Sequence[EncodedTensor]] = [()] * RANKS
        for answer in answers_to(encoded, name):
            for number, transfer in enumerate(transfers):
                following[number] = [*following[number], *transfer.on_answer(answer)]
        return following


@pytest.mark.parametrize("values", ["same", "int8"])
@pytest.mark.parametrize("seed", range(3))
def test_rings_that_change_within_each_round_change_no_bit(values: str, seed: int) -> None:
    sets = f"sync.values={values}"
    steady, changing = Job(seed, sets), Job(seed, sets)
    for number in range(4):
        results = [*steady.step(number, change=False), *changing.step(number, change=True)]
        assert all(torch.equal(result, results[0]) for result in results[1:])
    residuals = [rank.residuals.of("layer", SIZE, 1) for job in (steady, changing) for rank in job.ranks]
    for rank in range(RANKS):
        assert torch.equal(residuals[rank], residuals[RANKS + rank])


@pytest.mark.parametrize("values", ["same", "bfloat16", "int8"])
def test_what_is_pushed_and_what_is_left_are_all_that_came(values: str) -> None:
    """Also what quantization takes."""
    job, came, summed = Job(0, f"sync.values={values}"), torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(5):
        came += sum(gradient(100 * number + rank, SIZE) for rank in range(RANKS))
        summed += job.step(number, change=False)[0]
    left = sum(rank.residuals.of("layer", SIZE, 1).view(-1) for rank in job.ranks)
    inexact = {"same": 1e-4, "bfloat16": 0.1, "int8": 0.2}[values]  # sums are rounded, too
    torch.testing.assert_close(summed + left, came, rtol=inexact, atol=inexact)


def test_exact_elements_are_summed_in_each_step() -> None:
    job = Job(0, "sync.values=int8")
    begin, end = EXACT[0]
    for number in range(3):
        expected = sum(gradient(100 * number + rank, SIZE)[begin:end] for rank in range(RANKS))
        result = job.step(number, change=False)[0]
        torch.testing.assert_close(result[begin:end], expected, rtol=0.2, atol=0.2)


def test_an_exact_element_is_not_rounded_away_by_a_great_one_beside_it() -> None:
    """As the presence element of a parameter would be, if they were quantized by one scale."""
    job, (begin, end) = Job(0, "sync.values=int8", "sync.density=0.1001"), EXACT[0]
    tensors = [gradient(rank, SIZE) for rank in range(RANKS)]
    for tensor in tensors:
        tensor[begin - 8 : begin] = 1e6
        tensor[begin:end] = 1
    result = job.push(tensors, 0, change=False)[0]
    torch.testing.assert_close(result[begin:end], torch.full((end - begin,), float(RANKS)), rtol=0.05, atol=0)


def test_what_quantization_takes_from_exact_elements_comes_later() -> None:
    """Small elements beside a great one move only with error feedback."""
    job, (begin, _), steps = Job(0, "sync.values=int8"), EXACT[0], 30
    small, summed = slice(begin + 1, begin + 64), torch.zeros(63)
    for number in range(steps):
        tensors = [gradient(100 * number + rank, SIZE) for rank in range(RANKS)]
        for tensor in tensors:
            tensor[begin], tensor[small] = 1, 1e-3
        summed += job.push(tensors, number, change=False)[0][small]
    assert float(summed.mean()) == pytest.approx(1e-3 * steps * RANKS, rel=0.4)


def test_parts_of_a_gradient_are_none_of_what_is_pushed_of_it() -> None:
    """At their places, the values at the union are those of other elements."""
    whole, parted = Job(0, "sync.values=int8"), Job(0, "sync.values=int8")
    tensors = [gradient(rank, SIZE) for rank in range(RANKS)]
    for tensor, rank in zip(tensors, parted.ranks, strict=True):
        tensor[-1] = 0
        rank.changes["parts"] = Parts([(0, 10), (10, 20)], slice(299, 301))
    results = [*whole.push(tensors, 0, change=False), *parted.push(tensors, 0, change=False)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("failing", [VALUES, COUNTS])
@pytest.mark.parametrize("values", ["same", "int8"])
def test_values_that_cannot_be_encoded_stay_in_the_residual(values: str, failing: str) -> None:
    rank, tensor = Rank(0, "cluster.workers=1", f"sync.values={values}"), gradient(0, SIZE)
    _, transfer = rank.begin(tensor, 0)
    (encoded,) = transfer.begin()
    begin = transfer._begin

    def begin_or_fail(request: Request) -> OneRound:
        if request.name.endswith(failing):
            raise MemoryError
        return begin(request)

    transfer._begin = begin_or_fail
    *others, last = answers_to([encoded], "layer")
    for answer in others:
        transfer.on_answer(answer)
    with pytest.raises(MemoryError):
        transfer.on_answer(last)
    left = rank.residuals.of("layer", SIZE, 1)[: EXACT[0][0], 0]
    assert torch.equal(left, tensor[: len(left)])


@pytest.mark.parametrize(("values", "leaves"), [("same", False), ("bfloat16", True), ("int8", True)])
def test_what_quantization_takes_stays_in_the_residual(values: str, leaves: bool) -> None:
    job = Job(0, f"sync.values={values}")
    union = job.step(0, change=False)[0] != 0
    for rank in job.ranks:
        left = rank.residuals.of("layer", SIZE, 1).view(-1)[union]
        assert bool(left.any()) == leaves
        assert float(left.abs().max()) < 0.1


@pytest.mark.parametrize("gpu", [None, HostAccelerator()], ids=["cpu", "device"])
@pytest.mark.parametrize("sparsifier", ["exdyna", "micro"])
def test_a_step_that_is_thrown_away_changes_no_later_one(sparsifier: str, gpu: Accelerator | None) -> None:
    """Neither by residuals nor by what ranks have learned of it."""
    sets = (f"sync.sparsifier={sparsifier}", "sync.values=int8")
    steady, other = Job(0, *sets, gpu=gpu), Job(0, *sets, gpu=gpu)
    for number in (0, 1, 3):
        if number == 3:
            for rank in other.ranks:
                rank.changes = {"is_dropped": True}
            nothing = other.push([torch.full((SIZE,), 1e6)] * RANKS, 2, change=False)
            assert not any(each.any() for each in nothing)
            for rank in other.ranks:
                rank.changes = {}
        results = [*steady.step(number, change=False), *other.step(number, change=False)]
        assert all(torch.equal(result, results[0]) for result in results[1:])
    for left, right in zip(steady.ranks, other.ranks, strict=True):
        assert torch.equal(left.residuals.of("layer", SIZE, 1), right.residuals.of("layer", SIZE, 1))


def test_a_rank_that_alone_throws_its_gradient_away_takes_part() -> None:
    job = Job(0)
    for number in range(3):
        before = [rank.residuals.of("layer", SIZE, 1).clone() for rank in job.ranks]
        job.ranks[1].changes = {"is_dropped": number == 1}
        results = job.step(number, change=False)
        assert all(torch.equal(result, results[0]) for result in results[1:])
        after = [rank.residuals.of("layer", SIZE, 1) for rank in job.ranks]
        assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [False, number == 1, False]
        states = [rank.sparsification.state_dict()["tensors"]["layer"] for rank in job.ranks]
        for state in states:
            for learned in ("sparsifier", "counts"):
                torch.testing.assert_close(state[learned], states[0][learned], rtol=0, atol=0)


def test_elements_are_counted() -> None:
    job = Job(0)
    for number in range(3):
        job.step(number, change=False)
    stats = [rank.statistics.stats for rank in job.ranks]
    assert [each.whole_elements for each in stats] == [3 * SIZE] * RANKS
    exact = 3 * 300
    # No element but the exact ones is selected by two ranks.
    assert sum(each.selected_elements - exact for each in stats) == stats[0].union_elements - exact
    shares = [rank.metrics.selection_imbalance._value.get() for rank in job.ranks]
    assert sum(shares) == pytest.approx(RANKS)
    assert 1 < max(shares) < 1.5


@pytest.mark.parametrize("gpu", [None, HostAccelerator()], ids=["cpu", "device"])
def test_the_norm_of_what_is_left(gpu: Accelerator | None) -> None:
    job = Job(0, gpu=gpu)
    assert job.ranks[0].sparsification.residual_norm() == 0
    job.step(0, change=False)
    rank = job.ranks[1]
    assert rank.sparsification.residual_norm() == pytest.approx(
        float(rank.residuals.of("layer", SIZE, 1).norm())
    )
    del rank.residuals
    assert rank.sparsification.residual_norm() == 0, "it is freed with its optimizer"
