"""Jobs over several hosts: the addresses by which nodes connect, slow links, and lost links."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zenps as zps
from benchmarks.hosts import BURST_BYTES, Hosts
from tests.integration.cluster import LEASE_SECONDS, Cluster
from tests.integration.progress import await_step
from tests.netns.job import Job, train

ONE_EACH = {name: [0] for name in ("head", "server0", "server1", "worker0", "worker1")}
STEPS = 6

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(ONE_EACH) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The same training on one machine."""
    with Cluster(workers=2, servers=2) as cluster:
        state, other = cluster.run(train, tmp_path_factory.mktemp("alone"), STEPS)
    assert_same_bits(state, other)
    return state


def assert_same_bits(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    for name in expected:
        assert torch.equal(state[name], expected[name]), name


# ── addresses ───────────────────────────────────────────────────────────────────────────────────

ADDRESSES: dict[str, tuple[str, Mapping[str, object], str]] = {
    "IPv4": ("10.77.0.1:9100", {}, "tcp://10.77.0.2:"),
    "IPv6": ("[fd77::1]:9100", {}, "tcp://[fd77::2]:"),
    "names": ("head:9100", {"cluster.host": "server0"}, "tcp://server0:"),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_training_is_the_same_as_on_one_machine(
    case: str, hosts: Hosts, expected: State, tmp_path: Path
) -> None:
    scheduler, own, advertised = ADDRESSES[case]
    with Job(hosts, tmp_path, scheduler, own={"server0": own}) as job:
        for state in job.run(train, tmp_path, STEPS):
            assert_same_bits(state, expected)
        assert f"listening on {advertised}" in job.log("server0")


def test_names_that_resolve_differently_on_other_hosts(expected: State, tmp_path: Path) -> None:
    """A machine's own name is loopback in Debian's /etc/hosts, and one worker has no IPv6."""
    own_names = {name: [f"127.0.1.1 {name}"] for name in ("head", "server0")}
    with Hosts(ONE_EACH, lines=own_names) as hosts:
        hosts["worker0"].ip("-6", "addr", "flush", "dev", "eth0")
        own = {f"server{rank}": {"cluster.host": f"server{rank}"} for rank in range(2)}
        with Job(hosts, tmp_path, "head:9100", own=own) as job:
            for state in job.run(train, tmp_path, STEPS):
                assert_same_bits(state, expected)


TWO_NETWORKS = {"head": [0, 1], "server0": [0, 1], "server1": [0, 1], "worker0": [1], "worker1": [1]}
WORKERS_NETWORK = {"cluster.scheduler": "10.77.1.1:9100"}


def test_servers_with_two_addresses(expected: State, tmp_path: Path) -> None:
    """Servers advertise their address on the route to the scheduler by default; workers need the other."""
    own: dict[str, Mapping[str, object]] = {
        "scheduler": {"cluster.scheduler": "0.0.0.0:9100"},
        "worker0": WORKERS_NETWORK,
        "worker1": WORKERS_NETWORK,
    }
    with Hosts(TWO_NETWORKS) as hosts:
        with Job(hosts, tmp_path, "10.77.0.1:9100", {"cluster.lease_seconds": 1}, own) as job:
            for rank in range(2):
                job.start(rank, train, tmp_path, STEPS)
            job.await_log("worker0", "cannot be reached at tcp://10.77.0.")
            job.await_log(
                "worker0", "(Network is unreachable): set cluster.host there to an address that all"
            )
        for rank in range(2):
            own[f"server{rank}"] = {"cluster.host": hosts[f"server{rank}"].ipv4(1)}
        with Job(hosts, tmp_path, "10.77.0.1:9100", own=own) as job:
            for state in job.run(train, tmp_path, STEPS):
                assert_same_bits(state, expected)


def test_a_scheduler_on_loopback(hosts: Hosts, tmp_path: Path) -> None:
    own = {"scheduler": {"cluster.scheduler": "127.0.0.1:9100"}}
    with Job(hosts, tmp_path, "10.77.0.1:9100", {"cluster.lease_seconds": 0.5}, own) as job:
        job.await_log(
            "server0", "no answer from the scheduler at 10.77.0.1:9100 within 0.5 s (Connection refused)"
        )
        job.await_log("server0", "right here and on its host (no loopback address")


def test_servers_on_loopback_with_workers_elsewhere(tmp_path: Path) -> None:
    own = {
        "scheduler": {"cluster.scheduler": "0.0.0.0:9100"},
        "worker0": {"cluster.scheduler": "head:9100"},
    }
    with (
        Hosts({"head": [0], "worker0": [0]}) as hosts,
        Job(hosts, tmp_path, "127.0.0.1:9100", own=own) as job,
    ):
        worker = job.start(0, train, tmp_path, STEPS)
        assert worker.wait() == 1
        said = worker.log + job.log("server0")  # whoever comes second is told
        assert "the server on head is at tcp://127.0.0.1:" in said
        assert "where the worker on worker0 cannot reach it: set cluster.scheduler on head" in said


# ── links ───────────────────────────────────────────────────────────────────────────────────────

BITS_PER_SECOND = 100_000_000
ELEMENTS, ROUNDS = 1_000_003, 2


def push_dense() -> float:
    """Seconds that the rounds took."""
    tensor = torch.arange(ELEMENTS, dtype=torch.float32)
    zps.barrier()
    begin = time.monotonic()
    for round_ in range(ROUNDS):
        total = zps.push_pull(tensor + round_, "x", average=False)
        assert torch.equal(total, 2 * (tensor + round_))
    return time.monotonic() - begin


def test_slow_links(tmp_path: Path) -> None:
    # A rank's link carries all its pushes; the shaper's bucket passes the first bytes at once.
    floor_seconds = 8 * (ROUNDS * 4 * ELEMENTS - BURST_BYTES) / BITS_PER_SECOND
    with (
        Hosts(ONE_EACH, bits_per_second=BITS_PER_SECOND) as hosts,
        Job(hosts, tmp_path, "10.77.0.1:9100") as job,
    ):
        for seconds in job.run(push_dense):
            assert floor_seconds < seconds < 10 * floor_seconds


LAYERS, LAYER_ELEMENTS = 16, 500_000


def push_layers_in_order_of_backward(by_layer: bool) -> list[int]:
    """The layers in the order in which their rounds have ended; the first one is pushed last."""
    gradient = torch.ones(LAYER_ELEMENTS)
    # Later than this, a rank has not pushed the first layers before its link could carry the last ones.
    push_seconds = LAYERS // 4 * 32 * LAYER_ELEMENTS / BITS_PER_SECOND
    while True:
        ended: list[int] = []
        zps.barrier()
        begin = time.monotonic()
        handles = []
        for layer in reversed(range(LAYERS)):
            priority = -layer if by_layer else 0
            handles.append(zps.push_pull_async(gradient, f"layer{layer}", priority=priority))
            handles[-1].call_at_end(partial(ended.append, layer))
        is_late = time.monotonic() - begin > push_seconds
        for handle in handles:
            assert torch.equal(handle.wait(), gradient)
        if not zps.push_pull(torch.tensor([int(is_late)]), "is late", average=False).item():
            return ended


@pytest.mark.parametrize("by_layer", [True, False])
def test_the_first_layer_overtakes_others_on_a_slow_link(tmp_path: Path, by_layer: bool) -> None:
    with (
        Hosts(ONE_EACH, bits_per_second=BITS_PER_SECOND) as hosts,
        Job(hosts, tmp_path, "10.77.0.1:9100", {"sync.scheme": "byteps"}) as job,
    ):
        for ended in job.run(push_layers_in_order_of_backward, by_layer):
            assert (ended.index(0) < ended.index(LAYERS // 4)) == by_layer, ended


def test_training_continues_without_a_server_whose_link_is_cut(
    hosts: Hosts, expected: State, tmp_path: Path
) -> None:
    settings = {"cluster.lease_seconds": LEASE_SECONDS}
    with Job(hosts, tmp_path, "10.77.0.1:9100", settings) as job:
        workers = [job.start(rank, train, tmp_path, STEPS, [1, 3]) for rank in range(2)]
        for rank in range(2):
            await_step(tmp_path, rank, 1, workers[rank])
        with hosts["server1"].unplugged():
            (tmp_path / "go1").touch()
            await_step(tmp_path, 0, 3, workers[0])
        # It may have ended by itself, had it been away for cluster.rendezvous_seconds.
        assert job.processes["server1"].wait() == 1
        assert "(host server1, pid" in job.log("scheduler")
        (tmp_path / "go3").touch()
        for worker in workers:
            assert_same_bits(worker.result(), expected)
        assert job.processes["server0"].wait() == 0
        assert job.processes["scheduler"].wait() == 0


def test_a_worker_whose_link_is_cut_ends_the_job(hosts: Hosts, tmp_path: Path) -> None:
    with Job(hosts, tmp_path, "10.77.0.1:9100", {"cluster.lease_seconds": LEASE_SECONDS}) as job:
        workers = [job.start(rank, train, tmp_path, STEPS, [1]) for rank in range(2)]
        for rank in range(2):
            await_step(tmp_path, rank, 1, workers[rank])
        with hosts["worker1"].unplugged():
            (tmp_path / "go1").touch()
            for name in ("worker0", "server0", "server1", "scheduler"):
                assert job.processes[name].wait() == 1
                assert "worker 1 (host worker1, pid" in job.log(name)
