"""Argument parser of the command ``zenps``: subcommands, options, and the command of a worker."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zenps.config.settings import WEEK_SECONDS

_Add = Callable[..., argparse.ArgumentParser]
"""Adds a subcommand with a name and a summary."""


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits ``options -- CMD`` at ``--``: argparse does that differently in each Python version."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options before ``--``.

    Its result has ``subcommand``, the ``parser`` of the subcommand, for errors, and ``takes_command``: True
    if CMD must follow, False if it must not, None if it may.
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
    note: str = "",
) -> argparse.ArgumentParser:
    usage = f"zenps {name} [options]{operand}"
    usage += {True: " -- CMD [ARG ...]", None: " [-- CMD [ARG ...]]", False: ""}[command]
    described = f"{summary[0].upper()}{summary[1:]}. {note}".strip()
    sub = subcommands.add_parser(name, parents=[common], usage=usage, help=summary, description=described)
    sub.set_defaults(parser=sub, takes_command=command)
    return sub


def _add_roles(add: _Add) -> None:
    variables = "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    summary = "run CMD as the workers of a whole cluster on this machine"
    launch = add("launch", summary, command=True, note=f"It sets torchrun's variables for them: {variables}.")
    _add_counts(launch)
    launch.add_argument(
        "--no-torchrun-env",
        action="store_true",
        help="leave torchrun's variables out, for a CMD that would start torch.distributed when it sees them",
    )
    alone = "Without cluster.scheduler it listens on loopback at a free port, and only this machine can join."
    scheduler = add("scheduler", "run the scheduler, at cluster.scheduler", note=alone)
    scheduler.add_argument(
        "--print-address",
        type=int,
        metavar="FD",
        help="write host:port to this file descriptor once nodes can register",
    )
    add("server", "run one server")
    add("worker", "run CMD as one worker, with these settings", command=True)


def _add_questions(add: _Add) -> None:
    """Adds the subcommands that ask a live cluster or this machine."""
    found = "Without cluster.scheduler, this asks the one cluster that you run on this machine."
    status = add("status", "show a live cluster", note=found)
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, for programs")
    form.add_argument("--watch", action="store_true", help="repeat every second, until Ctrl-C")
    probe = "check a role, for a container's probe: exit code 0 if it is healthy, 1 if not"
    health = add("health", probe, note=f"A wrong setting gives 2. {found}")
    health.add_argument("--role", choices=("scheduler", "server"), required=True, help="role of this node")
    drain = add("drain", "make a server hand its slots to the others and end", operand=" RANK", note=found)
    drain.add_argument("rank", type=int, metavar="RANK", help="rank of the server, as zenps status shows it")
    until_confirmed = "cluster.lease_seconds + 5: a server that does not confirm is lost by then"
    for asking, seconds, shown in ((status, 5.0, "5"), (health, 5.0, "5"), (drain, None, until_confirmed)):
        summary = f"how long to wait (default: {shown})"
        asking.add_argument("--timeout-seconds", type=_seconds, default=seconds, metavar="S", help=summary)
    config = add("config", "show every setting and where its value came from")
    config.add_argument("--json", action="store_true", help="print JSON with descriptions, for programs")
    add("doctor", "check this machine and its connection to the cluster", note=found)


def _add_tools(add: _Add) -> None:
    trace = add("trace", "merge the timelines of several processes into one", operand=" OUT PART...")
    trace.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    trace.add_argument("parts", type=Path, nargs="+", metavar="PART", help="what a role wrote by sync.trace")
    _add_plan(add("plan", "recommend a scheme for CMD, or for a trace of it, on a network", command=None))
    keygen = add("keygen", "create the missing keys of all nodes in DIR", operand=" DIR")
    keygen.add_argument("directory", type=Path, metavar="DIR", help="created if need be, for its owner only")
    _add_counts(keygen)


def _add_counts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", metavar="N", help="number of workers: cluster.workers")
    parser.add_argument("--servers", metavar="M", help="number of servers: cluster.servers")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    options: dict[str, tuple[str, str, Any]] = {
        "--trace": ("FILE", "with CMD: keep the recording here; else: plan with this recording", None),
        "--steps": ("N", "how many steps of CMD to record (default: 20)", None),
        "--local-workers": ("N", "how many workers run CMD here (default: 2)", None),
        "--workers": (
            "N[,N...]",
            "number of workers to plan for, then others to compare "
            "(default: cluster.workers if above 1, else 8; compared with counts up to 1024)",
            None,
        ),
        "--servers": ("N", "hosts with only a server (default: 0, a server on each worker's host)", "0"),
        "--bandwidth": ("RATE", "of each host, in each direction (default: 10Gbit)", "10Gbit"),
        "--latency": ("TIME", "of one message (default: 50us)", "50us"),
        "--write": ("FILE", "set sync.scheme in this file, and sync.granule for single elements", None),
        "--plot": ("DIR", "draw curves into this folder; needs matplotlib", None),
    }
    for name, (metavar, summary, default) in options.items():
        is_path = name in ("--trace", "--write", "--plot")
        kind = Path if is_path else str
        # For launch and keygen, an option of this name sets cluster.workers.
        plan.add_argument(
            name,
            dest=f"plan_{name[2:].replace('-', '_')}",
            type=kind,
            metavar=metavar,
            default=default,
            help=summary,
        )
    plan.add_argument("--json", action="store_true", help="print JSON, for programs")


def _common_options() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help="settings file (default: ZENPS_CONFIG, else ./zenps.toml)"
    )
    common.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="one setting, which takes precedence over environment and file; may be repeated",
    )
    return common


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= WEEK_SECONDS:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, above 0 and up to {WEEK_SECONDS}")
    return value
