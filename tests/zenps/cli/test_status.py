"""Status of a cluster: tables, JSON, throughput, stragglers, and drains."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from zenps.cli.commands import main
from zenps.cli.printing import show_status, watch_status
from zenps.cli.status import drain, fetch
from zenps.config.settings import ClusterConfig
from zenps.errors import ConfigError, DeadlineError, UsageError
from zenps.wire.scheduler_messages import Change, Drain, NodeStatus, Status
from zenps.wire.status import late_workers, to_json

SERVER = NodeStatus(
    role="server",
    rank=1,
    host="node-1",
    pid=42,
    address="tcp://10.0.0.1:7000",
    metrics="127.0.0.1:9100",
    epoch=3,
    state="present",
    slots=2048,
    silent_seconds=0.25,
    load={
        "rounds": 12.0,
        "received_bytes": 1536.0,
        "sent_bytes": 3.0 * 2**30,
        "busy_seconds": 1.5,
        "held_bytes": 2.0 * 2**20,
        "budget_bytes": 4.0 * 2**30,
        "open_rounds": 2.0,
    },
    rates={"rounds": 2.5, "received_bytes": 512.0, "sent_bytes": 2.0**20, "busy_seconds": 0.25},
)
WORKER = NodeStatus(
    role="worker",
    rank=0,
    host="node-2",
    pid=43,
    address="",
    metrics="",
    epoch=3,
    state="lost",
    slots=0,
    silent_seconds=11.0,
    load={"rounds": 6.0, "pushed_bytes": 100.0, "pulled_bytes": 2048.0, "wait_seconds": 0.5, "step": 5.0},
)


def status(*nodes: NodeStatus) -> Status:
    return Status(
        job="default",
        state="running",
        epoch=3,
        lease_seconds=10.0,
        settings={"sync.codec": "auto", "sync.chunk_bytes": 8 << 20},
        nodes=nodes,
        uptime_seconds=61.2,
        page="127.0.0.1:8080",
        owners=bytes(8192),
        changes=(Change(4.2, "worker 0 (host node-2, pid 43)", "lost", 3),),
    )


def tables(out: str) -> list[list[list[str]]]:
    """Returns the output as paragraphs of lines of cells, without rules."""
    paragraphs = [part.splitlines() for part in out.split("\n\n")]
    return [
        [re.split(r"  +", line.strip()) for line in part if not set(line) <= {"─", " "}]
        for part in paragraphs
    ]


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(status(SERVER, WORKER))
    heading, nodes, loads, changes, settings = tables(capsys.readouterr().out)
    assert heading == [
        ["job default", "running", "epoch 3", "up 61 s", "lease 10 s", "http://127.0.0.1:8080/"],
        ["512 B/s pushed", "1.0 MiB/s pulled", "0.0 rounds/s", "0.0 steps/s"],
    ]
    assert nodes == [
        ["role", "rank", "host", "pid", "address", "metrics", "state", "epoch", "slots", "silent"],
        [
            *("server", "1", "node-1", "42", "10.0.0.1:7000", "127.0.0.1:9100", "present", "3"),
            *("2048 (50%)", "0.2 s"),
        ],
        ["worker", "0", "node-2", "43", "lost", "3", "11.0 s"],
    ]
    assert loads == [
        ["role", "rank", "step", "rounds", "in", "out", "time", "held", "open", "late"],
        [
            *("server", "1", "12 (2.5/s)", "1.5 KiB (512 B/s)", "3.0 GiB (1.0 MiB/s)", "1.5 s busy (25%)"),
            *("2.0 MiB of 4.0 GiB", "2"),
        ],
        ["worker", "0", "5", "6", "2.0 KiB", "100 B", "0.5 s waiting", "0.0 s"],
    ]
    assert changes == [
        ["ago", "epoch", "who", "became"],
        ["4 s", "3", "worker 0 (host node-2, pid 43)", "lost"],
    ]
    assert settings == [["sync.codec=auto", "sync.chunk_bytes=8MiB"]]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"staleness": 2.0}, "2 step(s) in flight"),
        ({"group": 1.0, "group_size": 2.0, "distance": 0.00321}, "2 workers from rank 1, 3.2e-03 apart"),
    ],
)
def test_table_says_how_consistent_workers_are(
    capsys: pytest.CaptureFixture[str], load: dict[str, float], expected: str
) -> None:
    others = msgspec.structs.replace(WORKER, rank=1, load={"group": 1.0})
    show_status(status(msgspec.structs.replace(WORKER, load=load), others))
    loads = tables(capsys.readouterr().out)[2]
    assert loads[0][-1] == "consistency"
    assert loads[1][-1] == expected


def test_table_names_stragglers(capsys: pytest.CaptureFixture[str]) -> None:
    workers = [msgspec.structs.replace(WORKER, rank=rank, late_seconds=0.2) for rank in range(4)]
    workers[2] = msgspec.structs.replace(workers[2], late_seconds=12.34)
    seen = status(*workers)
    show_status(seen)
    _, _, loads, stragglers, _ = tables(capsys.readouterr().out)
    assert [row[-1] for row in loads[1:]] == ["0.2 s", "0.2 s", "12.3 s", "0.2 s"]
    assert stragglers[0] == ["worker 2 is a straggler: others have waited 12.3 s for it"]
    assert late_workers(seen) == [workers[2]]
    assert json.loads(to_json(seen))["stragglers"] == [2]


def test_watching_repeats_until_the_scheduler_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [status(SERVER), status(WORKER)]

    def ask() -> Status:
        if not answers:
            raise DeadlineError("gone")
        return answers.pop(0)

    with pytest.raises(ConfigError, match=r"^--watch = .* expected a terminal"):
        watch_status(ask)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("zenps.cli.printing.WATCH_SECONDS", 0.01)
    with pytest.raises(DeadlineError):
        watch_status(ask)
    out = capsys.readouterr().out
    assert out.index("node-1") < out.rindex("node-2")


def test_hostile_names_and_counters_do_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    load = {"rounds": math.nan, "received_bytes": math.inf, "sent_bytes": -1e308, "busy_seconds": 1e300}
    show_status(status(msgspec.structs.replace(SERVER, host="[red]a\x1b[2J\nb", load=load)))
    out = capsys.readouterr().out
    assert r"[red]a\x1b[2J\x0ab" in out
    assert "\x1b" not in out
    assert [row[:3] for row in tables(out)[1][1:]] == [["server", "1", r"[red]a\x1b[2J\x0ab"]]


def test_status_of_a_live_cluster(zenps: Any, scheduler: str) -> None:
    here = ("--set", f"cluster.scheduler={scheduler}")
    server = zenps.start("server", *here, stdout=None, stderr=None)
    script = "import zenps as zps; zps.init(); input(); zps.shutdown()"
    worker = zenps.start(
        "worker", *here, "--", sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=None, stderr=None
    )
    until = time.monotonic() + 60
    tree: dict[str, Any] = {"state": ""}
    while tree["state"] != "running":
        assert time.monotonic() < until
        tree = json.loads(zenps("status", "--json", *here).stdout)
    assert tree["job"] == "default"
    assert tree["epoch"] == 1
    assert tree["settings"]["sync.partition"] == "balanced"
    nodes = {node["role"]: node for node in tree["nodes"]}
    assert {role: node["rank"] for role, node in nodes.items()} == {"scheduler": 0, "server": 0, "worker": 0}
    assert (nodes["server"]["pid"], nodes["worker"]["pid"]) == (server.pid, worker.pid)
    assert nodes["scheduler"]["address"] == scheduler
    assert nodes["server"]["address"].startswith("tcp://127.0.0.1:")
    assert nodes["server"]["slots"] == 4096
    assert nodes["server"]["load"]["budget_bytes"] == 3 << 30, "the rest is for unread pushes"
    assert all(node["host"] and node["state"] == "present" for node in nodes.values())
    assert {node["epoch"] for node in nodes.values()} <= {0, 1}
    table = zenps("status", *here)
    assert table.returncode == 0
    assert [row[0] for row in tables(table.stdout)[1][1:]] == ["scheduler", "server", "worker"]
    assert tree["page"].startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{tree['page']}/status.json", timeout=30) as answer:
        seen = json.load(answer)
    assert [node["pid"] for node in seen["nodes"]] == [node["pid"] for node in tree["nodes"]]
    assert seen.keys() == tree.keys()
    worker.communicate("\n", timeout=30)
    assert server.wait(timeout=30) == 0


def test_no_scheduler_answers(zenps: Any) -> None:
    begin = time.monotonic()
    done = zenps("status", "--set", "cluster.scheduler=127.0.0.1:1", "--timeout-seconds", "0.3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zenps: no answer from the scheduler at 127.0.0.1:1 within 0.3 s")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - begin < 20


def test_scheduler_of_another_job_does_not_answer(scheduler: str) -> None:
    with pytest.raises(DeadlineError, match="'other'"):
        fetch(ClusterConfig(scheduler=scheduler, job="other"), 0.5)
    assert fetch(ClusterConfig(scheduler=scheduler), 30).state == "gathering"


def test_a_drain_that_is_refused(zenps: Any, scheduler: str) -> None:
    with pytest.raises(UsageError, match=r"^the job is gathering; expected running$"):
        drain(ClusterConfig(scheduler=scheduler), 0, 30)
    done = zenps("drain", "0", "--set", f"cluster.scheduler={scheduler}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "zenps: the job is gathering; expected running\n"


def test_no_scheduler_answers_a_drain(zenps: Any) -> None:
    done = zenps("drain", "0", "--set", "cluster.scheduler=127.0.0.1:1", "--timeout-seconds", "0.3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zenps: no answer from the scheduler at 127.0.0.1:1 within 0.3 s")


def test_a_drain_that_waits_for_another_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving, paused = (
        msgspec.structs.replace(SERVER, rank=rank, state=state)
        for rank, state in ((0, "leaving"), (1, "present"))
    )
    answers = [msgspec.structs.replace(status(leaving, paused), epoch=4), status(paused)]

    def ask(cluster: object, question: object, *rest: object) -> Status:
        if isinstance(question, Drain):
            raise DeadlineError("no answer from the scheduler")
        return answers.pop(0)

    monkeypatch.setattr("zenps.cli.status.ask", ask)
    expected = r"^server 0 is being drained; after 15 s, server 1 \(host node-1, pid 42\) has not confirmed"
    with pytest.raises(DeadlineError, match=expected):
        drain(ClusterConfig(), 0, 15.0)
    with pytest.raises(DeadlineError, match=r"^no answer from the scheduler$"):
        drain(ClusterConfig(), 0, 15.0)


@pytest.mark.parametrize(("options", "seconds"), [((), 25.0), (("--timeout-seconds", "3"), 3.0)])
def test_a_drain_waits_until_a_silent_server_is_lost(
    options: Sequence[str], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("zenps.cli.status.drain", lambda cluster, rank, limit, keys: waited.append(limit))
    sets = ("--set", "cluster.scheduler=127.0.0.1:1", "--set", "cluster.lease_seconds=20")
    assert main(["drain", "0", *sets, *options]) == 0
    assert waited == [seconds]
