from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.compose.test_files import cluster
from tests.docker.compose import docker, eventually

ROOT = Path(__file__).parents[2]
# As compose.yaml and docs/deploy.md run it.
HARDENED = (
    "--rm",
    "--read-only",
    "--tmpfs",
    "/tmp",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
)


def run(image: str, *command: str) -> str:
    """What a command in a container of the image prints; it must end well."""
    done = docker("run", *HARDENED, "--network", "none", image, *command, seconds=600)
    assert done.returncode == 0, done.stdout
    return done.stdout


def inspected(image: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(docker("image", "inspect", image).stdout)
    return found[0]


def test_user_is_not_root(image: str) -> None:
    assert inspected(image)["Config"]["User"] == "10001:10001"
    assert run(image, "id", "-u").strip() == "10001"


def test_nothing_in_it_can_be_written_by_its_user(image: str) -> None:
    script = "find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/dev/*' 2>/dev/null"
    writable = docker("run", "--rm", "--network", "none", image, "sh", "-c", script).stdout.split()
    keys = {f"/keys/{name}" for name in ("all", "scheduler", "server", "worker")}
    assert "/tmp" in writable, "else the command has failed"
    assert set(writable) - keys <= {"/tmp", "/var/tmp", "/run/lock"}


def test_no_compiler_and_no_installer(image: str) -> None:
    tools = "gcc cc g++ c++ clang ld as make nvcc ninja"
    found = run(image, "sh", "-c", f"for tool in {tools}; do command -v $tool; done; true")
    assert found == ""
    assert run(image, "sh", "-c", "ls /opt/zenps/bin | grep -c '^pip' || true").strip() == "0"


def test_a_derived_image_has_another_package(image: str, build_environment: dict[str, str]) -> None:
    recipe = (ROOT / "docs/deploy.md").read_text("utf-8").partition("```dockerfile\n")[2].partition("```")[0]
    assert recipe.startswith(f"FROM {image}\n")
    settings = {name for name in cluster()["scheduler"]["build"]["args"] if name.startswith("PIP_")}
    index = [f'ENV {name}="{build_environment.get(name, "")}"' for name in sorted(settings)]
    lines = recipe.replace("PACKAGE", "sortedcontainers").splitlines()
    recipe, derived = "\n".join([lines[0], *index, *lines[1:]]), "zenps:derived"
    built = docker("build", "--network", "host", "-t", derived, "-", stdin=recipe, seconds=600)
    assert built.returncode == 0, built.stdout
    try:
        run(derived, "python", "-c", "import sortedcontainers, zenps")
        assert inspected(derived)["Config"]["User"] == inspected(image)["Config"]["User"]
    finally:
        docker("image", "rm", derived)


def test_it_has_what_servers_need_and_no_more(image: str) -> None:
    script = """if True:
        import importlib.util, torch
        assert importlib.util.find_spec("cupy") is None
        assert not torch.version.cuda, torch.version.cuda
        import zenps.server.service, zenps.scheduler.service, zenps.worker
        from zenps.kernels.native.library import find_library, load_library
        assert (path := find_library()) and load_library(path)
        """
    run(image, "python", "-W", "error::UserWarning", "-c", script)


def test_it_is_small(image: str, base_image: str) -> None:
    """torch is nearly all of it: one of CUDA's libraries, or a cache of pip, would be too much."""
    added_bytes = inspected(image)["Size"] - inspected(base_image)["Size"]
    print(f"{image} is {inspected(image)['Size'] / 1e6:.0f} MB, {added_bytes / 1e6:.0f} MB over {base_image}")
    assert added_bytes < 850e6


def test_a_cluster_runs_in_one_container(image: str) -> None:
    """On a root filesystem that is read-only, without a network."""
    demo = "python examples/lstm_lm.py --steps 20 --vocabulary 2000 --width 16 --samples 64"
    here = ("--workers", "1", "--servers", "1", "--set", "cluster.rendezvous_seconds=300")
    out = run(image, "zenps", "launch", *here, "--", *demo.split())
    assert "workers: 1, partition: balanced" in out


def test_process_1_passes_signals_on(image: str) -> None:
    container = docker("run", "-d", *HARDENED[1:], image, "zenps", "scheduler").stdout.strip()
    try:
        assert docker("exec", container, "cat", "/proc/1/comm").stdout.strip() == "dumb-init"
        eventually(lambda: "listening on" in docker("logs", container).stdout)
        docker("stop", "--time", "30", container)
        assert docker("wait", container).stdout.strip() == str(128 + signal.SIGTERM)
    finally:
        docker("rm", "--force", container)


def test_a_hook_kills_all_but_process_1(image: str) -> None:
    """As Kubernetes' manifests do to a scheduler that is evicted."""
    container = docker("run", "-d", *HARDENED[1:], image, "zenps", "scheduler").stdout.strip()
    try:
        eventually(lambda: "listening on" in docker("logs", container).stdout)
        docker("exec", container, "sh", "-c", "kill -9 -1")
        assert docker("wait", container).stdout.strip() == str(128 + signal.SIGKILL)
    finally:
        docker("rm", "--force", container)


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_probe_of_nobody_fails_in_one_line(image: str, role: str) -> None:
    command = ("zenps", "health", "--role", role, "--timeout-seconds", "0.5")
    environment = ("-e", "ZENPS_CLUSTER_SCHEDULER=127.0.0.1:9100")
    done = docker("run", *HARDENED, "--network", "none", *environment, image, *command)
    assert done.returncode == 1
    assert done.stdout.startswith("zenps: no answer from the scheduler at 127.0.0.1:9100 within 0.5 s")
    assert done.stdout.count("\n") == 1
