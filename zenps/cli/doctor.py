"""Diagnostics of ``zenps doctor``, for a cluster that does not start, hangs, or is slow."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket as net
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from zenps.config.settings import GIB, PARTITIONS, SPARSIFIERS, Config
from zenps.config.shared import differing_settings, shared_settings
from zenps.config.sizes import server_bytes
from zenps.config.sources import (
    allows_two_levels,
    check_partition,
    kernel_threads,
    local_size_from_environment,
)
from zenps.errors import ConfigError, DeadlineError, listing
from zenps.kernels.native.library import ADVICE, open_library
from zenps.keys import load_any_keys
from zenps.schemes.registry import scheme_of
from zenps.wire.addresses import bindable, find_host, why_unreachable
from zenps.wire.scheduler_messages import Status

from .local_clusters import LocalCluster
from .status import fetch

TIMEOUT_SECONDS: Final = 2.0

OTHER_FILES: Final = 128
"""Files, pipes and sockets of a Python process with torch and ZeroMQ, besides the connections to peers."""


class Check(NamedTuple):
    """One line of the report; ``advice`` says what to do, if there is something to do."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def examine(config: Config, found: Sequence[LocalCluster] = ()) -> list[Check]:
    """Runs all checks of this machine, and then of its connection to the cluster, within a few seconds.

    Args:
        config: the settings.
        found: the user's clusters on this machine. If the settings name none, one of these is checked.
    """
    return [
        *_versions(),
        *_torch(),
        _partition(config),
        _sparsifier(config),
        _kernels(config),
        _files(config),
        _memory(config),
        _metrics_port(config),
        _keys(config),
        *_cluster(config, found),
    ]


# ── this machine ────────────────────────────────────────────────────────────────────────────────


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")
    for package in ("zenps", "torch", "pyzmq", "msgpack"):
        try:
            yield Check(package, "ok", importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, "fail", "not installed", "pip install . in a checkout of ZenPS")


def _torch() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that it needs
        yield Check("torch", "fail", f"cannot be imported: {error}", "install it again")
        return
    cores, here = len(os.sched_getaffinity(0)), local_size_from_environment()
    threads = torch.get_num_threads()
    found = f"{threads} per process, {cores} core(s), {here} worker(s) on this host"
    if threads * here > cores:
        advice = f"set OMP_NUM_THREADS={max(1, cores // here)}, or processes compete for the cores"
        yield Check("torch threads", "warn", found, advice)
    else:
        yield Check("torch threads", "ok", found)
    if not torch.cuda.is_available():
        yield Check("cuda", "ok", "no GPU found: everything runs on the CPU")
        return
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    if importlib.util.find_spec("cupy") is None:
        advice = "pip install cupy-cuda13x, or gradients on a GPU are refused"
        yield Check("cuda", "warn", f"{names}, but no CuPy", advice)
    else:
        yield Check("cuda", "ok", names)


def _partition(config: Config) -> Check:
    name = config.sync.partition
    if name in PARTITIONS:
        return Check("sync.partition", "ok", name)
    try:
        check_partition(config)
    except ConfigError as error:
        return _no_plugin(error)
    return Check("sync.partition", "ok", name)


def _sparsifier(config: Config) -> Check:
    name = config.sync.sparsifier
    if name in SPARSIFIERS:
        return Check("sync.sparsifier", "ok", name)
    # Imports torch.
    from zenps.sparsifiers.registry import check_sparsifier, sparsifier_class

    try:
        sparsifier_class(name)
    except ConfigError as error:
        return _no_plugin(error)
    try:
        check_sparsifier(config, scheme_of(config.sync.scheme))
    except ConfigError as error:
        return Check("sync.sparsifier", "fail", str(error), "take another sparsifier or scheme")
    return Check("sync.sparsifier", "ok", name)


def _no_plugin(error: ConfigError) -> Check:
    if isinstance(error.__cause__, ModuleNotFoundError):
        advice = "put its folder on PYTHONPATH, unless it lies beside the training script"
    else:
        advice = "name another, or mend this one"
    return Check(error.field, "warn", str(error), advice)


def _kernels(config: Config) -> Check:
    wanted = config.kernels.backend
    if wanted == "torch":
        return Check("kernels", "ok", "torch's")
    opened = open_library()
    if isinstance(opened, str):
        verdict: Literal["warn", "fail"] = "fail" if wanted == "native" else "warn"
        return Check("kernels", verdict, f"torch's: native ones {opened}", ADVICE)
    return Check("kernels", "ok", f"native, {kernel_threads(config)} thread(s)")


def _files(config: Config) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.cluster.workers + config.cluster.servers + OTHER_FILES
    found = f"{soft} allowed, about {needed} needed"
    if soft != resource.RLIM_INFINITY and soft < needed:
        return Check("open files", "fail", found, f"ulimit -n {needed}, or LimitNOFILE in a systemd unit")
    return Check("open files", "ok", found)


def _memory(config: Config) -> Check:
    available, needed = _available_bytes(), server_bytes(config)
    budget = config.cluster.server_budget_bytes
    found = (
        f"{available / GIB:.1f} GiB available; with a budget of {budget / GIB:.1f} GiB "
        f"a server may take {needed / GIB:.1f} GiB"
    )
    if available < needed:
        advice = "lower cluster.server_budget_bytes where servers run here, or they may be killed"
        return Check("memory", "warn", found, advice)
    return Check("memory", "ok", found)


def _available_bytes() -> int:
    """Returns the available memory, or the limit of the container (cgroup v2) if that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    return available if text == "max" else min(available, int(text))


def _metrics_port(config: Config) -> Check:
    host, port = config.metrics.host, config.metrics.port
    if port == -1:
        return Check("metrics", "ok", "off")
    return _bind("metrics", host, port, "stop what listens there, or set metrics.host and metrics.port")


def _keys(config: Config) -> Check:
    try:
        keys = load_any_keys(config.security)
    except ConfigError as error:
        return Check(
            "keys", "fail", str(error), "zenps keygen makes keys for all nodes; copy this node's here"
        )
    if keys is None:
        return Check("keys", "ok", "none: for machines that trust one another")
    return Check("keys", "ok", f"that of {keys.name}, one of {len(keys.listed.owners)} in {keys.listed.file}")


def _bind(name: str, host: str | None, port: int, advice: str, known_as: str = "") -> Check:
    """Checks whether a port can be listened on; None: on all addresses of this machine."""
    where = f"{known_as or host}{'' if host else ', on all addresses of this machine'}"
    shown = f"{where}, {f'port {port}' if port else 'any free port'}"
    try:
        found = net.getaddrinfo(host, port, type=net.SOCK_STREAM, flags=net.AI_PASSIVE)
        family, kind, _, _, target = found[0]
        with net.socket(family, kind) as probe:
            # As ZeroMQ and the metrics endpoint do: a port is free although its last connections linger.
            probe.setsockopt(net.SOL_SOCKET, net.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Check(
                name, "warn", f"{shown}: in use", f"expected if a node of yours runs here; else {advice}"
            )
        return Check(name, "fail", f"{shown}: {error.strerror}", advice)
    return Check(name, "ok", shown)


# ── the cluster ─────────────────────────────────────────────────────────────────────────────────


def _cluster(config: Config, found: Sequence[LocalCluster]) -> Iterator[Check]:
    address = config.cluster.scheduler
    if not address and len(found) > 1:
        advice = f"choose one: {listing(found, '; ')}"
        yield Check("scheduler", "warn", f"none is configured; {len(found)} run here", advice)
        return
    if not address and found:
        # Its workers have settings of their own, which need not be those of this command.
        yield from _scheduler(found[0].configure(config))
        return
    if not address:
        advice = "" if config.cluster.workers == 1 else "set cluster.scheduler, or use zenps launch"
        verdict: Literal["ok", "fail"] = "fail" if advice else "ok"
        yield Check("scheduler", verdict, "none is configured: a worker runs alone", advice)
        return
    try:
        own = config.cluster.host or find_host(address)
    except ConfigError as error:
        yield Check("own address", "fail", str(error), "check the name, DNS and the routes of this machine")
        return
    yield _own_address(own, config.cluster.server_port)
    yield from _scheduler(config, is_shared=True)


def _own_address(host: str, port: int) -> Check:
    """Checks the address of a server here. Behind NAT this machine does not own it: servers listen on all
    addresses."""
    advice = "set cluster.host to an address that leads here, cluster.server_port to 0 or a free port"
    try:
        here = bindable(host)
    except OSError as error:
        return Check("own address", "fail", f"{host}: {error.strerror}", advice)
    return _bind("own address", None if here == "*" else here, port, advice, known_as=host)


def _scheduler(config: Config, *, is_shared: bool = False) -> Iterator[Check]:
    """Checks the cluster at ``cluster.scheduler``; if ``is_shared``, also if workers here may join it."""
    address = config.cluster.scheduler
    if reason := why_unreachable(address, TIMEOUT_SECONDS):
        advice = "start it with zenps scheduler; let the port through every firewall on the way"
        yield Check("scheduler", "fail", f"{address}: {reason}", advice)
        return
    try:
        status = fetch(config.cluster, TIMEOUT_SECONDS, load_any_keys(config.security))
    except ConfigError as error:
        yield Check("scheduler", "fail", str(error), "give both the same security.keys")
        return
    except DeadlineError as error:
        advice = (
            f"something else may listen there, or the scheduler of another job than {config.cluster.job!r}, "
            "or of another version of ZenPS (zenps --version)"
        )
        yield Check("scheduler", "fail", str(error), advice)
        return
    yield Check("scheduler", "ok", f"{address}: {status.state}, epoch {status.epoch}")
    yield _nodes(config, status)
    yield _levels(config, status)
    if is_shared:
        yield _same_settings(config, status)


def _nodes(config: Config, status: Status) -> Check:
    """Checks which nodes the cluster waits for, by our own configuration, and which it has lost."""
    expected = {"worker": config.cluster.workers, "server": config.cluster.servers}
    present = {
        role: sum(node.role == role and node.state == "present" for node in status.nodes) for role in expected
    }
    found = " and ".join(f"{present[role]} of {expected[role]} {role}(s)" for role in expected)
    lost = [f"{node.role} {node.rank} ({node.host})" for node in status.nodes if node.state == "lost"]
    if lost and status.state == "failed":
        return Check("nodes", "fail", f"lost: {', '.join(lost)}", "see their logs; then start the job again")
    if lost:
        advice = "see their logs; the job goes on without them: add another in place of each"
        return Check("nodes", "warn", f"{found}; lost: {', '.join(lost)}", advice)
    if status.state == "gathering" and present != expected:
        return Check("nodes", "warn", f"gathering: {found}", "the cluster waits for the others: start them")
    return Check("nodes", "ok", found)


def _levels(config: Config, status: Status) -> Check:
    """Checks if workers share a host, and if they use hierarchical reduction then."""
    hosts = Counter(node.host for node in status.nodes if node.role == "worker" and node.state == "present")
    found = f"{config.sync.levels}, with {hosts.total()} worker(s) on {len(hosts)} host(s)"
    if config.sync.levels == 2 and len(hosts) == 1:
        return Check("sync.levels", "ok", f"{found}: they reduce there, not at servers")
    if config.sync.levels == 1 and hosts.total() > len(hosts) and allows_two_levels(config):
        advice = "set 2: workers of a host then reduce there first, which is faster; see docs/schemes.md"
        return Check("sync.levels", "ok", found, advice)
    return Check("sync.levels", "ok", found)


def _same_settings(config: Config, status: Status) -> Check:
    """Checks the shared settings: the scheduler refuses a worker that has different ones."""
    here, there = shared_settings(config), status.settings
    differing = [
        f"{name} is {here.get(name)!r} here and {there.get(name)!r} there"
        for name in differing_settings(here, there)
    ]
    if differing:
        return Check("shared settings", "fail", "; ".join(differing), "use one configuration on all nodes")
    return Check("shared settings", "ok", "as the scheduler's")
