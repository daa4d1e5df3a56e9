"""Ray cluster: scheduler and servers as Ray actors, beside the workers of Ray Train."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket as net
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray

from zenps.config import sources
from zenps.config.settings import Config
from zenps.errors import DeadlineError
from zenps.observe import log

__all__ = ["Cluster"]

logger = logging.getLogger("zenps.ray")


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """Scheduler and servers of one job, as long as the block lasts.

    ::

        with Cluster(workers=2, servers=2) as cluster:
            TorchTrainer(cluster.wrap(train), scaling_config=ScalingConfig(num_workers=2)).fit()

    A worker that fails ends the job, so Ray Train must not start it again in the same block.

    Args:
        workers: those of Ray Train.
        servers: each takes a CPU of the Ray cluster. Ray spreads them over its nodes.
        settings: of all roles, as ``"section.field=value"``. Settings of the environment and of
            ``zenps.toml`` apply to workers only.

    Raises:
        ConfigError: a setting is wrong.
        DeadlineError: Ray has not started scheduler and servers within ``cluster.rendezvous_seconds``.
    """

    def __init__(self, workers: int, servers: int = 1, settings: Sequence[str] = ()) -> None:
        own = [f"cluster.workers={workers}", f"cluster.servers={servers}"]
        self._settings = [*sources.list_of(settings), *own]
        config = _load(self._settings)
        self._servers = config.cluster.servers
        self._seconds = config.cluster.rendezvous_seconds
        self._actors: list[Any] = []

    def __enter__(self) -> Cluster:
        try:
            (address,) = self._start("scheduler", num_cpus=0)
            self._settings.append(f"cluster.scheduler={address}")
            self._start("server", self._servers, num_cpus=1, scheduling_strategy="SPREAD")
        except BaseException:  # Ctrl-C too: no actor may be left behind
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def wrap(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``train`` between ``zenps.init()`` and ``zenps.shutdown()``, for a trainer of Ray Train."""
        settings = list(self._settings)

        @functools.wraps(train)
        def wrapped(*arguments: Any) -> Any:
            # Imported here, because it loads torch, which the scheduler's actor does not need.
            from zenps.worker.api import init, shutdown

            init(sets=settings)
            try:
                return train(*arguments)
            finally:
                shutdown()

        return wrapped

    def _start(self, role: str, count: int = 1, **options: Any) -> list[str]:
        """Starts actors, and returns what their role says once it runs."""
        actors = [ray.remote(_Role).options(**options).remote() for _ in range(count)]
        self._actors += actors
        starting = [actor.start.remote(role, self._settings) for actor in actors]
        try:
            found: list[str] = ray.get(starting, timeout=self._seconds)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"Ray actors: expected {count} {role}(s) with {options['num_cpus']} CPU each within "
                f"cluster.rendezvous_seconds = {self._seconds:g}, got fewer; see `ray status` for free CPUs"
            ) from None
        return found


class _Role:
    """The actor: a role on a thread, which ends with the actor."""

    def start(self, role: str, settings: Sequence[str]) -> str:
        """Starts the role, and returns the address of a scheduler once it listens; empty for a server."""
        if role == "scheduler":
            settings = [*settings, f"cluster.scheduler={_free_address()}"]
        else:  # a sum would take a thread for each core of the node, whatever the actor reserves
            settings = ["kernels.threads=1", *settings]
        config = _load(settings)
        log.setup(config.log, role)
        started: SimpleQueue[str | Exception] = SimpleQueue()

        def serve() -> None:
            try:
                if role == "scheduler":
                    from zenps.scheduler import service as scheduler

                    scheduler.serve(config, started.put)
                else:
                    from zenps.server import service as server

                    started.put("")
                    server.serve(config)
            except Exception as error:  # noqa: BLE001  # nobody waits for the end of this thread
                logger.error("%s", error)
                started.put(error)

        threading.Thread(target=serve, name=f"zenps-{role}", daemon=True).start()
        outcome = started.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _load(settings: Sequence[str]) -> Config:
    """Returns the configuration by ``settings`` alone: actors have other environments and directories."""
    return sources.load(sets=settings, file=Path(os.devnull), environ={}).config


def _free_address() -> str:
    """Returns an address of this node that nobody listens on."""
    host: str = ray.util.get_node_ip_address()
    with net.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
