"""Two ranks of each framework's job train as one process does that sees the whole batch."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.cluster import LEASE_SECONDS, Cluster
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"
RANKS, SECONDS = 2, 240
"""A job takes 5 to 40 s on a machine that is not busy."""

pytestmark = pytest.mark.timeout(2 * SECONDS + 20)

# Frameworks take long to import on a busy machine, and servers wait for that.
PATIENT = {"cluster.rendezvous_seconds": SECONDS}

every_job = pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers", "fsdp2"])


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return clean | offline | more


def run(command: Sequence[str], **more: str) -> str:
    """What the job has written."""
    done = subprocess.run(
        command, env=environment(**more), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def job(name: str, directory: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(JOBS / f"{name}_job.py"), str(directory), *arguments]


def launched(command: Sequence[str]) -> list[str]:
    launch = [sys.executable, "-m", "zenps.cli", "launch", "--workers", str(RANKS), "--servers", "2"]
    return [*launch, "--", *command]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The outcome of a job in one process, which runs once."""

    @functools.cache
    def outcome(name: str) -> Any:
        directory = tmp_path_factory.mktemp(name)
        run(job(name, directory))
        return torch.load(directory / "0.pt")

    return outcome


def assert_trained_as_one(name: str, wanted: Any, directory: Path) -> None:
    first, second = (torch.load(directory / f"{rank}.pt") for rank in range(RANKS))
    rounds_of_a_step = 1 if name == "fsdp2" else 2
    assert first["rounds"] == second["rounds"] >= rounds_of_a_step * len(wanted["losses"]) > 0
    assert (first["main"], second["main"]) == (True, False)
    assert wanted["weights"].keys() == first["weights"].keys()
    for key, weight in wanted["weights"].items():
        assert torch.equal(first["weights"][key], second["weights"][key]), key
        torch.testing.assert_close(first["weights"][key], weight, rtol=0, atol=1e-6)
    # Trainer logs the mean over ranks on all of them.
    losses = [sum(pair) / RANKS for pair in zip(first["losses"], second["losses"], strict=True)]
    assert losses == pytest.approx(wanted["losses"], rel=0, abs=1e-6)


@every_job
def test_two_ranks_train_as_one_process(tmp_path: Path, alone: Callable[[str], Any], name: str) -> None:
    log = run(launched(job(name, tmp_path)))
    assert "pushed no gradient" not in log
    assert_trained_as_one(name, alone(name), tmp_path)


def test_ray_train(tmp_path: Path, alone: Callable[[str], Any]) -> None:
    run(job("ray", tmp_path, "on a Ray cluster"), RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    assert_trained_as_one("ray", alone("ray"), tmp_path)


def test_ray_without_room_for_the_servers_raises(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import ray\n"
        "from zenps.errors import DeadlineError\n"
        "from zenps.ray import Cluster\n"
        "ray.init(num_cpus=1)\n"
        "try:\n"
        "    Cluster(workers=1, servers=2, settings=['cluster.rendezvous_seconds=5']).__enter__()\n"
        "except DeadlineError as error:\n"
        "    print(error)\n"
    )
    log = run([sys.executable, str(script)], RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    assert "expected 2 server(s) with 1 CPU each within cluster.rendezvous_seconds = 5, got fewer" in log


def test_lightning_under_torchrun(tmp_path: Path, alone: Callable[[str], Any]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with Cluster(RANKS, settings=PATIENT) as cluster:
        _, *command = job("lightning", tmp_path)
        run([*torchrun, *command], ZENPS_CLUSTER_SCHEDULER=cluster.address)
        cluster.drain()
    assert_trained_as_one("lightning", alone("lightning"), tmp_path)


def test_lightning_tells_of_a_hook_that_it_ignores(tmp_path: Path) -> None:
    log = run(launched(job("lightning", tmp_path, "dropped")))
    assert log.count("has pushed no gradient") == RANKS
    assert "strategy=zenps.lightning.Strategy()" in log


SCALED = """
from types import SimpleNamespace

import torch
from lightning.pytorch.plugins import MixedPrecision

import zenps as zps
from zenps.errors import UsageError
from zenps.lightning import Strategy
from zenps.transformers import Callback
from zenps.worker.process import PROCESS

zps.init()
PROCESS.world.keeps_residuals = True
scaler = torch.amp.GradScaler("cpu")
trainer = SimpleNamespace(accelerator=SimpleNamespace(scaler=scaler))
strategy = Strategy(precision_plugin=MixedPrecision("16-mixed", "cpu", scaler))
for begin in (Callback(trainer).on_train_begin, strategy.configure_ddp):
    try:
        begin()
    except UsageError as error:
        print("refused:", error)
"""


def test_scaled_gradients_that_leave_residuals_are_refused() -> None:
    assert (
        run([sys.executable, "-c", SCALED]).count("refused: GradScaler: expected sync.sparsifier = none") == 2
    )


def test_lightning_raises_peer_lost_error(tmp_path: Path) -> None:
    port = str(free_port())
    with Cluster(RANKS, settings=PATIENT, lease_seconds=LEASE_SECONDS) as cluster:
        variables = {
            "ZENPS_CLUSTER_SCHEDULER": cluster.address,
            "ZENPS_CLUSTER_LEASE_SECONDS": str(LEASE_SECONDS),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        workers = [
            subprocess.Popen(
                job("lightning", tmp_path, "kill"), cwd=ROOT, text=True, stderr=subprocess.PIPE,
                env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **variables),
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            _, errors = workers[0].communicate(timeout=SECONDS)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert workers[0].returncode == 1
    assert re.search(r"^(\[rank0\]: )?zenps\.errors\.PeerLostError: .*worker 1", errors, re.MULTILINE), errors
