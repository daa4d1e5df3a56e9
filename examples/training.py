"""Common code of the examples: a run's limits, its progress, and a report of the cost of synchronisation."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from torch import Tensor

import zenps as zps

AGREE_EVERY_STEPS = 10
LINES_WITHOUT_TERMINAL = 20

Batch = TypeVar("Batch")
Number = TypeVar("Number", int, float)


def argument_parser(description: str, *, steps: int, seconds: float, batch: int) -> argparse.ArgumentParser:
    """The options that every example has, with its own defaults."""
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=_positive(int), default=steps, help="stop after so many steps")
    parser.add_argument("--seconds", type=_positive(float), default=seconds, help="stop after so long")
    parser.add_argument("--batch", type=_positive(int), default=batch, help="batch size of each worker")
    parser.add_argument("--seed", type=int, default=1, help="of everything random")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the final numbers as JSON")
    return parser


def existing_file(path: str) -> Path:
    """The type of an option that names a file to read."""
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path}: no such file")
    return Path(path)


def create(path: Path | None) -> None:
    """Creates the file that rank 0 writes at the end: a path that is wrong ends the job before it trains."""
    if path is not None and zps.rank() == 0:
        path.open("a").close()


def _positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        if not (number := kind(text)) > 0:
            raise argparse.ArgumentTypeError(f"{text}: expected more than 0")
        return number

    parse.__name__ = kind.__name__  # argparse puts it into "invalid int value"
    return parse


class TrainingRun:
    """Hands out batches until a limit is reached, shows progress on rank 0, and accounts for the time.

    Args:
        steps: limit in steps.
        seconds: limit in seconds; looked at every few steps.
        unit: what is counted, ``"words"`` for instance.
        units_per_step: how many of them one worker processes in a step.
        report: the file for the final numbers, as JSON.
    """

    def __init__(
        self, steps: int, seconds: float, unit: str, units_per_step: int, report: Path | None
    ) -> None:
        create(report)
        self._report = report
        self.console = Console(quiet=zps.rank() != 0, highlight=False)
        self._steps, self._seconds = steps, seconds
        self._unit, self._units_per_step = unit, units_per_step * zps.size()
        self._losses: list[Tensor] = []
        self._numbers: dict[str, Any] = {}

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields batches; all ranks stop after the same one, because they use the same loss and the same
        clock."""
        before, begin = zps.stats(), time.perf_counter()
        with self._progress() as progress:
            task = progress.add_task("", total=1.0, note="")
            line = 0
            for step, batch in zip(range(1, self._steps + 1), batches, strict=False):
                yield batch
                if step % AGREE_EVERY_STEPS and step < self._steps:
                    continue
                loss, seconds = self._agree(time.perf_counter() - begin)
                done = min(1.0, max(step / self._steps, seconds / self._seconds))
                rate = step * self._units_per_step / seconds
                note = f"step {step}  loss {loss:.3f}  {rate:,.0f} {self._unit}/s"
                progress.update(task, completed=done, note=note)
                if progress.disable and done * LINES_WITHOUT_TERMINAL >= line:
                    line = int(done * LINES_WITHOUT_TERMINAL) + 1
                    self.console.print(progress.get_renderable())
                if done == 1.0:
                    break
        self._numbers = _account(before, step, time.perf_counter() - begin, self._unit, self._units_per_step)

    def record(self, loss: Tensor) -> None:
        """Takes the loss of a step, a scalar, into the average that is shown."""
        self._losses.append(loss.detach())

    def finish(self, **quality: Any) -> None:
        """Prints the table of the costs of synchronisation; writes it and ``quality`` to the report."""
        self.console.print(_table(self._numbers, self._unit))
        if self._report is not None and zps.rank() == 0:
            self._report.write_text(json.dumps(self._numbers | quality, indent=2) + "\n")

    def _agree(self, seconds: float) -> tuple[float, float]:
        """Mean loss since the last time, and mean time so far, over all ranks."""
        mean = torch.stack([torch.stack(self._losses).mean(), torch.tensor(seconds)])
        self._losses.clear()
        loss, seconds = zps.push_pull(mean, "progress").tolist()
        return loss, seconds

    def _progress(self) -> Progress:
        """A live bar on a terminal. Into a file or a pipe, lines are printed instead."""
        columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
        return Progress(*columns, console=self.console, disable=not self.console.is_terminal)


def _account(before: Any, steps: int, seconds: float, unit: str, units_per_step: int) -> dict[str, Any]:
    """The statistics of this rank since ``before``."""
    now = zps.stats()
    mean_rows = now.mean_rows - before.mean_rows
    return {
        "partition": now.partition,
        "workers": zps.size(),
        "steps": steps,
        "seconds": seconds,
        f"{unit}_per_second": steps * units_per_step / seconds,
        "pushed_bytes": now.pushed_bytes - before.pushed_bytes,
        "pulled_bytes": now.pulled_bytes - before.pulled_bytes,
        "dense_bytes": now.dense_bytes - before.dense_bytes,
        "imbalance": (now.busiest_rows - before.busiest_rows) / mean_rows if mean_rows else 1.0,
        "wait_seconds": now.wait_seconds - before.wait_seconds,
        "work_seconds": now.work_seconds - before.work_seconds,
    }


def _table(numbers: dict[str, Any], unit: str) -> Table:
    steps, seconds = numbers["steps"], numbers["seconds"]
    sent_bytes = numbers["pushed_bytes"] + numbers["pulled_bytes"]
    table = Table(
        title=f"workers: {numbers['workers']}, partition: {numbers['partition']}", show_header=False
    )
    table.add_column(style="bold")
    table.add_column(justify="right")

    def add(name: str, value: str) -> None:
        table.add_row(name, value)

    add(f"{unit}/s, all workers", f"{numbers[f'{unit}_per_second']:,.0f}")
    add("step", f"{seconds / steps * 1e3:.1f} ms")
    if sent_bytes:
        add("pushed per step and worker", _megabytes(numbers["pushed_bytes"] / steps))
        add("pulled per step and worker", _megabytes(numbers["pulled_bytes"] / steps))
        add("dense synchronisation would have moved", _megabytes(numbers["dense_bytes"] / steps))
        add("dense ÷ (pushed + pulled)", f"{numbers['dense_bytes'] / sent_bytes:.1f} ×")
        add("imbalance: busiest server ÷ mean", f"{numbers['imbalance']:.3f}")
        add("waiting for servers", _share(numbers["wait_seconds"] / steps, seconds / steps))
        add("compaction and scatter", _share(numbers["work_seconds"] / steps, seconds / steps))
    return table


def _share(seconds: float, of_seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms ({seconds / of_seconds:.0%} of the step)"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.3f} MB"
