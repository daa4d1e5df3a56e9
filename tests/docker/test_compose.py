"""``docker compose up``, as docs/deploy.md has it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from tests.docker.compose import COMPOSE_FILE, GENERATIONS, Project, docker, eventually
from tests.monitoring.prometheus import Prometheus, has_data, panel_queries
from tests.ports import free_port

SIZES = "--vocabulary 4000 --width 32 --samples 256 --batch 8"
SHORT = f"python examples/lstm_lm.py {SIZES} --steps 40"
STOP = "/tmp/stop"
UNTIL_STOPPED = (
    'import os, runpy, sys; sys.path.insert(0, "examples"); from training import TrainingRun as Run; '
    "agree = Run._agree; "
    f'Run._agree = lambda run, seconds: agree(run, float("inf") if os.path.exists("{STOP}") else seconds); '
    'runpy.run_path("examples/lstm_lm.py", run_name="__main__")'
)
"""Trains until any rank has the file: ranks stop by the mean of their clocks."""
LONG = f"python -c '{UNTIL_STOPPED}' {SIZES} --steps 1000000 --seconds 3600"
FAILING = "python -c 'import sys, zenps; zenps.init(); sys.exit(7 * zenps.rank())'"

OVERRIDES = [(), ("compose.secure.yaml",), ("compose.gpu.yaml",), ("compose.secure.yaml", "compose.gpu.yaml")]

generations = pytest.mark.parametrize("command", GENERATIONS.values(), ids=GENERATIONS)
"""Each that is installed; what does not differ between them is tried with one."""

pytestmark = pytest.mark.usefixtures("image")


@pytest.fixture
def command() -> Sequence[str]:
    return next(iter(GENERATIONS.values()))


def is_running(project: Project, servers: int = 2) -> bool:
    return project.status()["state"] == "running" and len(project.nodes("server")) == servers


def stop(project: Project) -> None:
    """Ends training that is :data:`LONG`."""
    done = docker("exec", project.containers("worker")[0], "touch", STOP)
    assert done.returncode == 0, done.stdout


@generations
@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_files_are_valid(command: Sequence[str], overrides: Sequence[str]) -> None:
    with Project(command, *overrides) as project:
        assert project("--profile", "monitoring", "config", "--quiet").stdout == ""


@generations
def test_trains_to_the_end(command: Sequence[str]) -> None:
    with Project(command, ZENPS_COMMAND=SHORT) as project:
        done = project("up")
        assert done.returncode == 0, done.stdout
        assert "workers: 2, partition: balanced" in done.stdout
        assert "held-out loss" in done.stdout
        for service in ("scheduler", "server", "worker"):
            assert set(project.exit_codes(service)) == {0}


def test_centralized_on_three_servers_of_which_one_is_killed(command: Sequence[str]) -> None:
    variables = {"ZENPS_SERVERS": "3", "ZENPS_SYNC_PARTITION": "centralized", "ZENPS_COMMAND": LONG}
    with Project(command, **variables) as project:
        assert project("up", "--detach").returncode == 0
        eventually(lambda: is_running(project, servers=3))
        assert project.status()["settings"]["sync.partition"] == "centralized"
        docker("kill", "--signal", "KILL", project.containers("server")[0])
        eventually(lambda: is_running(project, servers=2))
        assert len(project.containers("worker")) == 2
        stop(project)
        assert project.exit_codes("worker") == [0, 0]
        assert sorted(project.exit_codes("server")) == [0, 0, 137]
        assert "workers: 2, partition: centralized" in project("logs", "worker").stdout


def test_a_scheduler_returns_and_a_server_joins(command: Sequence[str]) -> None:
    with Project(command, ZENPS_COMMAND=LONG) as project:
        assert project("up", "--detach").returncode == 0
        eventually(lambda: is_running(project))
        docker("kill", "--signal", "KILL", *project.containers("scheduler"))
        assert project("start", "scheduler").returncode == 0
        eventually(lambda: is_running(project))
        before = [project.containers(role) for role in ("scheduler", "worker")]
        added = project("up", "--detach", "--no-recreate", "--no-deps", "--scale", "server=3", "server")
        assert added.returncode == 0
        assert [project.containers(role) for role in ("scheduler", "worker")] == before
        eventually(lambda: is_running(project, servers=3))
        stop(project)
        assert project.exit_codes("worker") == [0, 0]


@generations
def test_a_worker_that_fails_ends_it_with_its_code(command: Sequence[str]) -> None:
    with Project(command, ZENPS_COMMAND=FAILING) as project:
        out = project("up").stdout
        assert "exited with code 7" in out
        assert sorted(project.exit_codes("worker")) == [0, 7]
        assert len(project.containers("server")) == 0
        shown = f"docker wait $({' '.join(project.command)} ps --all --quiet worker) | sort -n | tail -n 1"
        code = subprocess.run(shown, shell=True, capture_output=True, text=True, timeout=60, check=True)
        assert code.stdout == "7\n"


def test_with_keys(command: Sequence[str], image: str) -> None:
    with Project(command, "compose.secure.yaml", ZENPS_COMMAND=LONG) as project:
        assert project("up", "--detach").returncode == 0
        eventually(lambda: is_running(project))
        assert sorted(node["rank"] for node in project.nodes("worker")) == [0, 1]
        # Whoever has no key of this job is let in nowhere, though it is on the same network.
        network = ("--network", f"{project.name}_default", "-e", "ZENPS_CLUSTER_SCHEDULER=scheduler:9100")
        refused = docker("run", "--rm", *network, image, "zenps", "server")
        assert refused.returncode == 2
        assert "security.keys = ''" in refused.stdout
        # A role cannot read the secrets of another, and not write to those of its own.
        seen = project("exec", "-T", "worker", "sh", "-c", "cd /keys; ls all scheduler server worker").stdout
        assert [line for line in seen.split() if line.endswith(".secret")] == [
            "worker-0.secret",
            "worker-1.secret",
        ]
        assert project("exec", "-T", "worker", "touch", "/keys/worker/x").returncode != 0
        # Each replica has taken another.
        links = {
            docker("exec", id_, "readlink", "/tmp/secret").stdout for id_ in project.containers("server")
        }
        assert links == {"/keys/server/server-0.secret\n", "/keys/server/server-1.secret\n"}
        stop(project)
        assert project.exit_codes("worker") == [0, 0]
        assert sorted(project.exit_codes("server")) == [0, 0]
        assert project("up", "keygen").stdout.count("0 new key(s)") == 1


def test_prometheus_finds_all_roles_fills_the_dashboard_and_tells_of_a_lost_server(
    command: Sequence[str], prometheus: str
) -> None:
    port = free_port()
    seen = Prometheus(f"127.0.0.1:{port}")

    def roles() -> list[tuple[str, float]]:
        return sorted((sample.labels["role"], sample.value) for sample in seen.query("up"))

    expected = [("scheduler", 1), ("server", 1), ("server", 1), ("worker", 1), ("worker", 1)]
    assert f"image: {prometheus}\n" in COMPOSE_FILE.read_text("utf-8")
    with Project(command, ZENPS_COMMAND=LONG, PROMETHEUS_PORT=str(port)) as project:
        services = ("scheduler", "server", "worker", "prometheus")
        assert project("--profile", "monitoring", "up", "--detach", *services).returncode == 0
        eventually(lambda: is_running(project))
        eventually(lambda: roles() == expected)
        for query in panel_queries().values():  # NaN until the first rounds
            seen.await_query(query, has_data, seconds=120)
        assert not [alert for alert in seen.alerts() if alert.name == "ServerLost"]
        docker("kill", project.containers("server")[0])
        seen.await_alert("ServerLost", seconds=120, says="Gone: server ")
        stop(project)
        assert project.exit_codes("worker") == [0, 0]
