"""Environment variables of the processes of a local cluster."""

from __future__ import annotations

import os
import socket as net
from collections.abc import Mapping
from typing import Final

from zenps.config.settings import WEEK_SECONDS, Config
from zenps.config.sources import variable_of
from zenps.config.values import parse_address
from zenps.errors import ConfigError
from zenps.keys import load_keys

_TORCHRUN: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set for workers, of https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables"""

_LOOPBACK: Final = "127.0.0.1"


def environments(
    config: Config, base: Mapping[str, str], *, torchrun_env: bool = True
) -> dict[str, dict[str, str]]:
    """Returns the variables of each process, by its name, such as ``server 0``, in the order of starting.

    Args:
        config: the settings of the cluster. The first process has its fixed ports, the next ones those after.
        base: variables of all processes; settings in it must give ``config``. Those of an agent of torchrun,
            which does not run these workers, are left out.
        torchrun_env: workers have the variables that torchrun sets. Otherwise they have none of these, also
            none that are in ``base``.

    Raises:
        ConfigError: ``cluster.scheduler`` is not on this machine, ports run out, or a node has no keys.
    """
    _check_scheduler(config.cluster.scheduler)
    cluster = config.cluster
    names = ["scheduler", *(f"server {rank}" for rank in range(cluster.servers))]
    names += [f"worker {rank}" for rank in range(cluster.workers)]
    cores = len(os.sched_getaffinity(0))
    own_cores = str(max(1, cores // (cluster.workers + cluster.servers)))
    # A process knows the workers of its host, but not the servers.
    threads = {} if config.kernels.threads else {"ZENPS_KERNELS_THREADS": own_cores}
    # The store would be that of the agent, and workers would wait to be started again.
    inherited = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    common = {
        # torch starts a thread per core in every process, which is too many. torchrun's choice, 1, leaves
        # cores idle if there are few processes.
        "OMP_NUM_THREADS": own_cores,
        # Python buffers output into a pipe: it would come late.
        "PYTHONUNBUFFERED": "1",
        **threads,
        **inherited,
        "ZENPS_CLUSTER_WORKERS": str(cluster.workers),
        "ZENPS_CLUSTER_SERVERS": str(cluster.servers),
    }
    _check_keys(config)
    master_port = str(_free_port())
    found = {}
    for index, name in enumerate(names):
        role, _, rank = name.partition(" ")
        environment = common | _own_port("metrics.port", config.metrics.port, index)
        if role == "scheduler":
            # Workers may join again as long as they run, and launch reports the end of the last one.
            environment["ZENPS_CLUSTER_REJOIN_SECONDS"] = str(WEEK_SECONDS)
        elif role == "server":
            environment |= {"RANK": rank} | _own_port("cluster.server_port", cluster.server_port, int(rank))
        elif torchrun_env:
            # A worker adds its LOCAL_RANK, which is its rank here.
            environment |= _own_port("metrics.port", config.metrics.port, 1 + cluster.servers)
            size = str(cluster.workers)
            values = (rank, rank, size, size, _LOOPBACK, master_port)
            environment |= dict(zip(_TORCHRUN, values, strict=True))
        else:
            environment = {key: value for key, value in environment.items() if key not in _TORCHRUN}
            # BytePS's name for the rank, which the supervisor must know to tell whose process has ended.
            environment["DMLC_WORKER_ID"] = rank
        found[name] = environment
    return found


def _check_keys(config: Config) -> None:
    """Loads the keys of all processes, so that an error is reported once, not by each process."""
    security = config.security
    if security.secret and not os.path.isdir(security.secret):
        raise ConfigError("security.secret", security.secret, "the directory with the secrets of all nodes")
    load_keys(security, "scheduler")
    load_keys(security, "operator")
    for rank in range(config.cluster.servers):
        load_keys(security, "server", rank)
    for rank in range(config.cluster.workers):
        load_keys(security, "worker", rank)


def _own_port(name: str, first: int, index: int) -> dict[str, str]:
    """Returns the variable for the port of one process: the first has a fixed port, the next those after."""
    if first <= 0:
        return {}
    if first + index > 65535:
        raise ConfigError(
            name, first, f"a port that leaves room for {index} more after it, or 0 for any free"
        )
    return {variable_of(name): str(first + index)}


def _free_port() -> int:
    try:
        with net.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        reason = f"{_LOOPBACK} as an address of this machine ({error.strerror}); see: ip addr show lo"
        raise ConfigError("MASTER_ADDR", _LOOPBACK, reason) from error


def _check_scheduler(address: str) -> None:
    if not address:
        return
    host, port = parse_address(address)
    try:
        family, kind, _, _, target = net.getaddrinfo(host, port, type=net.SOCK_STREAM)[0]
        with net.socket(family, kind) as probe:
            probe.bind((target[0], 0, *target[2:]))
    except OSError as error:
        raise ConfigError(
            "cluster.scheduler",
            address,
            "an address of this machine, or '' for any free port, to launch here",
        ) from error
