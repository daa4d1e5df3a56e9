"""``zenps plan`` by a trace that is there: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zenps.cli.commands import main
from zenps.cli.plan import recorded
from zenps.config.settings import ClusterConfig, Config, MetricsConfig, StatusConfig, SyncConfig
from zenps.config.sources import load
from zenps.observe.recording import encode
from zenps.schemes.registry import fixed_schemes

SCHEMES = [scheme.name for scheme in fixed_schemes()]
PEERS = [scheme.name for scheme in fixed_schemes() if scheme.engine == "peers"]


@pytest.fixture
def trace(tmp_path: Path, made_up: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """In a folder without settings."""
    monkeypatch.chdir(tmp_path)
    pushes = made_up(np.where(np.arange(8192) < 1024, 0.9, 0.01), name="a [bold]table")
    (tmp_path / "t").write_bytes(b"".join(encode(item) for pair in pushes for item in pair))
    (tmp_path / "train.py").write_text("import zenps")
    return "t"


def test_json_is_the_whole_plan(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "8,512", "--servers", "8", "--bandwidth", "1Gbit", "--latency", "1ms", "--json"]
    assert main(["plan", "--trace", trace, *options, "--write", "new.toml"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out)
    assert (plan["workers"], plan["servers"], plan["scheme"]) == (8, 8, "zenps")
    assert (plan["bytes_per_second"], plan["latency_seconds"]) == (1.25e8, 1e-3)
    (tensor,) = plan["tensors"]
    assert (tensor["rows"], tensor["columns"], tensor["is_sparse"]) == (8192, 16, True)
    assert tensor["skewness"]["8"] == pytest.approx(8 * 921.6 / (921.6 + 71.7), rel=0.03)
    assert {prediction["workers"] for prediction in plan["predictions"]} == {8, 512}
    assert err == "set sync.scheme = 'zenps' in new.toml\n"
    assert Path("new.toml").read_text() == '[sync]\nscheme = "zenps"\n'


def test_the_settings_of_the_job_are_those_that_the_notes_name(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--trace", trace, "--json", "--set", "sync.sparsifier=topk"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "sync.sparsifier = 'topk' is not counted: dense gradients count whole" in notes


def test_tables_are_for_people(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", trace]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["a", "[bold]table", "8192", "16"]
    (heading,) = (line for line in lines if line.startswith("scheme "))
    assert heading.split() == [
        "scheme",
        *(word for n in (8, 16, 32, 64, 128, 256, 512, 1024) for word in ("n", "=", str(n))),
    ]
    assert any(line.startswith("zenps for 8 workers: ") for line in lines)
    assert all(len(line) <= 120 for line in lines)


def test_single_elements_get_their_granule(
    tmp_path: Path, made_up: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pushes = made_up(np.full(200_000, 0.05), columns=1, steps=2)
    Path("t").write_bytes(b"".join(encode(item) for pair in pushes for item in pair))
    Path("zenps.toml").write_text("[sync]\ngranule = 16\n")
    assert main(["plan", "--trace", "t", "--workers", "4", "--write", "zenps.toml"]) == 0
    out = capsys.readouterr().out
    assert "in runs of 64 (sync.granule)" in " ".join(out.split())
    assert "set sync.granule = 64, which was 16 in zenps.toml" in out
    assert load(environ={}).config.sync.granule == 64


def test_a_scheme_that_the_settings_rule_out_is_not_recommended(
    tmp_path: Path, made_up: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pushes = made_up(np.full(8192, 0.001), columns=64)  # with hardly a row in common
    Path("t").write_bytes(b"".join(encode(item) for pair in pushes for item in pair))
    options = ["plan", "--trace", "t", "--workers", "4", "--latency", "0", "--json"]

    def planned(*more: str) -> dict[str, Any]:
        assert main([*options, *more]) == 0
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert [prediction["scheme"] for prediction in plan["predictions"]] == SCHEMES
        return plan

    assert planned()["scheme"] in PEERS
    note = f"security.keys rules out {', '.join(PEERS)}"
    Path("zenps.toml").write_text('[security]\nkeys = "keys.toml"\n')
    plan = planned("--write", "zenps.toml")
    assert load(environ={}).config.sync.scheme == plan["scheme"]
    assert note in plan["notes"]
    assert not any(name in plan["reason"] for name in PEERS)
    # As well by the settings of another file, and by those that are in force beside it.
    Path("zenps.toml").rename("there.toml")
    assert note in planned("--write", "there.toml")["notes"]
    assert note in planned("--set", "security.keys=keys.toml", "--write", "new.toml")["notes"]


WRONG = {
    "nothing to plan by": ([], "-- CMD [ARG ...] to record, or --trace FILE"),
    "no such trace": (["--trace", "nowhere"], "trace = 'nowhere': expected a readable file"),
    "no trace": (["--trace", "train.py"], "a trace that zenps plan has written"),
    "bandwidth": (["--trace", "t", "--bandwidth", "10Gbps"], "--bandwidth = '10Gbps'"),
    "latency": (["--trace", "t", "--latency", "fast"], "--latency = 'fast'"),
    "workers": (["--trace", "t", "--workers", "8,many"], "--workers = 'many': expected an integer from 2"),
    "too many": (["--trace", "t", "--workers", "5000"], "--workers = '5000'"),
    "steps": (["--steps", "3", "--", "./nowhere"], "--steps = '3': expected an integer from 4"),
    "steps of no CMD": (
        ["--trace", "t", "--steps", "9"],
        "--steps = '9': expected -- CMD [ARG ...] to record, or no --steps: --trace is already recorded",
    ),
    "workers of no CMD": (["--trace", "t", "--local-workers", "2"], "--local-workers = '2': expected -- CMD"),
    "config": (["--trace", "t", "--write", "train.py"], "expected TOML"),
    "command": (["--", "./nowhere"], "CMD = './nowhere'"),
    # ./nowhere is refused last of all, when a training is to start.
    "trace into no folder": (["--trace", "no/t", "--", "./nowhere"], "--trace = 'no/t': expected a file"),
    "trace onto a folder": (["--trace", ".", "--", "./nowhere"], "--trace = '.': expected a file"),
    "trace into a file": (["--trace", "t/t", "--", "./nowhere"], "--trace = 't/t': expected a file"),
    "write into no folder": (["--write", "no/z.toml", "--", "./nowhere"], "--write = 'no/z.toml': expected"),
    "cluster.workers": (
        ["--set", "cluster.workers=2000", "--", "./nowhere"],
        "cluster.workers = 2000: expected at most 1024 to plan for, or --workers",
    ),
}


@pytest.mark.parametrize(("arguments", "part"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_in_one_line(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("zenps: ")
    assert part in err


def test_more_workers_than_are_planned_for_may_train(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "cluster.workers=2000", "--workers", "1024", "--json"]
    assert main(["plan", "--trace", trace, *options]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == 1024


def test_a_training_is_recorded_on_a_cluster_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the settings say of the nodes of the cluster to plan for, and of what they send."""
    monkeypatch.chdir(tmp_path)
    Path("zenps.toml").write_text(
        '[cluster]\nscheduler = "192.0.2.1:9000"\nhost = "192.0.2.2"\nserver_port = 9001\nworkers = 16\n'
        '[sync]\nscheme = "byteps"\nconsistency = "ds-sync"\ntrace = "trace.json"\nseed = 5\n'
        "[metrics]\nport = 9002\n[status]\nport = 9003\n"
    )
    started: list[tuple[Config, Mapping[str, str]]] = []

    def record(config: Config, command: object, environ: Mapping[str, str], *rest: object) -> int:
        started.append((config, environ))
        return 7

    monkeypatch.setattr(recorded, "record", record)
    assert main(["plan", "--workers", "16", "--", "true"]) == 7
    ((config, environ),) = started
    own = Config(
        cluster=ClusterConfig(workers=2),
        sync=SyncConfig(seed=5),
        metrics=MetricsConfig(port=-1),
        status=StatusConfig(port=-1),
    )
    assert config == own
    assert load(environ=environ).config == own
