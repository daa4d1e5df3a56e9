"""Which modules one sparse gradient crosses, from backward to step: ``python docs/gradient_path.py``.

Two workers and one server, one thread each, train an embedding. After some steps, by which everything is
agreed upon, connected and cached, the calls of several further steps are recorded: on the workers from
``backward()`` to the end of ``optimizer.step()``, on the server from before the first push until after the
last answer. What less than half of these steps have, a heartbeat for instance, is no part of the path.

*Modules* are the files of the tree in which something is called. A *call between files* is one whose
nearest caller in the tree is in another file, whatever libraries lie between; the training script, which
has none there, counts as one more file. Calls are counted as often as they happen (in the median of the
steps; a generator that is resumed is called), as pairs of functions, and as edges from file to file. Of an
edge to a module that the caller's does not import, neither by itself nor as a name that a package passes
on, it is said how it comes about. It is a *callback* where a function is called that the caller was given
as a value: one that was made in a function, a lambda, one that has another name than it is called by, or a
method of a class that has nothing to do with the caller's, called as one of the caller's own. Else it is
*polymorphism*: a method of an object that the caller was given.

``--write`` puts the result between two marks of docs/architecture.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from call_profiler import PACKAGE, Pair, Place, Profiler
from import_graph import Sources

ROOT: Final = Path(__file__).resolve().parent.parent
BEGIN: Final = "<!-- Written by docs/gradient_path.py. Do not edit. -->\n"
END: Final = "<!-- Until here. -->"

WORKERS: Final = 2
WARM_UP_STEPS, RECORDED_STEPS = 5, 21
ROWS, COLUMNS, LOOK_UPS = 10_000, 16, 4096  # some 200 KB of values: enough for memory that a host shares
TIMEOUT_SECONDS: Final = 120
FLAG: Final = "server.flag"

Side = Literal["worker", "server"]


# ── in a worker, and in the server ──────────────────────────────────────────────────────────────


def work(root: Path, output: Path) -> None:
    """A worker: trains, and records the steps after the warm-up.

    Raises:
        SystemExit: the worker that is imported is another tree's.
    """
    flag = bytearray(1)
    profiler = Profiler(root, flag)
    profiler.install()

    import torch

    import zenps as zps

    _require(root, "worker")
    torch.set_num_threads(1)
    zps.init()
    generator = torch.Generator().manual_seed(zps.rank())
    model = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    zps.broadcast_parameters(model.state_dict())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = zps.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    with _flag(output.with_name(FLAG)) as servers:
        for step in range(WARM_UP_STEPS + RECORDED_STEPS):
            optimizer.zero_grad()
            loss = model(torch.randint(ROWS, (LOOK_UPS,), generator=generator)).square().mean()
            number = max(step - WARM_UP_STEPS + 1, 0)
            zps.barrier()
            servers[0] = number
            zps.barrier()
            flag[0] = number
            loss.backward()
            optimizer.step()
            flag[0] = 0
            zps.barrier()
            servers[0] = 0
        rank = zps.rank()
        zps.shutdown()
    output.with_name(f"worker{rank}.json").write_text(json.dumps(profiler.steps()))


def serve(root: Path, output: Path) -> None:
    """The server: as ``zenps server``, and records the steps that the workers' flag names.

    Raises:
        SystemExit: always; with a message where the server that is imported is another tree's.
    """
    _require(root, "server")
    with _flag(output.with_name(FLAG)) as flag:
        profiler = Profiler(root, flag)
        from zenps.cli.commands import main

        profiler.install()
        try:
            code = main(["server"])
        finally:
            sys.setprofile(None)
        output.write_text(json.dumps(profiler.steps()))
    sys.exit(code)


def _require(root: Path, role: str) -> None:
    found = Path(str(import_module(f"{PACKAGE}.{role}").__file__)).resolve()
    if not found.is_relative_to(root):
        sys.exit(f"{PACKAGE}.{role} is imported from {found.parent}, not from {root}")


def _flag(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


# ── the cluster ─────────────────────────────────────────────────────────────────────────────────


def record(root: Path, same_host: str) -> dict[Side, list[list[Step]]]:
    """Runs a cluster of the tree; gives the steps of each worker, and of the server.

    Raises:
        SystemExit: a process failed; the output of all is the message.
    """
    with tempfile.TemporaryDirectory(prefix="gradient_path.") as folder:
        out = Path(folder)
        (out / FLAG).write_bytes(b"\0")
        with (out / "log").open("w+b") as log:
            if not _run(root, out, _environment(root, same_host), log):
                log.seek(0)
                sys.exit(log.read().decode(errors="replace") or f"no end within {TIMEOUT_SECONDS} s")
        return {
            "worker": [_read(out / f"worker{rank}.json") for rank in range(WORKERS)],
            "server": [_read(out / "server.json")],
        }


def _run(root: Path, out: Path, environment: dict[str, str], log: BinaryIO) -> bool:
    """Whether all processes of a cluster end well, and in time."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str, inherited: Sequence[int] = ()) -> None:
        command = sys.executable, "-P", *command
        processes.append(
            subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, pass_fds=inherited)
        )

    reader, writer = os.pipe()
    try:
        start("-m", f"{PACKAGE}.cli", "scheduler", "--print-address", str(writer), inherited=[writer])
        os.close(writer)
        with os.fdopen(reader) as address:
            environment["ZENPS_CLUSTER_SCHEDULER"] = address.readline().strip()
        for role in ("server", *WORKERS * ["worker"]):
            output = str(out / f"{role}.json")
            start(__file__, "--root", str(root), "--role", role, "--output", output)
        codes = [process.wait(TIMEOUT_SECONDS) for process in reversed(processes)]
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return not any(codes)


def _environment(root: Path, same_host: str) -> dict[str, str]:
    strangers = ("ZENPS_", "DMLC_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
    path = os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), str(root), str(Path(__file__).parent))))
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "ZENPS_CLUSTER_WORKERS": str(WORKERS),
        "ZENPS_CLUSTER_SERVERS": "1",
        "ZENPS_CLUSTER_SAME_HOST": same_host,
        "ZENPS_METRICS_PORT": "-1",
        "ZENPS_STATUS_PORT": "-1",
        "ZENPS_LOG_LEVEL": "warning",
    }


# ── what was recorded ───────────────────────────────────────────────────────────────────────────


@dataclass
class Step:
    """What one process did in one step."""

    modules: set[str]
    calls: dict[Pair, int]
    """In order of the first call, with how often each was called."""
    depth: dict[Pair, int]
    """How many crossings led to the first call, itself included."""
    names: dict[Pair, set[str]]
    """By which names the function was called, as :func:`call_profiler.called_as` returns them."""


def _read(path: Path) -> list[Step]:
    steps = []
    for recorded in json.loads(path.read_text()):
        step = Step(set(recorded["modules"]), {}, {}, {})
        for caller_file, caller, callee_file, callee, depth, name, count in recorded["calls"]:
            pair = Pair(Place(caller_file, caller), Place(callee_file, callee))
            step.calls[pair] = step.calls.get(pair, 0) + count
            step.depth.setdefault(pair, depth)
            step.names.setdefault(pair, set()).add(name)
        steps.append(step)
    return steps


@dataclass
class Course:
    """What the steps of a side have in common; that of several workers is what any of them has."""

    modules: set[str] = field(default_factory=set)
    pairs: dict[Pair, int] = field(default_factory=dict)
    """In order of the first call, with its depth."""
    names: dict[Pair, set[str]] = field(default_factory=dict)
    calls: float = 0.0
    """How often one file calls another in a step: the mean of the processes' medians."""

    @property
    def edges(self) -> set[tuple[str, str]]:
        """From file to file."""
        return {(pair.caller.file, pair.callee.file) for pair in self.pairs}


def common(processes: Sequence[Sequence[Step]]) -> Course:
    """The path of a side."""
    course = Course()
    for steps in processes:
        half = len(steps) / 2
        modules = Counter(module for step in steps for module in step.modules)
        pairs = Counter(pair for step in steps for pair in step.calls)
        kept = {pair for pair, count in pairs.items() if count > half}
        course.modules |= {module for module, count in modules.items() if count > half}
        # In the order of the step that has most of them and least besides.
        fullest = max(steps, key=lambda step: (len(kept & step.calls.keys()), -len(step.calls)))
        for step in (fullest, *steps):
            for pair in step.calls:
                if pair in kept:
                    course.pairs.setdefault(pair, step.depth[pair])
                    course.names.setdefault(pair, set()).update(step.names[pair])
        counts = [sum(count for pair, count in step.calls.items() if pair in kept) for step in steps]
        course.calls += statistics.median(counts) / len(processes)
    return course


@dataclass
class Result:
    """All that is said of a path."""

    worker: Course
    server: Course
    sources: Sources

    @property
    def sides(self) -> dict[Side, Course]:
        """By name."""
        return {"worker": self.worker, "server": self.server}

    def not_imported(self, course: Course) -> dict[tuple[str, str], bool]:
        """Edges into modules that the caller's does not import; whether each has a callback."""
        found: dict[tuple[str, str], bool] = {}
        for pair in course.pairs:
            edge = pair.caller.file, pair.callee.file
            if pair.caller.file and not self.sources.knows(*edge):
                found[edge] = found.get(edge, False) or self._is_callback(pair, course.names[pair])
        return dict(sorted(found.items()))

    def _is_callback(self, pair: Pair, names: Iterable[str]) -> bool:
        """Whether it is a call of a value that the caller was given: see above."""
        *outer, own = pair.callee.function.split(".")
        if "<locals>" in outer or own == "<lambda>":
            return "<genexpr>" not in own and "comp>" not in own
        if own.startswith("__"):
            return False
        return any(name and (name.removeprefix(".") != own or self._is_foreign(pair, name)) for name in names)

    def _is_foreign(self, pair: Pair, name: str) -> bool:
        """Whether a method is called as the caller's own that is none of its class."""
        caller, callee = (place.function.split(".")[:-1] for place in pair)
        if name.startswith(".") or not caller or not callee:
            return False
        return not self.sources.are_akin(caller[0], callee[0])


def numbers(result: Result) -> dict[str, list[str]]:
    """What is counted: of a worker, of the server, and of both, with what they share counted once."""
    courses = [*result.sides.values()]

    def of(counted: Sequence[set[Any]]) -> list[str]:
        return [*(str(len(each)) for each in counted), str(len(set().union(*counted)))]

    foreign = [result.not_imported(course) for course in courses]
    calls = [course.calls for course in courses]
    return {
        "modules crossed": of([course.modules for course in courses]),
        "calls between files": [f"{count:.0f}" for count in (*calls, sum(calls))],
        "pairs of functions that these are": of([{*course.pairs} for course in courses]),
        "edges between files": of([course.edges for course in courses]),
        "edges to modules that the caller does not import": of([{*each} for each in foreign]),
        "of these, callbacks": of([{edge for edge, is_one in each.items() if is_one} for each in foreign]),
    }


def listing(course: Course) -> str:
    """A line for each pair, in order of the first call, indented by how many others led there."""
    least = min(course.pairs.values(), default=1)
    return "\n".join(f"{'  ' * (depth - least)}{pair.callee}" for pair, depth in course.pairs.items())


def text(result: Result) -> str:
    """All of it, for a terminal."""
    lines = []
    for side, course in result.sides.items():
        lines += [f"── {side}: what is called from another file, in order ──", "", listing(course), ""]
        for edge, is_callback in result.not_imported(course).items():
            called = sorted({to.function for by, to in course.pairs if (by.file, to.file) == edge})
            kind = "callback" if is_callback else "by polymorphism"
            lines.append(f"{kind}: {edge[0]} → {edge[1]}: {', '.join(called)}")
        lines.append("")
    lines.append(f"{'':50}{'worker':>8}{'server':>8}{'both':>8}")
    lines += [f"{name:50}" + "".join(f"{each:>8}" for each in row) for name, row in numbers(result).items()]
    return "\n".join(lines)


def markdown(results: dict[str, Result]) -> str:
    """The section of the page: the numbers of each way, and the path of the first."""
    lines = []
    for way, result in results.items():
        lines += [f"| `cluster.same_host = {json.dumps(way)}` | worker | server | both |"]
        lines += ["| --- | ---: | ---: | ---: |"]
        lines += [f"| {name} | {' | '.join(row)} |" for name, row in numbers(result).items()]
        lines += [""]
    way, result = next(iter(results.items()))
    for side, course in result.sides.items():
        lines += [f"What is called from another file on a {side}, in order, with `{way}`:", ""]
        lines += ["```", listing(course), "```", ""]
    return "\n".join(lines)


def write(page: Path, section: str) -> None:
    """Puts it between the page's marks.

    Raises:
        SystemExit: the page has none.
    """
    head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        sys.exit(f"{page}: expected {BEGIN!r}, and {END!r} after it")
    page.write_text(head + begin + section + end + tail, encoding="utf-8")


def main() -> None:
    """Records, prints, and writes where it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree; default: this file's")
    parser.add_argument("--same-host", nargs="+", default=["memory", "tcp"], choices=("memory", "tcp"))
    parser.add_argument("--write", action="store_true", help="put the result into the page")
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: docs/architecture.md of the tree")
    parser.add_argument("--role", choices=("worker", "server"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    root = options.root.resolve()
    if options.role is not None:
        return (work if options.role == "worker" else serve)(root, options.output)
    sources = Sources(root)
    results = {}
    for way in options.same_host:
        sides = record(root, way)
        results[way] = Result(common(sides["worker"]), common(sides["server"]), sources)
        print(f"═══ cluster.same_host = {way} ═══\n\n{text(results[way])}\n")
    if options.write:
        write(options.page or root / "docs/architecture.md", markdown(results))


if __name__ == "__main__":
    main()
