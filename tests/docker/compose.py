"""Docker and Compose as their users call them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import waiting

COMPOSE_FILE = Path(__file__).parents[2] / "docker/compose.yaml"

Done = subprocess.CompletedProcess[str]


def call(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] = os.environ,
    stdin: str | None = None,
    seconds: float = 120,
) -> Done:
    """Runs a command to its end; its stdout has stderr in it."""
    return subprocess.run(
        command,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        timeout=seconds,
        check=False,
    )


def docker(*arguments: str, stdin: str | None = None, seconds: float = 120) -> Done:
    """``docker ARGUMENTS``, ended."""
    return call(["docker", *arguments], stdin=stdin, seconds=seconds)


eventually = functools.partial(waiting.eventually, seconds=300, pause_seconds=0.5)


def _is_there(command: Sequence[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return call([*command, "version"]).returncode == 0
    return False


GENERATIONS = {
    name: command
    for name, command in {"v2": ["docker", "compose"], "v1": ["docker-compose"]}.items()
    if os.environ.get("ZENPS_TEST_DOCKER") and _is_there(command)
}
"""The commands of Compose that this machine has."""


class Project(contextlib.AbstractContextManager["Project"]):
    """A Compose project under a name of its own. Nothing of it is left at the end of the block.

    Args:
        command: Compose's.
        overrides: files that stand beside ``compose.yaml`` and change it.
        variables: as in ``.env``.
    """

    def __init__(self, command: Sequence[str], *overrides: str, **variables: str) -> None:
        self.name = f"zenps-{uuid.uuid4().hex[:8]}"
        files = [COMPOSE_FILE, *(COMPOSE_FILE.with_name(override) for override in overrides)]
        self.command = [*command, "--project-name", self.name]
        self.command += [word for file in files for word in ("-f", str(file))]
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("ZENPS_")} | variables

    def __exit__(self, *exception: object) -> None:
        if any(exception):
            print(self("logs").stdout[-8000:])
        self("--profile", "monitoring", "down", "--volumes", "--remove-orphans", "--timeout", "1")

    def __call__(self, *arguments: str, seconds: float = 600) -> Done:
        """``docker compose ARGUMENTS``, ended."""
        return call([*self.command, *arguments], environment=self._environment, seconds=seconds)

    def exit_codes(self, service: str) -> list[int]:
        """Of its containers, once they have ended."""
        ids = self("ps", "--all", "--quiet", service).stdout.split()
        return [int(code) for code in docker("wait", *ids, seconds=600).stdout.split()]

    def containers(self, service: str) -> list[str]:
        """Ids of those that run; Compose 1.29 would show the others, too."""
        labels = {"project": self.name, "service": service}
        filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
        return docker("ps", "--quiet", *filters).stdout.split()

    def status(self) -> dict[str, Any]:
        """``zenps status`` in the scheduler's container; its state is empty while there is none."""
        done = self("exec", "-T", "scheduler", "zenps", "status", "--json")
        status: dict[str, Any] = (
            json.loads(done.stdout) if done.returncode == 0 else {"state": "", "nodes": []}
        )
        return status

    def nodes(self, role: str) -> list[dict[str, Any]]:
        """Those of a role that are present."""
        return [n for n in self.status()["nodes"] if n["role"] == role and n["state"] == "present"]
