"""Diagnostics of ``zenps doctor``: verdicts and advice."""

from __future__ import annotations

import importlib.util
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zenps.cli import doctor
from zenps.cli.doctor import Check, examine
from zenps.cli.local_clusters import LocalCluster
from zenps.config.settings import GIB
from zenps.config.shared import shared_settings
from zenps.config.sources import load
from zenps.kernels.native.library import find_library
from zenps.keys import generate
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import NodeStatus, Status


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_SECONDS", 1.0)


def examined(*sets: str) -> dict[str, Check]:
    return {check.name: check for check in examine(load(sets=sets, environ={}).config)}


def test_all_checks_pass() -> None:
    checks = examined("cluster.server_budget_bytes=1MiB")
    assert {check.verdict for check in checks.values()} == {"ok"}
    assert {"python", "torch", "pyzmq", "msgpack", "cuda", "metrics", "open files"} <= checks.keys()


def test_every_check_that_is_not_ok_has_advice() -> None:
    checks = examined("cluster.workers=2", "cluster.server_budget_bytes=1TiB", "sync.partition=no.such:Thing")
    assert checks["scheduler"].verdict == "fail"
    assert checks["memory"].verdict == "warn"
    assert checks["sync.partition"].verdict == "warn"
    assert "no.such:Thing" in checks["sync.partition"].found
    assert all(check.advice for check in checks.values() if check.verdict != "ok")


def test_one_of_several_clusters_has_to_be_chosen() -> None:
    clusters = [LocalCluster(f"127.0.0.1:{port}", "default", 1, 1, "/home/me") for port in (1, 2)]
    checks = {check.name: check for check in examine(load(environ={}).config, clusters)}
    assert checks["scheduler"].verdict == "warn"
    assert all(f"--set cluster.scheduler={one.address} " in checks["scheduler"].advice for one in clusters)
    assert examined("cluster.scheduler=127.0.0.1:1")["scheduler"].found.startswith("127.0.0.1:1: ")


# By its dotted path: what a plug-in needs of a scheme is known only once it is imported.
EXDYNA = "zenps.sparsifiers.exdyna:ExDyna"


def test_sparsifiers() -> None:
    assert examined()["sync.sparsifier"] == Check("sync.sparsifier", "ok", "none")
    assert examined("sync.sparsifier=exdyna")["sync.sparsifier"].verdict == "ok"
    refused = examined(f"sync.sparsifier={EXDYNA}", "sync.scheme=omnireduce")["sync.sparsifier"]
    assert refused.verdict == "fail"
    assert "sync.scheme = omnireduce sends no indices" in refused.found
    unknown = examined("sync.sparsifier=no.such:Thing")["sync.sparsifier"]
    assert (unknown.verdict, unknown.advice[:15]) == ("warn", "put its folder ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("raise RuntimeError('planted')", "RuntimeError: planted"),
        ("import sys; sys.exit('planted')", "SystemExit: planted"),
        ("(", "SyntaxError: '(' was never closed"),
        ("", "AttributeError: module 'boom' has no attribute 'Class'"),
    ],
    ids=["error", "exit", "syntax", "class"],
)
@pytest.mark.parametrize("setting", ["sync.partition", "sync.sparsifier"])
def test_a_plugin_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, line: str, reason: str
) -> None:
    (tmp_path / "boom.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "boom", raising=False)
    check = examined(f"{setting}=boom:Class")[setting]
    assert (check.verdict, check.advice) == ("warn", "name another, or mend this one")
    assert f"(importing it failed: {reason}" in check.found


@pytest.mark.parametrize(("backend", "verdict"), [("auto", "warn"), ("native", "fail"), ("torch", "ok")])
def test_native_kernels_that_were_not_built(
    backend: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "open_library", lambda: "were not built")
    check = examined(f"kernels.backend={backend}")["kernels"]
    assert (check.verdict, "C compiler" in check.advice) == (verdict, verdict != "ok")


def test_native_kernels() -> None:
    found = examined("kernels.threads=3")["kernels"].found
    assert found == "native, 3 thread(s)" if find_library() else "not built" in found


def test_keys(tmp_path: Path) -> None:
    assert examined()["keys"].found.startswith("none")
    generate(tmp_path / "keys", workers=1, servers=1)
    secured = (f"security.keys={tmp_path}/keys/keys.toml", f"security.secret={tmp_path}/keys")
    assert examined(*secured)["keys"].found.startswith("that of operator, one of 4 in ")
    for name in ("operator", "scheduler", "worker-0"):
        (tmp_path / f"keys/{name}.secret").rename(tmp_path / f"{name}.secret")
    check = examined(*secured)["keys"]
    assert check.verdict == "ok", "a server's machine has its own key alone"
    assert check.found.startswith("that of server-0, one of 4 in ")
    (tmp_path / "operator.secret").rename(tmp_path / "keys/operator.secret")
    (tmp_path / "keys/operator.secret").chmod(0o644)
    check = examined(*secured)["keys"]
    assert (check.verdict, "chmod 600" in check.found) == ("fail", True)


def test_a_secret_of_a_name_that_no_file_has(tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=1, servers=1)
    check = examined(f"security.keys={tmp_path}/keys/keys.toml", f"security.secret={'a' * 300}")["keys"]
    assert check.verdict == "fail"
    assert "expected a readable file (File name too long)" in check.found
    assert check.found.startswith("security.secret = ")


def test_torch_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert examined()["torch threads"].verdict == "warn"


def test_a_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check = examined()["cuda"]
    assert (check.verdict, check.found) == ("warn", "GPU 0, GPU 1, but no CuPy")
    assert "cupy-cuda13x" in check.advice
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert examined()["cuda"] == Check("cuda", "ok", "GPU 0, GPU 1")


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert examined("cluster.workers=4", "cluster.scheduler=127.0.0.1:1")["open files"].verdict == "ok"
    assert examined("cluster.workers=200", "cluster.scheduler=127.0.0.1:1")["open files"].verdict == "fail"


def test_container_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_bytes", lambda: 5 * GIB // 2)
    assert examined()["memory"] == Check(
        "memory",
        "warn",
        "2.5 GiB available; with a budget of 4.0 GiB a server may take 12.5 GiB",
        "lower cluster.server_budget_bytes where servers run here, or they may be killed",
    )
    assert examined("cluster.server_budget_bytes=513MiB")["memory"].verdict == "warn"
    fitting = examined("cluster.server_budget_bytes=512MiB")["memory"]
    assert fitting.verdict == "ok"
    assert fitting.found.endswith("with a budget of 0.5 GiB a server may take 2.5 GiB")


def test_taken_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        checks = examined(
            f"metrics.port={port}", f"cluster.server_port={port}", "cluster.scheduler=127.0.0.1:1"
        )
    assert checks["metrics"].verdict == checks["own address"].verdict == "warn"
    assert "in use" in checks["metrics"].found
    assert examined("metrics.port=-1")["metrics"].found == "off"


def test_address_that_is_not_here() -> None:
    check = examined("metrics.host=203.0.113.1", "metrics.port=9100")["metrics"]
    assert check.verdict == "fail"
    assert "assign" in check.found


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_address_before_this_machine_is_as_good_as_its_own(is_taken: bool) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1] if is_taken else 0
        sets = ("cluster.scheduler=127.0.0.1:1", "cluster.host=203.0.113.1", f"cluster.server_port={port}")
        check = examined(*sets)["own address"]
    assert check.found.startswith("203.0.113.1, on all addresses of this machine, ")
    assert (check.verdict, "in use" in check.found) == (("warn", True) if is_taken else ("ok", False))


def test_a_host_that_cannot_be_resolved() -> None:
    sets = ("cluster.scheduler=127.0.0.1:1", "cluster.host=no-such-host.invalid")
    assert examined(*sets)["own address"].verdict == "fail"


def test_no_scheduler_listens() -> None:
    check = examined("cluster.scheduler=127.0.0.1:1")["scheduler"]
    assert check.verdict == "fail"
    assert "refused" in check.found


def test_name_that_cannot_be_resolved() -> None:
    assert examined("cluster.scheduler=no-such-host.invalid:7777")["own address"].verdict == "fail"


def test_another_program_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        check = examined(f"cluster.scheduler=127.0.0.1:{other.getsockname()[1]}")["scheduler"]
    assert check.verdict == "fail"
    assert "no answer" in check.found


def test_cluster_that_gathers(scheduler: str) -> None:
    checks = examined(f"cluster.scheduler={scheduler}", "sync.granule=64")
    assert checks["scheduler"].verdict == "ok"
    assert "gathering" in checks["scheduler"].found
    assert checks["nodes"].verdict == "warn"
    assert "0 of 1 worker(s) and 0 of 1 server(s)" in checks["nodes"].found
    assert checks["shared settings"].verdict == "fail"
    assert checks["shared settings"].found == "sync.granule is 64 here and 32 there"


def test_a_scheduler_of_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = load(sets=["cluster.workers=3", "cluster.on_worker_loss=continue"], environ={}).config
    status = Status("default", "gathering", 0, 10.0, shared_settings(elastic), ())
    monkeypatch.setattr(doctor, "fetch", lambda *args: status)
    monkeypatch.setattr(doctor, "why_unreachable", lambda *args: "")
    check = examined("cluster.scheduler=127.0.0.1:1", "cluster.workers=3")["shared settings"]
    assert check.verdict == "fail"
    assert check.found == "cluster.on_worker_loss is 'fail' here and 'continue' there"


@pytest.mark.parametrize(
    ("state", "verdict"), [("running", "warn"), ("confirming", "warn"), ("failed", "fail")]
)
def test_lost_nodes(state: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def node(role: Role, rank: int, state: str) -> NodeStatus:
        return NodeStatus(role, rank, f"host{rank}", 1, "", "", 2, state, 0, 0.0, {})

    nodes = (node("server", 0, "present"), node("server", 1, "lost"), node("worker", 0, "present"))
    status = Status("default", state, 2, 10.0, {}, nodes)
    monkeypatch.setattr(doctor, "fetch", lambda *args: status)
    monkeypatch.setattr(doctor, "why_unreachable", lambda *args: "")
    check = examined("cluster.scheduler=127.0.0.1:1", "cluster.servers=2")["nodes"]
    assert (check.verdict, "start the job again" in check.advice) == (verdict, verdict == "fail")
    assert check.found.endswith("lost: server 1 (host1)")


def test_exit_code_and_report(zenps: Any) -> None:
    done = zenps("doctor", "--set", "cluster.scheduler=127.0.0.1:1")
    assert done.returncode == 1
    assert "fail scheduler" in done.stdout
    assert "→ start it with zenps scheduler" in done.stdout
    assert done.stderr == ""
    assert zenps("doctor").returncode == 0
