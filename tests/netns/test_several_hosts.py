"""Jobs over several hosts: what each node is reached by, and what happens when it cannot be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.cluster import Cluster
from tests.netns.hosts import Hosts, why_not_here
from tests.netns.job import Job, train

HOSTS = {name: [0] for name in ("head", "server0", "server1", "worker0", "worker1")}
STEPS = 6

State = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def _several_hosts() -> None:
    if reason := why_not_here():
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(HOSTS) as hosts:
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


ADDRESSES = {
    "IPv4": ("10.77.0.1:9100", {}, "tcp://10.77.0.2:"),
    "IPv6": ("[fd77::1]:9100", {}, "tcp://[fd77::2]:"),
    "names": ("head:9100", {"cluster.host": "server0"}, "tcp://server0:"),
    "IPv4 names": ("head.v4:9100", {"cluster.host": "server0.v4"}, "tcp://server0.v4:"),
    "IPv6 names": ("head.v6:9100", {"cluster.host": "server0.v6"}, "tcp://server0.v6:"),
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
