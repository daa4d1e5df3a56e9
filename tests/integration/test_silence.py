"""Many nodes of an elastic job fall silent: if another scheduler could continue with them, it ends here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

import zenps as zps
from tests.integration.cluster import LEASE_SECONDS, Cluster, Raised, await_file


def push_until_it_fails(ready: Path) -> Raised:
    """Rank 0 is the one that is left; the others stop in the middle of a step."""
    step = 0
    while True:
        try:
            zps.push_pull(torch.ones(3), "x")
        except Exception as error:  # noqa: BLE001 - the caller asserts on it
            return Raised(type(error).__name__, str(error))
        step += 1
        if step == 3:
            (ready / str(zps.rank())).touch()


def test_most_workers_and_a_server_that_are_stopped_end_the_job(tmp_path: Path) -> None:
    """Those that are stopped look like those that are cut off."""
    settings = {"cluster.on_worker_loss": "continue"}
    with Cluster(3, 2, settings, LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_until_it_fails, tmp_path, rank=rank) for rank in range(3)]
        for rank in range(3):
            await_file(tmp_path / str(rank))
        for process in (*workers[1:], cluster.servers[1]):
            os.kill(process.pid, signal.SIGSTOP)
        left = workers[0].result()
        assert left.kind == "PeerLostError"
        assert "another scheduler may have these" in left.text
        assert "worker 1" in left.text
        assert "worker 2" in left.text
        for process in (*workers[1:], cluster.servers[1]):
            process.kill()
