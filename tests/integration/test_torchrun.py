"""torchrun starts all workers again when one has failed; nothing of the old ones is mixed in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster
from tests.integration.embedding_model import assert_same
from tests.integration.test_training import RANKS, train_in_one_process

STEPS, FAILS_AT = 8, 3

SCRIPT = f"""
import os, signal, sys
import torch
import zenps as zps
from tests.integration.embedding_model import OPTIMIZERS, loss_of, make_model, state_of

directory, failure = sys.argv[1:]
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)
zps.init()
model = make_model()
optimizers = [zps.DistributedOptimizer(o, model.named_parameters()) for o in OPTIMIZERS["sgd"](model)]
sums = []
for step in range({STEPS}):
    loss_of(model, step, zps.rank()).backward()
    if step == {FAILS_AT} and zps.rank() == 1 and generation == 0:
        zps.push_pull_async(torch.full((70_000,), -1.0), "sum")
        if failure == "raise":
            raise RuntimeError("as a script does that fails")
        os.kill(os.getpid(), signal.SIGKILL)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.full((70_000,), float(100 * generation + 10 * step + zps.rank()))
    total = zps.push_pull(mine, "sum", average=False)
    assert (total == total[0]).all()
    sums.append(int(total[0]))
torch.save((state_of(model), sums, generation, zps.size()), f"{{directory}}/{{zps.rank()}}.pt")
zps.shutdown()
"""


@pytest.mark.long
@pytest.mark.parametrize("failure", ["SIGKILL", "raise"])
def test_all_workers_begin_again_when_one_has_failed(tmp_path: Path, failure: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Cluster(workers=RANKS, lease_seconds=LEASE_SECONDS) as cluster:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
        settings = {
            "ZENPS_CLUSTER_SCHEDULER": cluster.address,
            "ZENPS_CLUSTER_LEASE_SECONDS": str(LEASE_SECONDS),
            "PYTHONPATH": os.getcwd(),
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "2"]
        process = subprocess.Popen(
            [*torchrun, "--nproc-per-node", str(RANKS), script, tmp_path, failure],
            env=clean | settings, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=1.5 * DEADLINE_SECONDS)
        finally:
            process.terminate()  # it ends its workers
        assert process.returncode == 0, f"{errors}\n{cluster.scheduler.log}"
        cluster.drain()
    expected = train_in_one_process("sgd", STEPS)
    for rank in range(RANKS):
        state, sums, generation, size = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert (generation, size) == (1, RANKS)
        assert sums == [2 * (100 + 10 * step) + 1 for step in range(STEPS)]
        assert_same(state, expected)


REJOIN = """
import torch
import zenps as zps

for joined in range(2):
    zps.init()
    assert zps.push_pull(torch.ones(3), "x", average=False).tolist() == [2, 2, 2]
    zps.shutdown()
print("joined twice")
"""


@pytest.mark.long
@pytest.mark.parametrize("restarts", ["0", "2"])
def test_workers_of_torchrun_join_again(tmp_path: Path, restarts: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(REJOIN)
    with Cluster(
        workers=RANKS, lease_seconds=LEASE_SECONDS, settings={"cluster.rejoin_seconds": 8}
    ) as cluster:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
        settings = {"ZENPS_CLUSTER_SCHEDULER": cluster.address, "PYTHONPATH": os.getcwd()}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", restarts]
        done = subprocess.run(
            [*torchrun, "--nproc-per-node", str(RANKS), script],
            env=clean | settings, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{cluster.scheduler.log}"
        assert done.stdout.count("joined twice") == RANKS
        cluster.drain()
