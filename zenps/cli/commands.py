"""Subcommands of ``zenps``. Only the subcommand that runs a role imports it, and torch with it."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from zenps.config.settings import Config
from zenps.config.sources import (
    Loaded,
    describe,
    load,
    rank_from_environment,
    require_cluster,
    variable_of,
)
from zenps.errors import ConfigError, ZenPSError, listing
from zenps.keys import LIST_NAME, generate, load_any_keys, load_keys
from zenps.observe.log import setup as setup_log
from zenps.termination import TERMINATION

from .arguments import make_parser, split_command
from .exit_codes import CANNOT_START, FAILED, REFUSED, SIGNALLED
from .local_clusters import find_cluster, find_clusters, published, write_address

logger = logging.getLogger("zenps.cli")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``zenps`` with the arguments ``argv`` (default: those of the process) and returns its exit code.

    0: done. 1: the cluster or a check failed, or output cannot be written. 2: a setting or an argument was
    refused, in one line. Otherwise ``launch`` and ``worker`` have the exit code of their command.
    """
    options, command = split_command(sys.argv[1:] if argv is None else argv)
    args, unknown = make_parser().parse_known_args(options)
    if unknown:  # parse_args() would show the usage of all subcommands
        hint = "" if command or args.takes_command is False else "; CMD stands after --"
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if args.takes_command is not None and bool(command) != args.takes_command:
        args.parser.error("expected -- CMD [ARG ...]" if args.takes_command else "unexpected -- CMD")
    args.command = command
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # it was closed, as by `>&-`
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every encoding has the characters of tables
    try:
        code = _RUN[args.subcommand](args)
        sys.stdout.flush()  # so that a failure to write is reported here, not at exit
        return code
    except ConfigError as error:
        _complain(error)
        return REFUSED
    except ZenPSError as error:
        _complain(error)
        return FAILED
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except BrokenPipeError:  # the reader of our output is gone
        _drop(sys.stdout)
        return SIGNALLED + signal.SIGPIPE
    except OSError as error:
        _drop(sys.stdout)
        _complain(error)
        return FAILED


def _drop(stream: TextIO) -> None:
    """Drops what is written to ``stream``: Python flushes it once more at exit, which must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(error: Exception) -> None:
    try:
        print("zenps:", *str(error).splitlines(), file=sys.stderr)
    except OSError:  # the exit code still says what happened
        _drop(sys.stderr)


def _load(args: argparse.Namespace) -> Loaded:
    """Loads the settings with the options on top."""
    counts = {f"cluster.{name}s": getattr(args, f"{name}s", None) for name in ("worker", "server")}
    more = [f"{name}={count}" for name, count in counts.items() if count is not None]
    return load(sets=[*args.set, *more], file=args.config)


def _load_or_find(args: argparse.Namespace) -> Config:
    """Loads the settings. Without ``cluster.scheduler``, they become those of a cluster on this machine."""
    loaded = _load(args)
    if loaded.config.cluster.scheduler:
        return loaded.config
    found = find_cluster(loaded)
    print(f"zenps: found your cluster at {found.address}", file=sys.stderr)
    return found.configure(loaded.config)


def _require_command(command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError("CMD", command[0], "a program that can be run, such as: python train.py")


def _environment(args: argparse.Namespace, loaded: Loaded) -> dict[str, str]:
    """Returns the environment of a child process: ours, with the options added as variables.

    The child finds all other settings as we did, so their precedence is the same, and ``zenps config`` shows
    their sources.
    """
    environment = dict(os.environ)
    if args.config is not None:
        file = args.config.resolve()
        # A pipe without a name, as of <(...), resolves to a file that does not exist.
        if file.is_fifo() or not file.exists():
            raise ConfigError("--config", str(args.config), "a file that can be read again, not a pipe")
        environment["ZENPS_CONFIG"] = str(file)
    for setting in describe(loaded):
        if setting.source == "--set":
            environment[variable_of(setting.name)] = str(setting.value)
    return environment


# ── roles ───────────────────────────────────────────────────────────────────────────────────────


def _serve(role: str, config: Config, serve: Callable[[], None]) -> int:
    """Runs a role until the job ends, or until SIGTERM or Ctrl-C; its sockets are closed in each case."""
    logger = setup_log(config.log, role, owns_process=True)
    TERMINATION.install(SIGNALLED)
    try:
        serve()
    except ConfigError as error:
        if config.log.format == "text":
            raise  # main() reports it, as before the log was set up
        logger.error("%s", error)
        return REFUSED
    except ZenPSError as error:
        logger.error("%s", error)
        return FAILED
    except Exception:  # a log line like all others, with its traceback
        logger.exception("ended by an unexpected error")
        return FAILED
    return 0


def _scheduler(args: argparse.Namespace) -> int:
    config = _load(args).config
    from zenps.scheduler import service

    with contextlib.ExitStack() as stack:

        def on_ready(address: str) -> None:
            # A program that asks for the address starts the nodes itself.
            if not config.cluster.scheduler and args.print_address is None:
                logger.warning("cluster.scheduler is not set: on loopback, only this machine can join")
            stack.enter_context(published(config.cluster, address))
            write_address(args.print_address, address)

        return _serve("scheduler", config, lambda: service.serve(config, on_ready))


def _server(args: argparse.Namespace) -> int:
    config = _load(args).config
    if not config.cluster.scheduler:
        allowed = "'host:port' of the scheduler, by --set, ZENPS_CLUSTER_SCHEDULER or zenps.toml"
        raise ConfigError("cluster.scheduler", "", allowed)
    from zenps.server import service

    return _serve("server", config, lambda: service.serve(config))


def _worker(args: argparse.Namespace) -> int:
    # zenps.init() checks a dotted sync.partition: only CMD has the sys.path to find it.
    loaded = _load(args)
    require_cluster(loaded)
    _require_command(args.command)
    load_keys(loaded.config.security, "worker", rank_from_environment())
    environment = _environment(args, loaded)
    # Python ignores these signals. CMD would inherit that, unlike one that a shell or launch starts.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        os.execvpe(args.command[0], args.command, environment)
    except OSError as error:
        for number, handler in before.items():
            signal.signal(number, handler)
        print(f"zenps: {args.command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return CANNOT_START


def _launch(args: argparse.Namespace) -> int:
    loaded = _load(args)
    _require_command(args.command)
    from .launch import launch

    environment = _environment(args, loaded)
    return launch(loaded.config, args.command, environment, torchrun_env=not args.no_torchrun_env)


# ── questions to a cluster ──────────────────────────────────────────────────────────────────────────


def _status(args: argparse.Namespace) -> int:
    config = _load_or_find(args)
    from zenps.wire.status import to_json

    from .printing import show_status, watch_status
    from .status import fetch

    keys = load_any_keys(config.security)
    ask = partial(fetch, config.cluster, args.timeout_seconds, keys)
    if args.json:
        print(to_json(ask()))
    elif args.watch:
        watch_status(ask)
    else:
        show_status(ask())
    return 0


def _health(args: argparse.Namespace) -> int:
    config = _load_or_find(args)
    from .health import check

    # A scheduler has no rank, though the environment that it shares with other nodes may have one.
    rank = rank_from_environment() if args.role == "server" else None
    check(config, args.role, rank, args.timeout_seconds)
    return 0


def _drain(args: argparse.Namespace) -> int:
    from .status import drain

    if not 0 <= args.rank < 1 << 16:
        raise ConfigError("RANK", args.rank, "a server's rank, 0 to 65535")
    config = _load_or_find(args)
    seconds = args.timeout_seconds or config.cluster.lease_seconds + 5.0
    drain(config.cluster, args.rank, seconds, load_keys(config.security, "operator"))
    print(f"server {args.rank} has no slots any more and ends")
    return 0


def _config(args: argparse.Namespace) -> int:
    from .printing import settings_to_json, show_settings

    settings = describe(_load(args))
    if args.json:
        print(settings_to_json(settings))
    else:
        show_settings(settings)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    loaded = _load(args)
    from .doctor import examine
    from .printing import show_checks

    checks = examine(loaded.config, find_clusters(loaded))
    show_checks(checks)
    return FAILED if any(check.verdict == "fail" for check in checks) else 0


def _trace(args: argparse.Namespace) -> int:
    from zenps.observe.timeline import merge

    _load(args)  # not used here, but every subcommand refuses wrong settings
    count = merge(args.parts, args.out)
    print(f"{args.out}: {count} process(es); chrome://tracing and https://ui.perfetto.dev show it")
    return 0


def _plan(args: argparse.Namespace) -> int:
    config = _load(args).config
    from .plan.command import Request, answer

    request = Request.from_options(args, config)
    with request.trace_file() as trace:
        if args.command and (code := _record(args, request.steps, request.local_workers, trace)):
            return code
        answer(request, trace)
    return 0


def _record(args: argparse.Namespace, steps: int, workers: int, trace: Path) -> int:
    """Runs CMD on a local cluster, whatever the settings say of the cluster to plan for."""
    _require_command(args.command)
    from .plan.recorded import record

    own = [f"cluster.workers={workers}", "cluster.servers=1", "cluster.scheduler=", "sync.scheme=zenps"]
    own += ["cluster.host=", "cluster.server_port=0", "metrics.port=-1", "status.port=-1"]
    own += ["sync.consistency=bsp", "sync.trace=", "security.keys=", "security.secret="]
    args.set = [*args.set, *own]
    loaded = _load(args)
    return record(loaded.config, args.command, _environment(args, loaded), steps, trace)


def _keygen(args: argparse.Namespace) -> int:
    # A signal must not leave a secret without its line in the list: the next run would refuse it.
    TERMINATION.install(SIGNALLED)
    cluster = _load(args).config.cluster
    made = generate(args.directory, cluster.workers, cluster.servers)
    print(f"{len(made)} new key(s) in {args.directory}" + (f": {listing(made)}" if made else ""))
    print(f"every node needs {LIST_NAME} and the .secret of its own name, and no other .secret")
    return 0


_RUN: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "launch": _launch,
    "scheduler": _scheduler,
    "server": _server,
    "worker": _worker,
    "status": _status,
    "health": _health,
    "drain": _drain,
    "config": _config,
    "doctor": _doctor,
    "trace": _trace,
    "plan": _plan,
    "keygen": _keygen,
}
