"""Sparsification: nothing of a gradient is lost, and what must stay whole stays whole."""

from __future__ import annotations

import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tests.integration.scraping import scrape
from zenps.config.settings import Config
from zenps.config.sources import load
from zenps.errors import TensorError, UsageError
from zenps.observe.metrics import WorkerMetrics, serve
from zenps.sparsifiers.base import Above, Sparsifier, Step
from zenps.worker.core.request import Options, Parts, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.statistics import Statistics
from zenps.worker.core.transfer import SuppliedTransfer
from zenps.worker.sparsify.agreed import VALUES, Agreed
from zenps.worker.sparsify.sparsification import Sparsification, Sparsified, make_sparsification

torch.set_num_threads(1)

RANKS = 3
SIZE = 20_000
SMALL_FLOATS = 16_384
"""The least number of float32 elements that are thinned out."""


def config(*sets: str) -> Config:
    return load(sets=["sync.sparsifier=topk", "sync.density=0.01", *sets], environ={}).config


def make(*sets: str, rank: int = 0) -> Sparsification:
    statistics = Statistics(WorkerMetrics(CollectorRegistry()))
    made = make_sparsification(config(f"cluster.workers={RANKS}", *sets), rank, statistics)
    assert made is not None
    return made


def options(residuals: Residuals | None, **changes: Any) -> Options:
    return Options(purpose="gradient", residuals=residuals, is_sparsifiable=True, **changes)


def gradient(seed: int, size: int = SIZE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def transform(sparsification: Sparsification, tensor: Tensor, step: int, options: Options) -> Sparsified:
    made = sparsification.transform(Request(tensor, "layer", options), step)
    assert isinstance(made, Sparsified)
    return made


@pytest.mark.parametrize("name", ["topk", "randomk", "threshold"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_is_pushed_and_what_is_left_are_all_that_came(name: str, dtype: torch.dtype) -> None:
    """Σ pushed + residual = Σ gradients, for each rank, up to the rounding of sums."""
    sets = (f"sync.sparsifier={name}", "sparsifier.threshold=1.5", "sparsifier.least_bytes=1")
    sparsification, residuals = make(*sets), Residuals()
    pushed, came = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for step in range(20):
        tensor = gradient(step, dtype=dtype).view(100, -1)
        sent = transform(sparsification, tensor, step, options(residuals)).apply(tensor)
        assert sent.is_coalesced()
        assert sent.dtype == dtype
        pushed += sent.to_dense().double()
        came += tensor.reshape(-1).double()
    left = residuals.of("layer", SIZE, 1, torch.promote_types(dtype, torch.float32)).view(-1).double()
    assert left.any()
    torch.testing.assert_close(pushed + left, came, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_is_taken_back_is_pushed_by_the_next_push(dtype: torch.dtype) -> None:
    """In the same step once, in a later one with that step's gradient."""
    made, residuals = make("sparsifier.least_bytes=1"), Residuals()
    (first, second), exact = (gradient(seed, dtype=dtype) for seed in range(2)), ((0, 5),)
    for _ in range(2):
        failing = transform(made, first, 0, options(residuals, exact=exact))
        sent = failing.apply(first)
        failing.take_back()
        left = residuals.of("layer", SIZE, 1, torch.promote_types(dtype, torch.float32))[:, 0]
        assert torch.equal(left, first.to(left))
    assert torch.equal(
        transform(made, first, 0, options(residuals)).apply(first).to_dense()[5:], sent.to_dense()[5:]
    )
    residuals.end_step()
    left.copy_(first)
    transform(made, second, 0, options(residuals)).take_back()  # before anything is taken
    sent = transform(made, second, 0, options(residuals)).apply(second)
    torch.testing.assert_close(sent.to_dense().to(left) + left, first.to(left) + second)


def test_the_result_is_dense_and_0_where_nobody_pushed() -> None:
    sparsification = make()
    tensor = gradient(0).view(100, 200)
    made = transform(sparsification, tensor, 0, options(Residuals()))
    result = made.undo(made.apply(tensor))
    assert result.shape == tensor.shape
    assert int((result != 0).sum()) == SIZE // 100
    assert torch.equal(result[result != 0], tensor[result != 0])
    stats = sparsification._statistics.stats
    assert (stats.whole_elements, stats.selected_elements, stats.union_elements) == (SIZE, 200, 200)


def test_who_reads_metrics_does_not_wait_for_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that hangs, for instance. Soon such waits had all threads of the endpoint."""
    is_measured, may_end, norm = threading.Event(), threading.Event(), Tensor.norm

    def measure(residual: Tensor) -> Tensor:
        is_measured.set()
        assert may_end.wait(60)
        return norm(residual)

    registry, sparsification, tensor = CollectorRegistry(), make(), gradient(0)
    WorkerMetrics(registry).residual_norm.set_function(sparsification.residual_norm)
    made = transform(sparsification, tensor, 0, options(residuals := Residuals()))
    sent = made.apply(tensor)
    monkeypatch.setattr(Tensor, "norm", measure)
    exporter = serve(registry, "127.0.0.1", 0)
    try:
        with ThreadPoolExecutor(1) as pool:
            undone = pool.submit(made.undo, sent)
            try:
                assert "\nzenps_residual_norm 0.0\n" in scrape(exporter.address)
                assert is_measured.wait(30)
                assert "\nzenps_residual_norm 0.0\n" in scrape(exporter.address)
            finally:
                may_end.set()
            undone.result(30)
        (line,) = re.findall(r"\nzenps_residual_norm (.*)\n", scrape(exporter.address))
    finally:
        exporter.close()
    assert float(line) == pytest.approx(float(norm(residuals.of("layer", SIZE, 1))))


def test_a_norm_is_measured_at_most_every_5_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, measured, norm = [100.0], list[Tensor](), Tensor.norm

    def measure(residual: Tensor) -> Tensor:
        measured.append(residual)
        return norm(residual)

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(Tensor, "norm", measure)
    sparsification, residuals, tensor = make(), Residuals(), gradient(0)
    for step, (now, times) in enumerate([(100.0, 1), (104.9, 1), (105.0, 2), (109.9, 2), (200.0, 3)]):
        clock[0] = now
        made = transform(sparsification, tensor, step, options(residuals))
        made.undo(made.apply(tensor))
        assert sparsification.residual_norm() == sparsification.residual_norm() > 0
        assert len(measured) == times


def test_exact_ranges_are_pushed_whole() -> None:
    tensor = gradient(1)
    exact = ((0, 10), (SIZE - 7, SIZE))
    sent = transform(make(), tensor, 0, options(Residuals(), exact=exact)).apply(tensor)
    dense = sent.to_dense()
    for begin, end in exact:
        assert torch.equal(dense[begin:end], tensor[begin:end])


@pytest.mark.parametrize("elements", [1, SIZE], ids=["one", "all"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_pushed_and_not_kept(bad: float, elements: int) -> None:
    """Not kept, either, where there is more of it than may be pushed."""
    residuals, tensor = Residuals(), gradient(1)
    tensor[3 : 3 + elements] = bad
    sent = transform(make(), tensor, 0, options(residuals)).apply(tensor)
    assert not bool(sent.to_dense()[3 : 3 + elements].isfinite().all())
    assert bool(residuals.of("layer", SIZE, 1).isfinite().all())


@pytest.mark.parametrize("large", [15e4, -15e4])
@pytest.mark.parametrize("sparsifier", ["topk", "exdyna"])
def test_a_sum_beyond_float16_is_pushed_in_several_steps(sparsifier: str, large: float) -> None:
    made = make(f"sync.sparsifier={sparsifier}", "sparsifier.least_bytes=1")
    residuals, nothing = Residuals(), torch.zeros(SIZE).half()
    residual = residuals.of("layer", SIZE, 1)
    residual[3] = large
    pushed = []
    for step in range(3):
        each = made.transform(Request(nothing, "layer", options(residuals, exact=((3, 4),))), step)
        assert each is not None
        sent = each.apply(nothing)
        values = each.continue_with(sent)[VALUES] if isinstance(each, Agreed) else sent.to_dense()[3:]
        pushed.append(float(values[0]))
        assert residual[3] == large - sum(pushed)
    assert pushed == [math.copysign(65504, large), math.copysign(65504, large), large - sum(pushed[:2])]


@pytest.mark.parametrize("pusher", [None, (1, 2)])
def test_a_sparsifier_knows_its_place_among_those_that_push(pusher: tuple[int, int] | None) -> None:
    made = transform(make(rank=2), gradient(1), 0, options(Residuals(), pusher=pusher))
    task = made.gradient.sparsifier.task
    assert (task.rank, task.world) == (pusher or (2, RANKS))


def test_only_what_takes_momentum_clips() -> None:
    sets = ("sparsifier.clip_norm=6", "cluster.workers=9")
    assert make(*sets).clip_norm == 0
    assert make("sync.sparsifier=dgc", *sets).clip_norm == 2


@pytest.mark.parametrize(
    ("tensor", "given"),
    [
        (gradient(0, SMALL_FLOATS - 1), options(Residuals())),
        (gradient(0), options(None)),
        (gradient(0), Options(purpose="gradient", residuals=Residuals())),
        (gradient(0).to_sparse(), options(Residuals())),
        (torch.ones(SIZE, dtype=torch.int64), options(Residuals())),
    ],
)
def test_what_stays_whole(tensor: Tensor, given: Options) -> None:
    assert make().transform(Request(tensor, "layer", given), 0) is None


def test_the_smallest_gradient_that_is_thinned_out() -> None:
    assert make().covers(Request(gradient(0, SMALL_FLOATS), "layer", options(Residuals())))


def test_nothing_is_made_where_nothing_is_left_out() -> None:
    statistics = Statistics(WorkerMetrics(CollectorRegistry()))
    assert make_sparsification(config("sync.density=1"), 0, statistics) is None
    assert make_sparsification(config("sync.sparsifier=none"), 0, statistics) is None


class Wrong(Sparsifier):
    """Returns what the test wants."""

    found: Any = None

    def select(self, values: Tensor, step: Step) -> Above | Tensor:
        found: Above | Tensor = self.found
        return found


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (torch.tensor([1, 1]), "not ascending"),
        (torch.tensor([2, 1]), "not ascending"),
        (torch.tensor([-1, 1]), "indices from -1 to 1"),
        (torch.tensor([1, SIZE]), f"indices from 1 to {SIZE}"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([[1]]), r"shape \(1, 1\)"),
        (torch.tensor([1], device="meta"), "on meta"),
        ([1], "got list"),
        (None, "got NoneType"),
    ],
)
def test_wrong_indices_are_refused(monkeypatch: pytest.MonkeyPatch, found: Tensor, what: str) -> None:
    monkeypatch.setattr(Wrong, "found", found)
    sparsification = make(f"sync.sparsifier={__name__}:Wrong")
    with pytest.raises(UsageError, match=rf"Wrong\.select: expected unique ascending indices.*{what}"):
        transform(sparsification, gradient(0), 0, options(Residuals())).apply(gradient(0))


@pytest.mark.parametrize(
    ("found", "what"),
    [(Above(None), "TypeError"), (Above(0.0, start=-5), "ValueError"), (Above("a"), "Error")],  # type: ignore[arg-type]
)
def test_what_breaks_in_a_selection_names_the_sparsifier(
    monkeypatch: pytest.MonkeyPatch, found: Any, what: str
) -> None:
    monkeypatch.setattr(Wrong, "found", found)
    sparsification = make(f"sync.sparsifier={__name__}:Wrong")
    with pytest.raises(
        UsageError, match=rf"^Wrong: .*{what}.* in accumulate or select; correct the sparsifier"
    ):
        transform(sparsification, gradient(0), 0, options(Residuals())).apply(gradient(0))


class Failing(Sparsifier):
    """Selects two elements; fails as often as the test wants, in one of its methods."""

    failing = ""
    failures = 0

    def select(self, values: Tensor, step: Step) -> Tensor:
        self._fail("select")
        return torch.tensor([1, 5])

    def sent(self, indices: Tensor) -> None:
        self._fail("sent")

    def _fail(self, method: str) -> None:
        if method == self.failing and Failing.failures:
            Failing.failures -= 1
            raise MemoryError


@pytest.mark.parametrize("failing", ["select", "sent"])
def test_a_gradient_is_counted_once_however_often_its_push_fails(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(Failing, "failing", failing)
    sparsification, residuals = make(f"sync.sparsifier={__name__}:Failing"), Residuals()
    expected = torch.zeros(SIZE)
    for step in range(3):
        Failing.failures, tensor = step, gradient(step)
        for _ in range(step):
            with pytest.raises(TensorError, match="tensor 'layer': no memory for Failing in"):
                transform(sparsification, tensor, step, options(residuals)).apply(tensor)
        sent = transform(sparsification, tensor, step, options(residuals)).apply(tensor)
        expected += tensor
        assert torch.equal(sent._values(), expected[[1, 5]])
        expected[[1, 5]] = 0
        assert torch.equal(residuals.of("layer", SIZE, 1)[:, 0], expected)


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("failing", ["select", "sent"])
def test_rounding_errors_of_exact_elements_are_added_once_unless_these_are_flags(
    monkeypatch: pytest.MonkeyPatch, failing: str, has_parts: bool
) -> None:
    monkeypatch.setattr(Failing, "failing", failing)
    monkeypatch.setattr(Failing, "failures", 2)
    sparsification, residuals, tensor = make(f"sync.sparsifier={__name__}:Failing"), Residuals(), gradient(0)
    begin, end = exact = (SIZE - 4, SIZE)
    given = options(
        residuals, exact=(exact,), parts=Parts([(0, begin)], slice(begin, end)) if has_parts else None
    )
    residuals.of("layer", SIZE, 1).fill_(0.25)
    for _ in range(2):
        with pytest.raises(TensorError, match="tensor 'layer': no memory for Failing in"):
            transform(sparsification, tensor, 0, given).apply(tensor)
    sent = transform(sparsification, tensor, 0, given).apply(tensor).to_dense()
    assert torch.equal(sent[begin:], tensor[begin:] + (0 if has_parts else 0.25))
    assert torch.equal(sent[[1, 5]], tensor[[1, 5]] + 0.25)
    assert not residuals.of("layer", SIZE, 1)[begin:].any()


def test_what_a_failed_push_has_left_is_forgotten_once_another_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name may have the same number in another job."""
    monkeypatch.setattr(Failing, "failures", 0)
    sparsification, residuals = make(f"sync.sparsifier={__name__}:Failing"), Residuals()
    for count in (1, 2):
        made = transform(sparsification, gradient(0), 0, options(residuals))
        request = Request(made.apply(gradient(0)), "layer", options(residuals))
        made.begin(request, lambda _: SuppliedTransfer())
        assert float(residuals.of("layer", SIZE, 1)[0]) == count * float(gradient(0)[0])


def test_so_is_what_one_has_left_whose_indices_are_agreed_on() -> None:
    sparsification, residuals = make("sync.sparsifier=exdyna"), Residuals()
    kept = set(range(SIZE))
    for _ in range(2):
        made = sparsification.transform(Request(gradient(0), "layer", options(residuals)), 0)
        assert isinstance(made, Agreed)
        union = made.apply(gradient(0))
        made.continue_with(union)
        kept -= set(union._indices()[0].tolist())
    assert residuals.of("layer", SIZE, 1)[min(kept)] == 2 * gradient(0)[min(kept)]


@pytest.mark.parametrize("scheme", ["byteps", "allreduce"])
def test_dense_schemes_refuse_it(scheme: str) -> None:
    with pytest.raises(
        Exception, match=f"sync.sparsifier = 'topk': expected none, because sync.scheme = {scheme}"
    ):
        config(f"sync.scheme={scheme}")
