"""Schemes in which workers exchange among themselves: losses, ends, and torch.distributed beside them."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch

import zenps as zps
from tests.integration.cluster import Cluster, Raised, attempt
from tests.integration.test_losses import LEASE_SECONDS, SLACK_SECONDS

WORKERS = 3


def push_forever() -> tuple[Raised, float, float]:
    """What a push raises in the end, when, and how long it takes to leave then."""
    rows = torch.arange(100_000).unsqueeze(0)
    table = torch.sparse_coo_tensor(rows, torch.ones(100_000, 8), (200_000, 8), check_invariants=True)
    while True:
        outcome = attempt(zps.push_pull, table, "table")
        if isinstance(outcome, Raised):
            raised_at = time.time()
            zps.shutdown()
            return outcome, raised_at, time.time() - raised_at


@pytest.mark.parametrize("scheme", ["agsparse", "sparcml"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_in_an_exchange_is_named(scheme: str, end: signal.Signals) -> None:
    with Cluster(WORKERS, 1, {"sync.scheme": scheme}, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(push_forever, rank=rank) for rank in range(WORKERS)]
        cluster.await_state("running")
        time.sleep(2)
        victim = workers.pop()
        os.kill(victim.pid, end)
        lost_at = time.time()
        for worker in workers:
            error, raised_at, left_seconds = worker.result()
            assert error.kind == "PeerLostError"
            assert f"worker 2 (host {socket.gethostname()}, pid {victim.pid}) is lost" in error.text
            assert raised_at - lost_at < LEASE_SECONDS + SLACK_SECONDS
            assert left_seconds < 5
        victim.kill()
