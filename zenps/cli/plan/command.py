"""The command ``zenps plan``: checks its options, plans by a trace, and writes the results."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from zenps.config.settings import Config
from zenps.errors import ConfigError
from zenps.observe.recording import read
from zenps.schemes.traffic import Links

from .planner import DOUBLINGS, MAX_WORKERS, Plan, make_plan
from .plots import check_plots, write_plots
from .printed import show_plan
from .profile import FEWEST_SAMPLES, profiles
from .units import parse_bandwidth, parse_latency
from .written import check_settings, check_writable, ruled_out, write_settings

USUAL_WORKERS = 8


class Request(Struct, frozen=True, kw_only=True):
    """The checked options."""

    has_command: bool
    trace: Path | None
    steps: int
    local_workers: int
    counts: list[int]
    links: Links
    ruled_out: dict[str, str]
    config: Config
    write: Path | None
    plot: Path | None
    json: bool

    @classmethod
    def from_options(cls, args: argparse.Namespace, config: Config) -> Request:
        """Checks the options, so that an error is reported before a training is started.

        Args:
            args: the command line.
            config: the settings; the plan is for ``cluster.workers`` if there are several.

        Raises:
            ConfigError: an option is wrong, or names a file that cannot be written.
        """
        has_command = bool(args.command)
        if not has_command and args.plan_trace is None:
            raise ConfigError("CMD", "", "-- CMD [ARG ...] to record, or --trace FILE with what was recorded")
        steps = _for_recording("--steps", args.plan_steps, "20", has_command)
        local_workers = _for_recording("--local-workers", args.plan_local_workers, "2", has_command)
        counts = _counts(args.plan_workers, config.cluster.workers)
        excluded = ruled_out(args.set, args.config)
        if args.plan_write is not None:
            excluded |= check_settings(args.plan_write)
        request = cls(
            has_command=has_command,
            trace=args.plan_trace,
            steps=_integer("--steps", steps, FEWEST_SAMPLES, 1_000_000),
            local_workers=_integer("--local-workers", local_workers, 1, 64),
            counts=counts,
            links=Links(
                workers=counts[0],
                servers=_integer("--servers", args.plan_servers, 0, 1024),
                bytes_per_second=parse_bandwidth(args.plan_bandwidth),
                latency_seconds=parse_latency(args.plan_latency),
            ),
            ruled_out=excluded,
            config=config,
            write=args.plan_write,
            plot=args.plan_plot,
            json=args.json,
        )
        if has_command and request.trace is not None:
            check_writable("--trace", request.trace)
        if request.plot is not None:
            check_plots(request.plot)
        return request

    @contextlib.contextmanager
    def trace_file(self) -> Iterator[Path]:
        """The path of the trace: the one given, else in a folder that lasts as long as the context."""
        if self.trace is not None:
            yield self.trace
            return
        with tempfile.TemporaryDirectory(prefix="zenps-plan-") as folder:
            yield Path(folder) / "trace"


def answer(request: Request, trace: Path) -> None:
    """Plans by ``trace``, prints the plan, and writes the files that ``request`` asks for."""
    found, rare = profiles(read(trace))
    plan = make_plan(found, request.links, request.counts, rare, request.ruled_out, request.config)
    if request.json:
        print(msgspec.json.format(msgspec.json.encode(plan)).decode())
    else:
        show_plan(plan)
    _write(request, plan)


def _write(request: Request, plan: Plan) -> None:
    said = []
    if request.plot is not None:
        said += [f"drew {file}" for file in write_plots(plan, request.plot)]
    if request.write is not None:
        settings: dict[str, str | int] = {"scheme": plan.scheme}
        if plan.granule is not None:
            settings["granule"] = plan.granule
        before = write_settings(request.write, settings)
        for name, value in settings.items():
            instead = f", which was {before[name]!r}" if before.get(name, value) != value else ""
            said.append(f"set sync.{name} = {value!r}{instead} in {request.write}")
    if request.trace is not None and request.has_command:
        said.append(f"recorded {request.trace}")
    for line in said:
        print(line, file=sys.stderr if request.json else sys.stdout)


def _for_recording(option: str, given: str | None, default: str, has_command: bool) -> str:
    """The value of an option that only a recording of CMD uses."""
    if given is not None and not has_command:
        without = f"or no {option}: --trace is already recorded"
        raise ConfigError(option, given, f"-- CMD [ARG ...] to record, {without}")
    return default if given is None else given


def _counts(given: str | None, workers: int) -> list[int]:
    """The number of workers to plan for, then others for comparison."""
    if given is not None:
        return [_integer("--workers", text, 2, MAX_WORKERS) for text in given.split(",")]
    if workers > MAX_WORKERS:
        raise ConfigError("cluster.workers", workers, f"at most {MAX_WORKERS} to plan for, or --workers")
    planned = workers if workers > 1 else USUAL_WORKERS
    return [planned, *(count for count in DOUBLINGS if count > planned)]


def _integer(option: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise ConfigError(option, text, f"an integer from {least} to {most}")
    return int(text)
