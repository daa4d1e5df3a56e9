"""Environment variables of the processes of a local cluster."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from zenps.cli.environments import environments
from zenps.config.sources import load, metrics_port_of_worker, rank_from_environment
from zenps.errors import ConfigError
from zenps.keys import generate


def of(*sets: str, torchrun_env: bool = True, **base: str) -> dict[str, dict[str, str]]:
    return environments(load(sets=sets, environ=base).config, base, torchrun_env=torchrun_env)


def test_names_in_order_of_starting() -> None:
    found = of("cluster.workers=2", "cluster.servers=1")
    assert list(found) == ["scheduler", "server 0", "worker 0", "worker 1"]


def test_every_role_loads_the_number_of_nodes() -> None:
    for environment in of("cluster.workers=3", "cluster.servers=2").values():
        cluster = load(environ=environment).config.cluster
        assert (cluster.workers, cluster.servers) == (3, 2)


def test_the_scheduler_alone_waits_for_workers_that_join_again() -> None:
    seconds = {name: load(environ=each).config.cluster.rejoin_seconds for name, each in of().items()}
    assert [name for name, each in seconds.items() if each] == ["scheduler"]


def test_workers_have_the_variables_of_torchrun() -> None:
    found = of("cluster.workers=2", WORLD_SIZE="8", RANK="7", DMLC_WORKER_ID="7")
    for rank in range(2):
        environment = found[f"worker {rank}"]
        assert rank_from_environment(environment) == rank
        assert environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert found["worker 0"]["MASTER_PORT"] == found["worker 1"]["MASTER_PORT"]


def test_workers_without_the_variables_of_torchrun_know_their_rank() -> None:
    inherited = {"WORLD_SIZE": "8", "RANK": "7", "LOCAL_RANK": "7", "MASTER_ADDR": "10.0.0.1"}
    found = of("cluster.workers=2", torchrun_env=False, **inherited)
    for rank in range(2):
        environment = found[f"worker {rank}"]
        assert rank_from_environment(environment) == rank
        assert environment.keys() & {"LOCAL_WORLD_SIZE", "MASTER_PORT", *inherited} == set()
        assert load(environ=environment).config.cluster.workers == 2


@pytest.mark.parametrize("torchrun_env", [True, False])
def test_what_a_torchrun_around_launch_has_set_does_not_concern_workers(torchrun_env: bool) -> None:
    """They would wait for its store, and for a restart that nobody makes."""
    inherited = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    for environment in of(torchrun_env=torchrun_env, **inherited).values():
        assert environment.keys() & inherited.keys() == set()


def test_cores_are_shared_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert of("cluster.workers=2", "cluster.servers=2")["worker 0"]["OMP_NUM_THREADS"] == "4"
    assert of("cluster.workers=64")["worker 0"]["OMP_NUM_THREADS"] == "1"
    assert of(OMP_NUM_THREADS="5")["worker 0"]["OMP_NUM_THREADS"] == "5"
    assert of("cluster.workers=2", "cluster.servers=2")["server 0"]["ZENPS_KERNELS_THREADS"] == "4"
    assert "ZENPS_KERNELS_THREADS" not in of("kernels.threads=3")["server 0"]


def test_fixed_ports_are_counted_up() -> None:
    settings = ("cluster.workers=2", "cluster.servers=2", "metrics.port=9100", "cluster.server_port=7000")
    for torchrun_env in (True, False):
        found = of(*settings, torchrun_env=torchrun_env)
        configs = {name: load(environ=environment).config for name, environment in found.items()}
        ports = {
            name: metrics_port_of_worker(config.metrics.port, found[name])
            if name.startswith("worker")
            else config.metrics.port
            for name, config in configs.items()
        }
        assert [*ports.values()] == [9100, 9101, 9102, 9103, 9104]
        servers = [config.cluster.server_port for name, config in configs.items() if "server" in name]
        assert servers == [7000, 7001]


def test_workers_of_a_host_add_their_rank_there_to_a_fixed_port() -> None:
    """As torchrun starts them, with the same settings."""
    ports = [metrics_port_of_worker(9100, {"LOCAL_RANK": str(rank)}) for rank in range(3)]
    assert ports == [9100, 9101, 9102]
    assert [metrics_port_of_worker(port, {"LOCAL_RANK": "1"}) for port in (0, -1)] == [0, -1]
    with pytest.raises(ConfigError, match=r"metrics\.port = 65535.* room for 1 more"):
        metrics_port_of_worker(65535, {"LOCAL_RANK": "1"})


def test_a_machine_without_ipv4_loopback_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told "[Errno 99] Cannot assign requested address", and not what of."""
    monkeypatch.setattr("zenps.cli.environments._LOOPBACK", "192.0.2.1")  # of no machine
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR = '192.0.2.1': .* an address of this machine \("):
        of()


@pytest.mark.parametrize("port", ["0", "-1"])
def test_free_port_and_no_port_stay(port: str) -> None:
    for environment in of(f"metrics.port={port}", ZENPS_METRICS_PORT=port).values():
        assert environment["ZENPS_METRICS_PORT"] == port


def test_ports_run_out() -> None:
    assert len(of("metrics.port=65533", "cluster.workers=1")) == 3
    with pytest.raises(ConfigError, match=r"metrics\.port = 65534"):
        of("metrics.port=65534", "cluster.workers=2")


@pytest.mark.parametrize("name", ["scheduler", "operator", "server-0", "worker-1"])
def test_a_secret_that_is_missing_is_named_before_anything_starts(tmp_path: Path, name: str) -> None:
    generate(tmp_path / "keys", workers=2, servers=1)
    (tmp_path / f"keys/{name}.secret").unlink()
    with pytest.raises(ConfigError, match=rf"{name}\.secret"):
        of(
            "cluster.workers=2",
            f"security.keys={tmp_path}/keys/keys.toml",
            f"security.secret={tmp_path}/keys",
        )


def test_every_node_needs_its_secret(tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=2, servers=1)
    secured = (f"security.keys={tmp_path}/keys/keys.toml", f"security.secret={tmp_path}/keys")
    assert len(of("cluster.workers=2", *secured)) == 4
    with pytest.raises(ConfigError, match=r"worker-2\.secret"):
        of("cluster.workers=3", *secured)
    for other in (f"{tmp_path}/keys/worker-0.secret", "a" * 300):
        with pytest.raises(ConfigError, match="the directory with the secrets of all nodes"):
            of(secured[0], f"security.secret={other}")


def test_scheduler_of_this_machine_is_accepted() -> None:
    assert of("cluster.scheduler=127.0.0.1:7777")


# 192.0.2.0/24 is for documentation: https://www.rfc-editor.org/rfc/rfc5737
@pytest.mark.parametrize("address", ["192.0.2.1:7777", "no-such-host.invalid:7777"])
def test_scheduler_elsewhere_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="an address of this machine"):
        of(f"cluster.scheduler={address}")


def test_a_link_local_scheduler_is_bound_on_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []

    class Socket(socket.socket):
        def bind(self, address: object) -> None:
            bound.append(address)

    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 7777, 0, 3))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
    monkeypatch.setattr(socket, "socket", Socket)
    assert of("cluster.scheduler=[fe80::1]:7777")
    assert bound[0] == ("fe80::1", 0, 0, 3)
