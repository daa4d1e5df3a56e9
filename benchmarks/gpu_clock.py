"""GPU clock of the benchmarks: times by events, with a cold L2 cache, beside the device's own bandwidth."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from zenps.kernels.gpu.launcher import Launcher

RESULTS = Path(__file__).resolve().parent / "results"
WARM_UPS, REPEATS = 3, 15
HEAD_START_CYCLES = 4_000_000  # some 2 ms
FLUSH_BYTES = 256 << 20  # more than any GPU's L2, so that each repetition reads memory


class Bench:
    """A device, how kernels are launched on it, and its clock."""

    def __init__(self, device: torch.device, launcher: Launcher) -> None:
        self.device = device
        self.launcher = launcher
        on_gpu = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if on_gpu else 0, dtype=torch.uint8, device=device)
        self._warm_ups, self._repeats = (WARM_UPS, REPEATS) if on_gpu else (0, 1)
        self.bytes_per_second = self._measure_bandwidth(1 << 31 if on_gpu else 1 << 16)

    def milliseconds(
        self, run: Callable[[], object], reset: Callable[[], object] | None = None
    ) -> list[float]:
        """The times of all repetitions, sorted; ``reset`` comes before each, and is not timed."""
        reset = reset or (lambda: None)
        for _ in range(self._warm_ups):
            reset()
            run()
        return sorted(self._time_once(run, reset) for _ in range(self._repeats))

    def wall_milliseconds(self, run: Callable[[], object]) -> list[float]:
        """The times of all repetitions, sorted, from an idle device to the next: with what the host does."""
        for _ in range(self._warm_ups):
            run()
        return sorted(self._time_wall_once(run) for _ in range(self._repeats))

    def _time_wall_once(self, run: Callable[[], object]) -> float:
        self._flush_cache()
        self._synchronize()
        begin = time.perf_counter()
        run()
        self._synchronize()
        return (time.perf_counter() - begin) * 1000

    def _time_once(self, run: Callable[[], object], reset: Callable[[], object]) -> float:
        reset()
        if self.device.type != "cuda":
            return self._time_wall_once(run)
        self._flush_cache()
        # A head start, in which the host enqueues everything: otherwise the host would be timed. A way that
        # waits for the device has spent it, and what its host does afterwards is timed.
        torch.cuda._sleep(HEAD_START_CYCLES)
        begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begins.record()
        run()
        ends.record()
        ends.synchronize()
        return float(begins.elapsed_time(ends))

    def _flush_cache(self) -> None:
        if self.device.type == "cuda":
            self._flush.zero_()
            # A read, so that no dirty cache lines are written back while the clock runs.
            self._flush.amax()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _measure_bandwidth(self, size: int) -> float:
        """The best of reading (a maximum) and of copying, in bytes per second."""
        source = torch.zeros(size // 4, device=self.device)
        target = torch.empty_like(source)
        reading = statistics.median(self.milliseconds(source.amax))
        copying = statistics.median(self.milliseconds(lambda: target.copy_(source)))
        return 1000 * max(size / reading, 2 * size / copying)


class Run(NamedTuple):
    """A run of a benchmark.

    Attributes:
        started: when, in ISO 8601.
        command: the script's name and arguments.
        is_whole: False to try the script on the CPU, with small cases.
        json: the file to write.
    """

    started: str
    command: list[str]
    bench: Bench
    is_whole: bool
    json: Path


def begin(doc: str | None, name: str, arguments: Sequence[str] | None) -> Run:
    """Parses the command line, and measures the bandwidth.

    Args:
        doc: of the script.
        name: the JSON file is ``results/<name>-<device>.json`` by default.

    Raises:
        SystemExit: there is no CUDA device, and ``--host`` was not given.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--host", action="store_true", help="small cases on the CPU: does the script work?")
    parser.add_argument("--json", type=Path, help=f"default: results/{name}-DEVICE.json")
    options = parser.parse_args(arguments)
    if not options.host and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none; --host tries the script without one")
    started = datetime.now(UTC).isoformat(timespec="seconds")
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if options.host:
        return Run(started, command, _host_bench(), is_whole=False, json=Path())
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    path = options.json or RESULTS / f"{name}-{device}.json"
    return Run(started, command, _gpu_bench(), is_whole=True, json=path)


def describe(bench: Bench) -> dict[str, str | float]:
    """The facts about the device that times depend on."""
    import cupy

    properties = torch.cuda.get_device_properties(bench.device)
    return {
        "name": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver_cuda": str(cupy.cuda.runtime.driverGetVersion()),
        "bandwidth_gb_per_second": round(bench.bytes_per_second / 1e9, 1),
    }


def _gpu_bench() -> Bench:
    from zenps.kernels.gpu.cupy import CupyLauncher

    return Bench(torch.device("cuda", torch.cuda.current_device()), CupyLauncher())


def _host_bench() -> Bench:
    from tests.cuda.host.launcher import HostLauncher

    return Bench(torch.device("cpu"), HostLauncher())
