"""Testbed command: runs a training script on emulated hosts with slow links, all on this machine.

    python benchmarks/testbed.py --hosts 4 --mbit 200 -- python train.py

Each host is a network namespace with a link of its own, and runs one worker; the first has the scheduler.
Servers are with the workers, or with --apart on hosts of their own. Needs root and iproute2. Output and exit
code are those of `zenps launch`. The hosts are removed at the end, also after a kill.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

from hosts import Host, Hosts, why_no_delay, why_not_here

from zenps.cli.launch import launch
from zenps.config.sources import load, variable_of
from zenps.errors import ConfigError, ZenPSError

SCHEDULER_PORT: Final = 9100
MAX_HOSTS: Final = 128

EXIT_FAILED, EXIT_REFUSED = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all workers ended with 0. 2: an argument was refused. Otherwise as ``zenps launch`` has it."""
    options, command = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return run(options, command)
    except ConfigError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except (OSError, ZenPSError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return EXIT_FAILED


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the command behind ``--``. Exits where they are wrong, or the machine cannot do it."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python benchmarks/testbed.py [options] -- CMD [ARG ...]",
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="with a worker each (default: 2)")
    parser.add_argument("--servers", type=int, metavar="N", help="default: as many as hosts")
    parser.add_argument("--apart", action="store_true", help="servers on hosts of their own")
    parser.add_argument(
        "--mbit",
        type=float,
        default=200.0,
        metavar="X",
        help="of each link in each direction, Mbit/s; 0: as fast as the machine can (default: 200)",
    )
    parser.add_argument(
        "--racks", type=int, default=1, metavar="N", help="of neighbouring hosts (default: 1)"
    )
    parser.add_argument(
        "--uplink-mbit", type=float, default=0.0, metavar="X", help="of each rack, as --mbit (default: 0)"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="X", help="of each link and direction")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, as for zenps launch")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    options, command = parser.parse_args(given[:at]), given[at + 1 :]
    options.servers = options.hosts if options.servers is None else options.servers
    if not command:
        parser.error("expected -- CMD [ARG ...]")
    if shutil.which(command[0]) is None:
        parser.error(f"{command[0]}: expected a program that can be run, such as: python train.py")
    if options.hosts < 1 or options.servers < 1 or options.hosts + options.servers > MAX_HOSTS:
        parser.error(f"expected 1 host and server or more, and together {MAX_HOSTS} at most")
    if options.mbit < 0 or options.delay_ms < 0 or options.uplink_mbit < 0:
        parser.error("expected --mbit, --uplink-mbit and --delay-ms of 0 or more")
    if not 1 <= options.racks <= options.hosts or (options.uplink_mbit and options.racks == 1):
        parser.error(
            "expected --racks of at least 1, and at most as many as hosts; and of 2 for --uplink-mbit"
        )
    if reason := why_not_here() or (options.delay_ms and why_no_delay()):
        parser.error(reason)
    return options, command


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Makes the hosts and launches on them; the exit code."""
    sets = [*options.set, f"cluster.workers={options.hosts}", f"cluster.servers={options.servers}"]
    load(sets=sets, file=options.config)  # a wrong one is refused before any host is made
    workers = [f"host{rank}" for rank in range(options.hosts)]
    servers = [
        f"server{rank}" if options.apart else workers[rank % len(workers)] for rank in range(options.servers)
    ]
    where = {"scheduler": workers[0]}
    where |= {f"server {rank}": host for rank, host in enumerate(servers)}
    where |= {f"worker {rank}": host for rank, host in enumerate(workers)}
    networks = dict.fromkeys([*workers, *servers], (0,))
    racks = racks_of(workers, options.racks) | racks_of(servers, options.racks) if options.racks > 1 else {}
    with Hosts(
        networks,
        int(options.mbit * 1e6),
        delay_seconds=options.delay_ms / 1e3,
        racks=racks,
        uplink_bits_per_second=int(options.uplink_mbit * 1e6),
    ) as hosts:
        head = hosts[workers[0]]
        print(f"testbed: ip netns exec {head.namespace} CMD runs CMD on {head.name}", file=sys.stderr)
        sets.append(f"cluster.scheduler={head.ipv4()}:{SCHEDULER_PORT}")
        given = dict(item.split("=", 1) for item in sets)
        environment = os.environ | {variable_of(name): value for name, value in given.items()}
        if options.config is not None:
            environment["ZENPS_CONFIG"] = str(options.config.resolve())
        config = load(environ=environment).config
        prefix = partial(prefix_of, {name: hosts[host] for name, host in where.items()}, head)
        return run_on(head, partial(launch, config, command, environment, prefix))


def racks_of(hosts: Sequence[str], count: int) -> dict[str, int]:
    """Deals hosts to racks: neighbours share one."""
    return {host: index * count // len(hosts) for index, host in enumerate(hosts)}


def prefix_of(where: Mapping[str, Host], head: Host, name: str) -> list[str]:
    """The command prefix that moves a process of that name to its host."""
    entering = where[name].entering()
    if not name.startswith("worker"):
        return entering
    # zenps launch knows of one host; gloo would go by the machine's name.
    alone = ["LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", f"MASTER_ADDR={head.ipv4()}", "GLOO_SOCKET_IFNAME=eth0"]
    return ["env", *alone, *entering]


def run_on(host: Host, function: Callable[[], int]) -> int:
    """The exit code that ``function`` returns on ``host``. Signals that ask for an end are passed on."""
    process = mp.get_context("fork").Process(target=_enter_and_run, args=(host, function))
    process.start()

    def pass_on(number: int, _: FrameType | None) -> None:
        if process.pid is not None:
            os.kill(process.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    process.join()
    code = process.exitcode
    assert code is not None
    return code if code >= 0 else 128 - code


def _enter_and_run(host: Host, function: Callable[[], int]) -> None:
    os.setpgid(0, 0)  # Ctrl-C comes by way of the parent alone
    host.enter()
    try:
        sys.exit(function())
    except ConfigError as error:
        print(f"testbed: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    sys.exit(main())
