"""What the command ``zenps`` is given: subcommands, options, and the command of a worker."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zenps.config.settings import WEEK_SECONDS

_Add = Callable[..., argparse.ArgumentParser]
"""A subcommand, by its name and summary."""


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """``options -- CMD`` in two. argparse's own treatment of ``--`` differs between Python versions."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def make_parser() -> argparse.ArgumentParser:
    """For the options before ``--``.

    What it finds has ``subcommand``, the ``parser`` of that, for errors, and ``takes_command``: whether CMD
    must, must not, or (None) may follow.
    """
    parser = argparse.ArgumentParser(
        prog="zenps", description="A parameter server for PyTorch that synchronises sparse gradients."
    )
    version = importlib.metadata.version("zenps")
    parser.add_argument("--version", action="version", version=f"zenps {version}")
    subcommands = parser.add_subparsers(
        title="subcommands", metavar="SUBCOMMAND", dest="subcommand", required=True
    )
    add = partial(_add, subcommands, _common_options())
    _add_roles(add)
    _add_questions(add)
    _add_tools(add)
    return parser


def _add(
    subcommands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
    name: str,
    summary: str,
    *,
    command: bool | None = False,
    operand: str = "",
) -> argparse.ArgumentParser:
    usage = f"zenps {name} [options]{operand}"
    usage += {True: " -- CMD [ARG ...]", None: " [-- CMD [ARG ...]]", False: ""}[command]
    described = f"{summary[0].upper()}{summary[1:]}."
    sub = subcommands.add_parser(name, parents=[common], usage=usage, help=summary, description=described)
    sub.set_defaults(parser=sub, takes_command=command)
    return sub


def _add_roles(add: _Add) -> None:
    launch = add("launch", "run CMD as the workers of a whole cluster on this machine", command=True)
    _add_counts(launch)
    scheduler = add("scheduler", "run the scheduler, at cluster.scheduler")
    scheduler.add_argument(
        "--print-address",
        type=int,
        metavar="FD",
        help="write host:port to this file descriptor when nodes can register",
    )
    add("server", "run one server")
    add("worker", "run CMD as one worker, with these settings", command=True)


def _add_questions(add: _Add) -> None:
    """And what else is said to a live cluster, or to this machine."""
    status = add("status", "show a live cluster")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    health = add("health", "tell a container's probe whether a role is well, by exit code 0 or 1")
    health.add_argument("--role", choices=("scheduler", "server"), required=True, help="that of this node")
    drain = add("drain", "have a server hand its slots to the others, and end", operand=" RANK")
    drain.add_argument("rank", type=int, metavar="RANK", help="the server's, as zenps status shows it")
    for asking in (status, health, drain):
        asking.add_argument(
            "--timeout-seconds", type=_seconds, default=5.0, metavar="S", help="how long to wait (default: 5)"
        )
    config = add("config", "show every setting and where its value came from")
    config.add_argument("--json", action="store_true", help="for programs; with descriptions")
    add("doctor", "check this machine and the way to the cluster")


def _add_tools(add: _Add) -> None:
    trace = add("trace", "make one timeline of those of several processes", operand=" OUT PART...")
    trace.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    trace.add_argument("parts", type=Path, nargs="+", metavar="PART", help="what sync.trace had a role write")
    _add_plan(add("plan", "say which scheme suits CMD, or a trace of it, and a network", command=None))
    keygen = add("keygen", "make the keys that a directory lacks: who may be which node", operand=" DIR")
    keygen.add_argument("directory", type=Path, metavar="DIR", help="made if need be, for its owner alone")
    _add_counts(keygen)


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N", help="number of workers: cluster.workers")
    parser.add_argument("--servers", metavar="M", help="number of servers: cluster.servers")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    options: dict[str, tuple[str, str, Any]] = {
        "--trace": ("FILE", "with CMD, keep what is recorded here; without, plan by this", None),
        "--steps": ("N", "how many steps of CMD are recorded (default: 20)", "20"),
        "--local-workers": ("N", "how many workers run CMD here (default: 2)", "2"),
        "--workers": ("N[,N...]", "plan for so many; others for comparison (default: 8, 16, ... 1024)", None),
        "--servers": ("N", "hosts with a server alone (default: 0, a server on each worker's host)", "0"),
        "--bandwidth": ("RATE", "of each host, in each direction (default: 10Gbit)", "10Gbit"),
        "--latency": ("TIME", "of one message (default: 50us)", "50us"),
        "--write": ("FILE", "set sync.scheme, and sync.granule for single elements, in this file", None),
        "--plot": ("DIR", "draw curves into this folder; needs matplotlib", None),
    }
    for name, (metavar, summary, default) in options.items():
        is_path = name in ("--trace", "--write", "--plot")
        kind = Path if is_path else str
        # Not cluster.workers, which launch and keygen set by an option of this name.
        plan.add_argument(
            name,
            dest=f"plan_{name[2:].replace('-', '_')}",
            type=kind,
            metavar=metavar,
            default=default,
            help=summary,
        )
    plan.add_argument("--json", action="store_true", help="for programs")


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help="settings (default: ZENPS_CONFIG, else ./zenps.toml)"
    )
    common.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="one setting, above environment and file; may be repeated",
    )
    return common


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= WEEK_SECONDS:  # NaN is not either
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, above 0 and up to {WEEK_SECONDS}")
    return value
