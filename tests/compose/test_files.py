"""Compose files as Compose merges them, and the scripts of the image. No Docker engine is needed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.memory_limit import most_server_bytes
from zenps.config.settings import MAX_WORKERS, Config
from zenps.config.sources import load
from zenps.keys import generate

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DEADLINE_SECONDS = 30.0
APPENDED = ("volumes", "devices")


def merged(base: Any, over: Any, name: str = "") -> Any:
    """As Compose does it: mappings merge, and a command replaces that of the file before.

    Source: https://docs.docker.com/reference/compose-file/merge/
    """
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value, key) for key, value in over.items()}
    return [*base, *over] if name in APPENDED and base is not None else over


def cluster(*overrides: str) -> dict[str, Any]:
    """The services of ``compose.yaml`` with ``overrides``."""
    tree: dict[str, Any] = {}
    for name in ("compose.yaml", *overrides):
        tree = merged(tree, yaml.safe_load((DOCKER / name).read_text("utf-8")))
    services: dict[str, Any] = tree["services"]
    return services


@pytest.mark.parametrize("order", itertools.permutations(["compose.secure.yaml", "compose.gpu.yaml"]))
def test_workers_have_key_and_gpu_in_whichever_order_files_are_given(order: Sequence[str]) -> None:
    services = cluster(*order)
    worker = services["worker"]
    assert worker["image"] == "zenps:cuda"
    assert worker["command"].endswith("--device cuda}")
    assert (
        worker["environment"].items()
        >= {
            "CLAIM_KEY": "/keys/worker",
            "CLAIM_GPU": "/var/cache/cupy",
            "CUPY_CACHE_DIR": "/var/cache/cupy",
        }.items()
    )
    assert set(worker["volumes"]) == {"worker-keys:/keys/worker:ro", "kernels:/var/cache/cupy"}
    assert worker["deploy"]["replicas"]
    assert worker["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert services["server"]["command"] == "zenps server"
    assert services["server"]["environment"]["CLAIM_KEY"] == "/keys/server"
    assert "CLAIM_GPU" not in services["server"]["environment"]


def test_every_image_begins_with_claim_and_has_the_scripts() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text("utf-8")
    assert 'ENTRYPOINT ["dumb-init", "--", "claim"]' in dockerfile
    assert "COPY docker/claim docker/probe /usr/local/bin/" in dockerfile
    allowed = (ROOT / ".dockerignore").read_text("utf-8").split()
    assert {"!docker/claim", "!docker/probe"} <= set(allowed)


def test_the_image_s_user_may_run_what_a_checkout_has_closed_to_others(tmp_path: Path) -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text("utf-8")
    _, copied, rest = dockerfile.partition("COPY examples /opt/zenps/examples\n")
    before_user, user, _ = rest.partition("\nUSER 10001:10001\n")
    assert copied
    assert user
    programs, examples = tmp_path / "usr/local/bin", tmp_path / "opt/zenps/examples"
    shutil.copytree(ROOT / "examples", examples)
    programs.mkdir(parents=True)
    for name in ("claim", "probe"):
        shutil.copy(DOCKER / name, programs)
    made = [*programs.iterdir(), examples, *examples.rglob("*")]
    for path in made:
        path.chmod(path.stat().st_mode & ~0o077)
    for command in re.findall(r"^RUN (chmod .*)$", before_user, re.MULTILINE):
        here = re.sub("(/usr/local/bin|/opt/zenps)/", rf"{tmp_path}\1/", command)
        subprocess.run(["sh", "-ec", here], check=True, timeout=DEADLINE_SECONDS)
    for path in made:
        needed = 0o005 if path.is_dir() or path.parent == programs else 0o004
        assert path.stat().st_mode & needed == needed, path


def test_what_images_install_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0].replace("_", "-").lower() for line in lines if "==" in line}
    declared = ConfigParser()
    declared.read(ROOT / "setup.cfg")
    wanted = declared["options"]["install_requires"] + declared["options.extras_require"]["cuda"]
    builders = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    names = {
        re.split(r"[<>=\[ ]", line)[0].lower()
        for line in [*wanted.splitlines(), *builders]
        if line and line[0] != "#"
    }
    assert names <= pinned
    # What torch with CUDA asks for is in nobody's environment here: its metadata is that of another build.
    assert {"triton", "cuda-toolkit", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= pinned


def test_images_are_built_by_the_pinned_setuptools() -> None:
    """Where pip builds, ``-c`` does not apply, but one of two variables does, by pip's version."""
    stages = re.split(r"^FROM ", (DOCKER / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    (build,) = (stage for stage in stages if stage.startswith("${BASE_IMAGE} AS build\n"))
    assert "\nWORKDIR /src\nCOPY constraints.txt ./\n" in build
    for variable in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        assert re.search(rf"^ENV .*\b{variable}=/src/constraints\.txt\b", build, re.MULTILINE)
    assert all(stage.startswith("build AS ") for stage in stages if "python3 -m pip" in stage)


def default_base_image() -> str:
    return re.findall(r"^ARG BASE_IMAGE=(\S+)$", (DOCKER / "Dockerfile").read_text("utf-8"), re.MULTILINE)[0]


def test_the_base_image_is_pinned_and_the_same_for_compose() -> None:
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", default_base_image())
    assert cluster()["scheduler"]["build"]["args"]["BASE_IMAGE"] == f"${{BASE_IMAGE:-{default_base_image()}}}"


def config_of(service: dict[str, Any], **variables: str) -> Config:
    """As its container reads it, with nothing set where Compose is started."""
    environment = service["environment"] | variables
    values = {name: re.sub(r"^\$\{[^:]*:-(.*)\}$", r"\1", str(value)) for name, value in environment.items()}
    return load(environ=values, file=Path("/dev/null")).config


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_a_sum_takes_one_thread_however_many_cores_the_machine_has(role: str) -> None:
    service = cluster("compose.secure.yaml", "compose.gpu.yaml")[role]
    assert config_of(service).kernels.threads == 1
    assert service["environment"]["ZENPS_KERNELS_THREADS"] == "${ZENPS_KERNELS_THREADS:-1}"


@pytest.mark.parametrize("workers", [1, 2, 64, MAX_WORKERS])
def test_servers_have_the_memory_that_their_budget_needs(workers: int) -> None:
    server = cluster()["server"]
    config = config_of(server, ZENPS_CLUSTER_WORKERS=str(workers))
    assert config.cluster.workers == workers
    assert most_server_bytes(config) <= int(server["mem_limit"].removesuffix("m")) << 20


# ── claim ───────────────────────────────────────────────────────────────────────────────────────


class Container:
    """A directory of programs, and variables; ``claim`` and ``probe`` see nothing else of this machine."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self.programs = directory / "bin"
        self.programs.mkdir(parents=True)
        path = f"{self.programs}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "TMPDIR": str(directory), **variables}

    def has(self, name: str, script: str) -> None:
        program = self.programs / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *command: str) -> tuple[int, str]:
        """Returns the exit code and all output of a command that ends."""
        popen = self.start(*command)
        out, err = popen.communicate(timeout=DEADLINE_SECONDS)
        return popen.returncode, out + err


SHOW = ("sh", "-c", 'readlink "$TMPDIR/secret"; echo "gpu ${CUDA_VISIBLE_DEVICES-none}"; read -r _')


@pytest.fixture
def replicas(tmp_path: Path) -> list[Container]:
    """Three containers of one service, with two keys and on a machine with two GPUs."""
    keys, locks = tmp_path / "keys", tmp_path / "locks"
    for directory in (keys, locks):
        directory.mkdir()
    for rank in range(2):
        (keys / f"worker-{rank}.secret").touch()
    made = []
    for name in "abc":
        container = Container(tmp_path / name, CLAIM_KEY=str(keys), CLAIM_GPU=str(locks))
        container.has("nvidia-smi", "echo 'GPU 0: NVIDIA H100'; echo 'GPU 1: NVIDIA H100'")
        made.append(container)
    return made


def claim(container: Container) -> tuple[subprocess.Popen[str], list[str]]:
    popen = container.start(str(DOCKER / "claim"), *SHOW)
    assert popen.stdout is not None
    return popen, [Path(popen.stdout.readline().strip()).name, popen.stdout.readline().strip()]


def test_each_container_has_a_key_and_a_gpu_of_its_own(replicas: list[Container]) -> None:
    running = [claim(container) for container in replicas[:2]]
    try:
        assert [taken for _, taken in running] == [
            ["worker-0.secret", "gpu 0"],
            ["worker-1.secret", "gpu 1"],
        ]
        code, text = replicas[2].run(str(DOCKER / "claim"), "true")
        assert (code, "expected a free key" in text) == (2, True)
        del replicas[2].environment["CLAIM_KEY"]
        code, text = replicas[2].run(str(DOCKER / "claim"), "true")
        assert (code, "expected a free GPU, but all 2 are taken" in text) == (2, True)
        running[1][0].kill()  # whatever ends it, another may have its GPU
        running[1][0].communicate(timeout=DEADLINE_SECONDS)
        assert replicas[2].run(str(DOCKER / "claim"), "sh", "-c", "echo $CUDA_VISIBLE_DEVICES") == (0, "1\n")
    finally:
        for popen, _ in running:
            popen.kill()
            popen.communicate(timeout=DEADLINE_SECONDS)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA-SMI has failed'; exit 9", "with GPUs? It says: NVIDIA-SMI has failed\n"),
        ("echo 'nvidia-smi: not found' >&2; exit 127", "with GPUs? It says: nvidia-smi: not found\n"),
        ("echo 'No devices found.'", "with GPUs? It says: No devices found.\n"),
        (
            "echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'; echo '  MIG 3g.20gb     Device  0: (UUID: MIG-2)'",
            "expected whole GPUs, but MIG divides some",
        ),
    ],
    ids=["no driver", "no nvidia-smi", "no GPU", "MIG"],
)
def test_no_gpu_is_claimed_where_none_is_listed(tmp_path: Path, script: str, expected: str) -> None:
    container = Container(tmp_path / "a", CLAIM_GPU=str(tmp_path))
    container.has("nvidia-smi", script)
    code, text = container.run(str(DOCKER / "claim"), "true")
    assert (code, expected in text) == (2, True), text
    assert not [*tmp_path.glob("*.lock")]


def test_only_lines_of_gpus_are_counted(replicas: list[Container]) -> None:
    for container in replicas:
        container.has("nvidia-smi", "echo 'WARNING: infoROM is corrupted'; echo 'GPU 0: NVIDIA H100'")
    popen, taken = claim(replicas[0])
    try:
        assert taken[1] == "gpu 0"
        code, text = replicas[1].run(str(DOCKER / "claim"), "true")
        assert (code, "expected a free GPU, but all 1 are taken" in text) == (2, True)
    finally:
        popen.kill()
        popen.communicate(timeout=DEADLINE_SECONDS)


def test_the_lowest_ranks_are_taken_first(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for rank in range(12):
        (keys / f"worker-{rank}.secret").touch()
    running = [claim(Container(tmp_path / str(number), CLAIM_KEY=str(keys))) for number in range(3)]
    for popen, _ in running:
        popen.kill()
        popen.communicate(timeout=DEADLINE_SECONDS)
    assert [taken[0] for _, taken in running] == [f"worker-{rank}.secret" for rank in range(3)]


def test_a_container_that_asks_for_nothing_only_runs_its_command(tmp_path: Path) -> None:
    container = Container(tmp_path / "a")
    shown = "echo ${CUDA_VISIBLE_DEVICES-none} $*; exit 7"
    assert container.run(str(DOCKER / "claim"), "sh", "-c", shown, "sh", "x y") == (7, "none x y\n")


def test_keygen_replaces_lists_and_writes_locked_secrets_in_place(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    roles = ("scheduler", "server", "worker")
    for role in roles:
        (keys / role).mkdir(parents=True)
    generate(keys / "all", workers=2, servers=2)
    container = Container(tmp_path / "a")
    container.has("zenps", "true")
    shell, option, script = cluster("compose.secure.yaml")["keygen"]["command"]
    command = (shell, option, script.replace("$$", "$").replace("/keys/", f"{keys}/"))

    def inodes() -> dict[str, int]:
        assert container.run(*command) == (0, "")
        files = [path for role in roles for path in (keys / role).iterdir()]
        return {str(path.relative_to(keys)): path.stat().st_ino for path in files}

    before, after = inodes(), inodes()
    assert before.keys() == {
        *(f"{role}/keys.toml" for role in roles),
        *("scheduler/scheduler.secret", "scheduler/operator.secret"),
        *(f"{role}/{role}-{rank}.secret" for role in ("server", "worker") for rank in range(2)),
    }
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f"{role}/keys.toml" for role in roles}


# ── probe ───────────────────────────────────────────────────────────────────────────────────────


def test_a_healthy_container_is_asked_every_30_seconds_alone(tmp_path: Path) -> None:
    container, calls = Container(tmp_path / "a"), tmp_path / "calls"
    probe = (str(DOCKER / "probe"), "server")

    def ask(exit_code: int) -> tuple[int, list[str]]:
        container.has("zenps", f'echo "$@" >> {calls}; exit {exit_code}')
        code, _ = container.run(*probe)
        found = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return code, found

    asked = ["health --role server"]
    assert ask(1) == (1, asked)  # until it is healthy, every time
    assert ask(0) == (0, asked)
    assert ask(1) == (0, [])
    healthy = tmp_path / "a" / "healthy"
    os.utime(healthy, times=(healthy.stat().st_atime, healthy.stat().st_mtime - 31))
    assert ask(1) == (1, asked)
    assert ask(1) == (1, asked)
    os.utime(healthy, times=(healthy.stat().st_atime, healthy.stat().st_mtime + 3600))
    assert ask(1) == (1, asked), "a clock that was set back"
    assert ask(0) == (0, asked)
    assert ask(1) == (0, [])
    assert container.run(str(DOCKER / "claim"), "true")[0] == 0
    assert ask(1) == (1, asked), "the container before it was healthy"


@pytest.mark.parametrize("service", ["scheduler", "server"])
def test_compose_probes_by_it(service: str) -> None:
    assert cluster()[service]["healthcheck"]["test"] == ["CMD", "probe", service]
