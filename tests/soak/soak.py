"""Soak test: trains for long and samples every process. ``python -m tests.soak.soak --steps 20000``

After a warm-up, in which pools and caches fill, no process may hold more memory than 5 % above what it held,
nor more file descriptors or threads.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import nn

import zenps as zps
from tests.integration.cluster import Cluster, await_file, shared_bytes

MAX_GROWTH = 0.05
WARM_UP = 0.25
"""The fraction of the samples that is left out at the start."""

DEADLINE_SECONDS = 3600.0
ROWS = 20_000


class Sample(msgspec.Struct):
    """The resources of one process at one time."""

    step: int
    resident_bytes: int
    descriptors: int
    threads: int


class Report(msgspec.Struct):
    steps: int
    workers: int
    servers: int
    seconds: float
    machine: str
    samples: dict[str, list[Sample]]

    def warm(self, name: str) -> list[Sample]:
        """A process's samples after the warm-up."""
        own = self.samples[name]
        return own[int(len(own) * WARM_UP) :]

    def growth(self, name: str) -> float:
        """Resident memory in the last quarter after the warm-up over that in the first, less one."""
        resident = [sample.resident_bytes for sample in self.warm(name)]
        quarter = max(1, len(resident) // 4)
        return statistics.median(resident[-quarter:]) / statistics.median(resident[:quarter]) - 1

    def faults(self) -> list[str]:
        """The processes and resources that grew."""
        found = []
        for name in self.samples:
            warm = self.warm(name)
            if self.growth(name) > MAX_GROWTH:
                found.append(f"{name}: resident memory grew by {self.growth(name):.1%}")
            quarter = max(1, len(warm) // 4)
            for what in ("descriptors", "threads"):
                first, last = (
                    min(getattr(sample, what) for sample in part)
                    for part in (warm[:quarter], warm[-quarter:])
                )
                if last > first:
                    found.append(f"{name}: {what} grew from {first} to {last}")
        return found


class Model(nn.Module):
    """A table whose gradients have more than 64 KiB for each server, and two small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64, sparse=True)
        self.hidden = nn.Linear(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.table(rows).mean(1))))


def train(steps: int, directory: Path) -> tuple[float, float]:
    """Returns the last loss and the bytes that went through shared memory; writes its progress to a file."""
    torch.manual_seed(zps.rank())
    model = Model()
    optimizer = zps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    )
    zps.broadcast_parameters(model.state_dict(), root_rank=0)
    loss = torch.zeros(())
    for step in range(steps):
        rows = torch.randint(ROWS, (64, 16))
        optimizer.zero_grad()
        loss = (model(rows).squeeze(1) - (rows % 2).float().mean(1)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            if step % 100 == 0:
                zps.barrier()
            (directory / f"{zps.rank()}.step").write_text(str(step))
    await_file(directory / "sampled")  # a process that has ended cannot be sampled
    return float(loss), shared_bytes()


def measure(pid: int, step: int) -> Sample:
    """Samples a process, by what the kernel reports of it."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    assert resident is not None
    assert threads is not None
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(step, 1024 * int(resident[1]), descriptors, int(threads[1]))


def soak(steps: int, every_seconds: float) -> Report:
    """Trains ``steps`` steps with two workers and two servers; samples while they run."""
    began = time.monotonic()
    with Cluster() as cluster, TemporaryDirectory() as directory:
        workers = [cluster.start(train, steps, Path(directory), rank=rank) for rank in range(2)]
        processes = {p.name: p for p in (cluster.scheduler, *cluster.servers, *workers)}
        samples: dict[str, list[Sample]] = {name: [] for name in processes}
        progress = Path(directory) / "0.step"
        step = -1
        # From joining on, but not at the end, when threads are stopping.
        while (
            step < steps - 40
            and all(worker.alive for worker in workers)
            and time.monotonic() < began + DEADLINE_SECONDS
        ):
            if step > 0:
                for name, process in processes.items():
                    samples[name].append(measure(process.pid, step))
            time.sleep(every_seconds)
            step = int(progress.read_text() or 0) if progress.exists() else -1
        (Path(directory) / "sampled").touch()
        for worker in workers:
            loss, shared = worker.result()
            assert 0 <= loss < 1, "a loss that training ends with"
            assert shared > steps * 64 * 1024, "what is read in shared memory is watched, too"
        cluster.drain()
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}"
    return Report(steps, 2, 2, time.monotonic() - began, machine, samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = soak(options.steps, every_seconds=5.0)
    print(f"{report.steps} steps in {report.seconds:.0f} s, {len(report.samples['scheduler'])} samples each")
    for name in report.samples:
        warm = report.warm(name)
        first, last = warm[0], warm[-1]
        print(
            f"{name}: {first.resident_bytes / 2**20:.1f} to {last.resident_bytes / 2**20:.1f} MiB "
            f"({report.growth(name):+.2%}), descriptors {first.descriptors} to {last.descriptors}, "
            f"threads {first.threads} to {last.threads}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.encode(report) + b"\n")
    print("\n".join(report.faults()) or "nothing grew")
    return 1 if report.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
