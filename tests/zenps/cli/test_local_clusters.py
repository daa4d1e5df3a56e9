"""Discovery of the clusters on this machine: of real launches, several at once, killed ones, by bad files."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from zenps.cli.local_clusters import LocalCluster, find_cluster, find_clusters, options_for, published
from zenps.config.settings import ClusterConfig
from zenps.config.sources import load
from zenps.errors import ConfigError
from zenps.keys import generate

TRAINING = "import zenps as zps; zps.init(); zps.barrier(); input(); zps.shutdown()"
ADDRESS = "127.0.0.1:1"
STATUS = ("status", "--json", "--timeout-seconds", "30")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of this process's clusters are, which are no others'."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"zenps-{os.geteuid()}"


def found(*sets: str) -> list[str]:
    return [cluster.address for cluster in find_clusters(load(sets=sets, environ={}))]


def launched(zenps: Any, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A launch that has started all processes, which run until it ends, and the address of its scheduler."""
    popen = zenps.start("launch", *options, "--", "sh", "-c", "echo started; exec sleep 600")
    assert "started" in popen.stdout.readline()
    for line in popen.stderr:  # lines of the scheduler may come before
        if told := re.search(r"cluster\.scheduler=(\S+) .*shows this cluster", line):
            return popen, told[1]
    raise AssertionError("launch has ended")


def end(popen: subprocess.Popen[str]) -> None:
    popen.terminate()
    popen.communicate(timeout=30)


@pytest.mark.parametrize(
    ("address", "job", "options"),
    [
        ("127.0.0.1:1", "default", "--set cluster.scheduler=127.0.0.1:1"),
        ("[::1]:1", "default", "--set 'cluster.scheduler=[::1]:1'"),
        ("[::1]:1", "my job", "--set 'cluster.scheduler=[::1]:1' --set 'cluster.job=my job'"),
    ],
)
def test_options_can_be_pasted_into_a_shell(address: str, job: str, options: str) -> None:
    """Where brackets are a pattern of file names."""
    assert options_for(address, job) == options


# ── commands ────────────────────────────────────────────────────────────────────────────────────


def test_the_only_cluster_is_found_until_it_ends(zenps: Any) -> None:
    other = ("--set", "sync.partition=parallel")  # than what the commands below have
    popen, address = launched(zenps, "--workers", "1", "--servers", "2", *other)
    status = zenps(*STATUS)
    assert (status.returncode, status.stderr) == (0, f"zenps: found your cluster at {address}\n")
    assert json.loads(status.stdout)["nodes"][0]["address"] == address
    drain = zenps("drain", "0", "--timeout-seconds", "30")
    assert drain.stderr.startswith(f"zenps: found your cluster at {address}\nzenps: the job is gathering")
    health = zenps("health", "--role", "scheduler")
    assert (health.returncode, health.stderr) == (0, f"zenps: found your cluster at {address}\n")
    doctor = zenps("doctor")
    assert re.search(rf"scheduler +{address}: gathering", doctor.stdout)
    assert re.search(r"gathering: 0 of 1 worker\(s\) and \d of 2 server\(s\)", doctor.stdout)
    assert (doctor.returncode, "shared settings" in doctor.stdout) == (0, False)
    end(popen)
    ended = zenps("status")
    assert ended.returncode == 2
    assert "no cluster of yours was found on this machine" in ended.stderr


def test_one_of_several_clusters_has_to_be_chosen(zenps: Any) -> None:
    first, address = launched(zenps)
    second, other = launched(zenps, "--workers", "2", "--set", "cluster.job=the other")
    refused = zenps("status")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "one of 2 clusters on this machine: " in refused.stderr
    assert f"--set cluster.scheduler={address} (1 worker(s), 1 server(s), started in " in refused.stderr
    assert f"--set cluster.scheduler={other} --set 'cluster.job=the other' (2 worker(s)" in refused.stderr
    chosen = zenps(*STATUS, "--set", "cluster.job=the other")
    assert json.loads(chosen.stdout)["nodes"][0]["address"] == other
    named = zenps(*STATUS, "--set", f"cluster.scheduler={address}")
    assert (json.loads(named.stdout)["nodes"][0]["address"], named.stderr) == (address, "")
    end(first)
    assert zenps(*STATUS).stderr == f"zenps: found your cluster at {other}\n"
    end(second)


def test_a_killed_cluster_is_no_cluster(zenps: Any) -> None:
    popen, _ = launched(zenps)
    directory = Path(zenps.environment["TMPDIR"], f"zenps-{os.geteuid()}")
    popen.kill()
    popen.wait(timeout=30)
    eventually(lambda: not zenps.processes())
    assert len(list(directory.iterdir())) == 1
    assert "no cluster of yours was found" in zenps("status").stderr
    assert list(directory.iterdir()) == []


def test_a_scheduler_that_is_started_again_is_found_once(zenps: Any) -> None:
    popen, address = launched(zenps)
    os.kill(zenps.pid_of("zenps.cli scheduler"), signal.SIGKILL)
    eventually(lambda: zenps(*STATUS).stderr == f"zenps: found your cluster at {address}\n")
    end(popen)


def test_a_scheduler_that_was_started_by_hand_is_found(zenps: Any, scheduler: str) -> None:
    assert zenps(*STATUS).stderr == f"zenps: found your cluster at {scheduler}\n"


@pytest.mark.long
def test_a_server_of_the_cluster_that_was_found_is_drained(zenps: Any) -> None:
    command = [sys.executable, "-c", TRAINING.replace("input()", "print('up'); import time; time.sleep(600)")]
    popen = zenps.start("launch", "--servers", "2", "--", *command)
    assert "up" in popen.stdout.readline()
    drained = zenps("drain", "1", "--timeout-seconds", "30")
    assert (drained.returncode, drained.stdout) == (0, "server 1 has no slots any more and ends\n")
    end(popen)


def test_nothing_secret_is_written(zenps: Any, tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=1, servers=1)
    secured = ("--set", "security.keys=keys/keys.toml", "--set", "security.secret=keys")
    popen, address = launched(zenps, *secured)
    (path,) = Path(zenps.environment["TMPDIR"], f"zenps-{os.geteuid()}").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    expected = {"address": address, "job": "default", "workers": 1, "servers": 1, "folder": str(tmp_path)}
    assert json.loads(path.read_text()) == expected
    assert zenps(*STATUS, *secured).returncode == 0
    end(popen)


@pytest.mark.long
def test_workers_without_torchrun_s_variables_train(zenps: Any) -> None:
    script = (
        "import os, zenps as zps; zps.init();"
        "print(zps.rank(), zps.size(), zps.local_rank(), zps.local_size(), 'WORLD_SIZE' in os.environ);"
        "zps.shutdown()"
    )
    done = zenps("launch", "--workers", "2", "--no-torchrun-env", "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    expected = ["worker 0  | 0 2 0 2 False", "worker 1  | 1 2 1 2 False"]
    assert sorted(done.stdout.splitlines()) == expected


# ── files ───────────────────────────────────────────────────────────────────────────────────────


def test_a_cluster_is_found_within_the_context_alone(directory: Path) -> None:
    assert found() == []
    with published(ClusterConfig(job="a"), ADDRESS):
        assert found() == found("cluster.job=a") == [ADDRESS]
        assert found("cluster.job=default") == []
        with published(ClusterConfig(), "127.0.0.1:2"):
            assert found() == [ADDRESS, "127.0.0.1:2"]
    assert found() == []
    assert list(directory.iterdir()) == []


def test_settings_become_those_of_the_cluster(directory: Path) -> None:
    with published(ClusterConfig(job="a", workers=3), ADDRESS):
        loaded = load(sets=["cluster.lease_seconds=7"], environ={})
        cluster = find_cluster(loaded).configure(loaded.config).cluster
    assert (cluster.scheduler, cluster.job, cluster.workers, cluster.lease_seconds) == (ADDRESS, "a", 3, 7)


def test_many_readers_at_once_remove_no_file_of_a_live_cluster(directory: Path) -> None:
    context = multiprocessing.get_context("fork")
    with published(ClusterConfig(), ADDRESS):
        (directory / "left.json").write_text("{}")
        with context.Pool(4) as pool:
            answers = pool.map(_found_often, range(4))
        assert answers == [True] * 4
    assert list(directory.iterdir()) == []


def _found_often(_: int) -> bool:
    return all(found() == [ADDRESS] for _ in range(100))


@pytest.mark.parametrize("content", [b"", b"{", b'{"address": 5}', b"\xff" * 70_000])
def test_what_is_no_cluster_is_ignored(directory: Path, content: bytes) -> None:
    with published(ClusterConfig(), ADDRESS):
        (path,) = directory.iterdir()
        path.write_bytes(content)
        assert found() == []


def test_a_directory_that_others_can_enter_is_not_used(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    with caplog.at_level("INFO"), published(ClusterConfig(), ADDRESS):
        assert list(directory.iterdir()) == []
        assert found() == []
    assert f"expected {directory} to be a directory that this user alone can enter" in caplog.text


@pytest.mark.parametrize("kind", ["file", "link", "missing", "another user's"])
def test_what_is_no_directory_of_this_user_is_not_used(directory: Path, kind: str) -> None:
    if kind == "file":
        directory.write_text("")
    elif kind == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a directory away")
        directory.mkdir(mode=0o700)
        os.chown(directory, 65534, 65534)
    elif kind == "link":
        (directory.parent / "real").mkdir(mode=0o700)
        directory.symlink_to("real")
    else:
        directory.parent.rmdir()
    with published(ClusterConfig(), ADDRESS):
        assert found() == []
    with pytest.raises(ConfigError, match="zenps launch starts a cluster"):
        find_cluster(load(environ={}))


def test_a_working_directory_that_is_gone_ends_no_scheduler(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with published(ClusterConfig(), ADDRESS):
        assert found() == []


def test_a_folder_may_have_any_name(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\n"
    os.mkdir(odd)
    monkeypatch.chdir(os.fsdecode(odd))
    with published(ClusterConfig(), ADDRESS):
        assert find_cluster(load(environ={})).folder == f"{tmp_path}/\ufffd\n"


def test_the_name_of_a_folder_cannot_write_to_the_terminal() -> None:
    assert r"'/a\x1b[2J\n'" in str(LocalCluster(ADDRESS, "default", 1, 1, "/a\x1b[2J\n"))
