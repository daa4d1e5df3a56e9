"""Local launcher: runs a whole cluster on this machine, with one scheduler, servers and workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from zenps.config.settings import Config
from zenps.observe.timeline import collected

from .environments import environments
from .processes import Program, handled_signals
from .supervisor import Supervisor

_ZENPS: Final = (sys.executable, "-P", "-m", "zenps.cli")
"""Without -P, Python would import a random.py in the working directory instead of its own."""


def launch(
    config: Config,
    command: Sequence[str],
    environment: Mapping[str, str],
    prefix: Callable[[str], Sequence[str]] = lambda _: (),
    *,
    torchrun_env: bool = True,
) -> int:
    """Runs ``command`` as every worker of a new cluster; returns when no process of it is left.

    Args:
        config: ``cluster.workers`` and ``cluster.servers`` say how many. ``cluster.scheduler``, if it is set,
            must be an address of this machine.
        command: program and arguments of a worker.
        environment: of all processes; settings in it must give ``config``.
        prefix: returns the beginning of a process's command, by its name, such as ``server 0``. It is a
            program that executes the rest in its own place, as ``env`` does.
        torchrun_env: workers have the environment variables that torchrun sets.

    Returns:
        0 if all workers ended with 0. Otherwise the exit code of the process that failed first, or 128 + n if
        signal n ended it or this process; all other processes are ended then. Of an elastic job: the exit
        code of the worker that ended last.

    Raises:
        ConfigError: ``cluster.scheduler`` is not on this machine, fixed ports run out, or ``sync.trace``
            cannot be written.
    """
    environment_of = environments(config, environment, torchrun_env=torchrun_env)
    with collected(config.sync.trace) as trace:
        traced = {"ZENPS_SYNC_TRACE": trace} if trace else {}
        programs = []
        for name, variables in environment_of.items():
            role = name.partition(" ")[0]
            own = command if role == "worker" else (*_ZENPS, role)
            programs.append(Program(name, [*prefix(name), *own], {**variables, **traced}))
        supervisor = Supervisor(config, programs)
        with handled_signals(supervisor.on_signal) as wake_fd:
            supervisor.wake_by(wake_fd)
            try:
                return supervisor.run()
            finally:
                supervisor.close()
