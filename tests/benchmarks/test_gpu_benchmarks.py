"""Benchmarks of a GPU on the CPU: they run, and say that a GPU is missing."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_compaction, bench_model
from benchmarks.gpu_clock import Bench
from benchmarks.model_cases import CASES
from tests.cuda.host.launcher import HostLauncher


def test_every_way_and_every_kernel_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    bench_compaction.main(["--host"])
    bench_model.main(["--host"])
    printed = capsys.readouterr().out
    ways = ("sort_compact", "bitmap_compact", "torch: unique, index_add_")
    for name in (*ways, *CASES):
        assert name in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("main", [bench_compaction.main, bench_model.main])
def test_without_a_gpu_nothing_is_measured(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "expected a CUDA device, found none" in capsys.readouterr().err


def test_the_host_is_timed_too() -> None:
    bench = Bench(torch.device("cpu"), HostLauncher())
    results = list(bench_compaction.measure(bench, bench_compaction.TINY[0]))
    assert len(results) == 4
    assert all(result.wall_p50_ms is not None and result.wall_p50_ms > 0 for result in results)


def test_each_repetition_selects_a_hundredth() -> None:
    torch.manual_seed(1)
    bench = Bench(torch.device("cpu"), HostLauncher())
    prepared = CASES["threshold_compact, dense, float32"].sampled()
    counts: list[int] = []

    def run() -> None:
        found = prepared.run(bench.launcher)
        assert isinstance(found, tuple)
        counts.append(int(found[0].count))

    for _ in range(5):
        bench.milliseconds(run, prepared.reset)
    assert counts == [prepared.elements // 100] * 5
