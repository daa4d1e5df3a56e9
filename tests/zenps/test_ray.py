"""Arguments and settings of the Ray cluster, before Ray starts anything."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from zenps.config.settings import Config
from zenps.errors import ConfigError


@pytest.mark.parametrize("settings", ["sync.density=0.1", {"sync.density": 0.1}], ids=repr)
def test_settings_that_are_no_list_of_strings_are_refused(settings: Any) -> None:
    """A string was taken to pieces: it was told that 's' is no setting."""
    pytest.importorskip("ray")
    from zenps.ray import Cluster

    with pytest.raises(ConfigError, match=r"sets = .*: expected a list of strings, such as"):
        Cluster(workers=2, settings=settings)


def test_settings_of_the_environment_and_of_zenps_toml_are_not_those_of_scheduler_and_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from zenps.ray import Cluster

    (tmp_path / "zenps.toml").write_text("[cluster]\nrendezvous_seconds = 7\n[sync]\ndensity = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZENPS_CLUSTER_RENDEZVOUS_SECONDS", "8")
    assert Cluster(workers=2)._seconds == Config().cluster.rendezvous_seconds
    assert Cluster(workers=2, settings=["cluster.rendezvous_seconds=9"])._seconds == 9


@pytest.mark.parametrize(("settings", "threads"), [([], 1), (["kernels.threads=4"], 4)])
def test_a_server_sums_on_the_cpu_that_it_reserves_unless_settings_say_otherwise(
    settings: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from zenps.ray import _Role

    configs: SimpleQueue[Config] = SimpleQueue()
    monkeypatch.setattr("zenps.server.service.serve", configs.put)
    monkeypatch.setattr("zenps.observe.log.setup", lambda *_: None)  # it would stay for other tests
    _Role().start("server", settings)
    assert configs.get(timeout=60).kernels.threads == threads
