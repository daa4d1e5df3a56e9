"""Health check of one role: which servers are healthy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.waiting import eventually
from zenps.cli import health
from zenps.config.settings import Config
from zenps.errors import PeerLostError
from zenps.keys import generate
from zenps.wire.scheduler_messages import NodeStatus, Status

SERVER = NodeStatus(
    role="server",
    rank=1,
    host=socket.gethostname(),
    pid=42,
    address="tcp://10.0.0.1:7000",
    metrics="",
    epoch=3,
    state="present",
    slots=2048,
    silent_seconds=0.25,
    load={},
)


def check(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, *servers: NodeStatus, state: str = "running"
) -> None:
    status = Status("default", state, 3, 10.0, {}, servers)
    monkeypatch.setattr(health, "fetch", lambda *_: status)
    health.check(Config(), "server", rank, 1.0)


def changed(**fields: object) -> NodeStatus:
    return msgspec.structs.replace(SERVER, **fields)


ELSEWHERE = changed(host="elsewhere", rank=0)
HEALTHY = {
    "by the host's name": (None, [ELSEWHERE, SERVER]),
    "by rank": (0, [ELSEWHERE, changed(state="lost")]),
    "before all have come": (None, [changed(rank=-1)]),
    "while it is drained": (None, [changed(state="leaving")]),
    "started again": (None, [changed(state="lost"), changed(rank=2)]),
}
UNHEALTHY = {
    "none": (None, [], f"no server on host {SERVER.host} has registered"),
    "another's": (None, [ELSEWHERE], f"no server on host {SERVER.host} has registered"),
    "none of this rank": (2, [SERVER, ELSEWHERE], "no server 2 has registered"),
    "lost": (1, [changed(state="lost", silent_seconds=12.3)], r"^server 1 is lost: silent for 12\.3 s$"),
    "left": (None, [changed(state="left")], "is left"),
    "a worker": (None, [changed(role="worker")], "no server on host"),
}


@pytest.mark.parametrize(("rank", "servers"), HEALTHY.values(), ids=HEALTHY)
def test_server_is_healthy(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, servers: list[NodeStatus]
) -> None:
    check(monkeypatch, rank, *servers)


@pytest.mark.parametrize(("rank", "servers", "why"), UNHEALTHY.values(), ids=UNHEALTHY)
def test_server_is_unhealthy(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, servers: list[NodeStatus], why: str
) -> None:
    with pytest.raises(PeerLostError, match=why):
        check(monkeypatch, rank, *servers)


def test_no_role_of_a_failed_job_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLostError, match="the job has failed"):
        check(monkeypatch, None, SERVER, state="failed")


def test_a_live_cluster(zenps: Any, scheduler: str) -> None:
    here = ("--set", f"cluster.scheduler={scheduler}")
    done = zenps("health", "--role", "scheduler", *here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = zenps("health", "--role", "server", *here)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"zenps: no server on host {socket.gethostname()} has registered with the scheduler\n"
    )
    server = zenps.start("server", *here, stdout=None, stderr=None)
    eventually(lambda: zenps("health", "--role", "server", *here).returncode == 0, seconds=80)
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 128 + signal.SIGTERM
    assert zenps("health", "--role", "server", *here).returncode == 1


def test_no_scheduler_answers(zenps: Any) -> None:
    options = ("--set", "cluster.scheduler=127.0.0.1:1", "--timeout-seconds", "0.3")
    done = zenps("health", "--role", "scheduler", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zenps: no answer from the scheduler at 127.0.0.1:1 within 0.3 s")
    assert done.stderr.count("\n") == 1


def test_the_key_of_the_node_is_enough(zenps: Any, tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=1, servers=2)
    keys = ("--set", "security.keys=keys/keys.toml", "--set", "security.secret=keys/{}.secret")
    reader, writer = os.pipe()
    own = (word.format("scheduler") for word in keys)
    zenps.start(
        *("scheduler", "--print-address", str(writer), *own), pass_fds=(writer,), stdout=None, stderr=None
    )
    os.close(writer)
    with open(reader, encoding="ascii") as stream:
        here = ("--set", f"cluster.scheduler={stream.read().strip()}", "--timeout-seconds", "30")

    def ask(role: str, *keys: str) -> tuple[int, str]:
        rank = {"RANK": "1"} if role == "scheduler" else {}  # as in an environment of all nodes of a host
        done = zenps("health", "--role", role, *here, *keys, env=rank)
        return done.returncode, done.stderr

    for name, role, code, why in [
        ("scheduler", "scheduler", 0, ""),
        ("server-1", "server", 1, "no server 1 has registered"),
        ("server-1", "scheduler", 2, "expected the key of scheduler; it is server-1's"),
    ]:
        found, said = ask(role, *(word.format(name) for word in keys))
        assert (found, why in said) == (code, True), said
    found, said = ask("scheduler")
    assert (found, "security.keys = ''" in said) == (2, True), said


def test_is_light() -> None:
    """The health check runs every few seconds on every node."""
    heavy = {"torch", "numpy", "rich", "prometheus_client"}
    script = f"import sys, zenps.cli, zenps.cli.health; print(*{heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout == "\n"
