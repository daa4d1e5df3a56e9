"""Benchmark of all schemes between hosts whose links are the bottleneck, on gradients of the papers' shape.

The hosts are network namespaces of this machine, each with a worker and a server: needs root and iproute2. A
block has hosts and links of one speed; it runs every scheme, and gloo's dense all_reduce, on the same
gradients. The file is written after every block: --resume continues an interrupted run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from hosts import why_not_here
from net_block import Block
from net_costs import expect
from net_docs import page
from net_report import Report, describe_links, find_commit, plots, sheets
from net_worker import BFLOAT16, GLOO, Measurement, Task, count_steps, count_warm_up_steps
from rich.console import Console
from sync_report import describe_machine, find_versions
from workloads import SIZES, WORKLOADS, characterise

from zenps.schemes.registry import scheme_names

NAMES: Final[Sequence[str]] = (*scheme_names(), BFLOAT16)
HERE = Path(__file__).resolve().parent
BLOCK_SECONDS: Final = 3600
TABLE_WIDTH: Final = 150

FULL_STEPS, QUICK_STEPS = 7, 3
# At higher speeds, the two cores that all hosts share are the bottleneck.
FULL_SPEEDS, QUICK_SPEEDS = (50.0, 100.0), (100.0,)
QUICK_SIZES, QUICK_SCALE = (4,), 0.5
QUICK_WORKLOADS = ("lstm", "opt")

# For the estimate, on two cores: a cluster's processes are forked, connect and end.
CLUSTER_SECONDS, HOST_SECONDS = 5.0, 0.5
USUAL_RATIO, USUAL_SECONDS = 1.2, 0.05


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the report lacks; prints the tables; writes JSON, plots and, on request, the page."""
    options = parse(arguments)
    report, commit = load(options), find_commit()
    tasks = [
        msgspec.structs.replace(task, workloads=names)
        for task in ([] if options.render else plan(options))
        if (names := report.lacks(task))
    ]
    if tasks and (reason := why_not_here()):
        sys.exit(f"bench_net.py: {reason}")
    total = sum(estimate_seconds(task, report) for task in tasks)
    print(f"{len(tasks)} clusters, about {total / 60:.0f} minutes", file=sys.stderr)
    begin, done = time.monotonic(), 0.0
    for block in blocks(tasks):
        for task, measured in run_block(block, options.set):
            report.add([msgspec.structs.replace(each, commit=commit) for each in measured])
            write(report, options.json)
            done += estimate_seconds(task, report)
            passed = time.monotonic() - begin
            left = passed * (total / done - 1)
            print(
                f"{task.workers:2} hosts, {task.mbit:g} Mbit/s, {task.scheme:27} "
                f"{passed / 60:5.1f} min passed, about {left / 60:.0f} left",
                file=sys.stderr,
            )
    written = [options.json, *plots(report, options.json)]
    if options.docs is not None:
        options.docs.write_text(page(report, options.json, options.docs))
        written.append(options.docs)
    console = Console(width=TABLE_WIDTH)
    for sheet in sheets(report):
        console.print(sheet.table())
    print(f"written: {', '.join(map(str, written))}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. An option that is not given means all its values, or a few with --quick."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, metavar="NAME", help=f"of {[*WORKLOADS]}"
    )
    parser.add_argument("--schemes", nargs="+", choices=NAMES, metavar="NAME", help=f"of {[*NAMES]}")
    parser.add_argument("--hosts", type=int, nargs="+", choices=SIZES, metavar="N", help=f"of {SIZES}")
    parser.add_argument("--mbit", type=float, nargs="+", metavar="X", help="of each link and direction")
    parser.add_argument("--scale", type=float, metavar="X", help="times the rows of each workload")
    parser.add_argument("--steps", type=int, metavar="N", help="timed at most, for each scheme and workload")
    parser.add_argument("--quick", action="store_true", help="by default little of all that")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--resume", action="store_true", help="only what the JSON file lacks, or is doubtful")
    parser.add_argument("--render", action="store_true", help="measure nothing; show what the JSON file has")
    parser.add_argument("--json", type=Path, metavar="FILE", default=HERE / "out" / "net.json")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page of results, too")
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or (QUICK_WORKLOADS if options.quick else list(WORKLOADS))
    options.schemes = options.schemes or NAMES
    options.hosts = options.hosts or (QUICK_SIZES if options.quick else SIZES)
    options.mbit = options.mbit or (QUICK_SPEEDS if options.quick else FULL_SPEEDS)
    options.scale = options.scale or (QUICK_SCALE if options.quick else 1.0)
    options.steps = options.steps or (QUICK_STEPS if options.quick else FULL_STEPS)
    if min(*options.mbit, options.scale, options.steps) <= 0:
        parser.error("expected --mbit, --scale and --steps above 0")
    if options.render and not options.json.exists():
        parser.error(f"--render: expected a file of results, and there is no {options.json}")
    return options


def load(options: argparse.Namespace) -> Report:
    """The report to add measurements to: a new one, or the one to resume."""
    if options.render:
        return msgspec.json.decode(options.json.read_bytes(), type=Report)
    new = Report(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=sys.argv,
        machine=describe_machine(),
        links=describe_links(),
        versions=find_versions(),
        scale=options.scale,
        sets=options.set,
        characters={name: characterise(WORKLOADS[name].resized(options.scale)) for name in options.workloads},
        measurements=[],
        steps=options.steps,
        commit=find_commit(),
    )
    if not (options.resume and options.json.exists()):
        return new
    report = msgspec.json.decode(options.json.read_bytes(), type=Report)
    differing = [f"{name} is {there} there and {here} here" for name, there, here in report.differences(new)]
    if differing:
        sys.exit(
            f"--resume: {options.json} was measured otherwise: {'; '.join(differing)}; keep to that, or "
            "measure all anew, without --resume"
        )
    report.characters |= new.characters
    return report


def write(report: Report, path: Path) -> None:
    """Writes the report whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    partial.rename(path)


def plan(options: argparse.Namespace) -> list[Task]:
    """One task for each cluster, those of a block one after the other."""
    return [
        Task(
            scheme=scheme,
            workers=workers,
            mbit=mbit,
            workloads=tuple(options.workloads),
            scale=options.scale,
            steps=options.steps,
        )
        for mbit in options.mbit
        for workers in options.hosts
        for scheme in (GLOO, *options.schemes)
    ]


def blocks(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Tasks that can have the same hosts."""
    for key in dict.fromkeys((task.workers, task.mbit) for task in tasks):
        yield [task for task in tasks if (task.workers, task.mbit) == key]


def estimate_seconds(task: Task, report: Report) -> float:
    """A rough estimate of a cluster's duration."""
    total = CLUSTER_SECONDS + HOST_SECONDS * task.workers
    for name in task.workloads:
        cost = expect(task.scheme, report.characters[name], task.workers, task.mbit)
        seconds = USUAL_RATIO * cost.seconds + USUAL_SECONDS
        total += seconds * (count_warm_up_steps(task.scheme) + count_steps(seconds, task.steps))
    return total


def run_block(tasks: Sequence[Task], sets: Sequence[str]) -> Iterator[tuple[Task, list[Measurement]]]:
    """Yields each task with its measurements, as soon as they are there.

    Raises:
        SystemExit: a cluster failed; it has said why.
    """
    block = msgspec.json.encode(Block(tasks=list(tasks), sets=list(sets))).decode()
    with subprocess.Popen(
        [sys.executable, str(HERE / "net_block.py"), block],
        # One thread per process, because cores are few and roles are forked; gloo on the shaped link.
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            for task, line in zip(tasks, process.stdout, strict=False):
                yield task, msgspec.json.decode(line, type=list[Measurement])
        except BaseException:  # Ctrl-C, too: it ends at once, and its hosts with all that runs on them
            process.kill()
            raise
    if process.returncode:
        sys.exit(process.returncode)


if __name__ == "__main__":
    main()
