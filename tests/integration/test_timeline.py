"""What a cluster that loses a server leaves behind: a timeline on one clock, and logs in JSON."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zenps as zps
from tests.integration.cluster import DEADLINE_SECONDS, LEASE_SECONDS, Cluster
from tests.waiting import eventually
from zenps.observe import clock
from zenps.observe.timeline import merge

TENSORS = ("table", "large", "small")
SKEW_SECONDS = 3600
MIN_STEPS = 3
STEPS_BEFORE = 10
"""Steps that must be over, and written to the timeline, before a server is killed."""

Events = list[dict[str, Any]]


def train(path: Path, rank: int) -> None:
    """Steps until rank 0 sees a file. Rank 1 is on a machine whose clock is another."""
    if rank == 1:
        ahead = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + SKEW_SECONDS * 10**9)
        clock.time = ahead  # type: ignore[assignment,attr-defined]
    zps.init()
    until = time.monotonic() + DEADLINE_SECONDS
    while not one_step(path):
        assert time.monotonic() < until
        time.sleep(0.02)
    zps.barrier()
    zps.shutdown()


def profiled(path: Path) -> list[str]:
    """What torch's profiler saw of ours in a step."""
    one_step(path)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        one_step(path)
    return [event.name for event in profiler.events() if event.name.startswith("zenps::")]


def one_step(path: Path) -> bool:
    """A sparse table, a dense tensor over all servers, and a small one, which says whether to stop."""
    indices = torch.arange(zps.rank(), 3000, 3).unsqueeze(0)
    gradient = torch.sparse_coo_tensor(indices, torch.ones(1000, 8), (5000, 8), check_invariants=True)
    handles = [zps.push_pull_async(gradient, "table"), zps.push_pull_async(torch.ones(100_000), "large")]
    is_over = zps.rank() == 0 and (path / "stop").exists()
    handles.append(zps.push_pull_async(torch.tensor([float(is_over)]), "small", average=False))
    return bool([zps.synchronize(handle) for handle in handles][-1])


class Outcome(NamedTuple):
    whole: dict[str, Any]
    logs: dict[str, list[dict[str, Any]]]
    names: dict[int, str]
    """Of processes, by pid: ``worker 1``."""

    @property
    def events(self) -> Events:
        events: Events = self.whole["traceEvents"]
        return events

    def of(self, role: str, **wanted: object) -> Events:
        return [e for e in self.events if wanted.items() <= e.items() and self.name(e).startswith(role)]

    def name(self, event: dict[str, Any]) -> str:
        """That of its process."""
        return self.names[event["pid"]]


def has_heard_of_steps(cluster: Cluster) -> bool:
    """True once the scheduler knows from all workers that those before the loss are over."""
    workers = cluster.nodes("worker")
    return len(workers) == 2 and all(worker.load.get("step", 0) >= STEPS_BEFORE for worker in workers)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    path, parts = tmp_path_factory.mktemp("steps"), tmp_path_factory.mktemp("parts")
    settings = {"sync.trace": parts / "trace.json", "log.format": "json", "log.level": "debug"}
    with Cluster(settings=settings, lease_seconds=LEASE_SECONDS) as cluster:
        workers = [cluster.start(train, path, rank, rank=rank, init=False) for rank in range(2)]
        eventually(lambda: has_heard_of_steps(cluster), DEADLINE_SECONDS)
        (killed,) = [s for s in cluster.servers if s.pid == cluster.nodes("server")[1].pid]
        (part,) = parts.glob(f"trace.server.*.{killed.pid}.*")
        eventually(lambda: f'"step":{STEPS_BEFORE}' in part.read_text(), DEADLINE_SECONDS)
        killed.kill()
        cluster.await_epoch(2)
        (path / "stop").touch()
        for worker in workers:
            worker.result()
        for process in (*cluster.servers, cluster.scheduler):
            assert process is killed or process.wait() == 0
        processes = [cluster.scheduler, *cluster.servers, *workers]
        logs = {p.name: [json.loads(line) for line in p.log.splitlines()] for p in processes}
    assert merge(sorted(parts.iterdir()), path / "trace.json") == 5
    whole = json.loads((path / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in whole["traceEvents"] if e["name"] == "process_name"}
    return Outcome(whole, logs, names)


# ── the timeline ────────────────────────────────────────────────────────────────────────────────


def test_all_roles_are_there_even_one_that_was_killed(outcome: Outcome) -> None:
    names = [event["args"]["name"] for event in outcome.events if event["name"] == "process_name"]
    assert {"scheduler", "worker 0", "worker 1", "server 0", "server 1"} <= set(names)
    processes = {event["pid"]: outcome.name(event) for event in outcome.events}
    assert list(processes.values()) == ["scheduler", "worker 0", "worker 1", "server 0", "server 1"]


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize(
    ("role", "kinds"),
    [
        ("worker", ("compact", "push", "wait", "pull", "scatter")),
        ("server", ("receive", "aggregate", "answer")),
    ],
)
def test_every_tensor_has_its_spans_in_every_step(
    outcome: Outcome, tensor: str, role: str, kinds: tuple[str, ...]
) -> None:
    for kind in kinds:
        phase = "b" if kind == "pull" else "X"
        events = outcome.of(role, name=f"{kind} {tensor}", ph=phase)
        assert all(event["args"]["tensor"] == tensor for event in events)
        steps = {event["args"]["step"] for event in events}
        assert steps >= set(range(MIN_STEPS)), kind
        if role == "worker":  # the dead server has taken some along
            assert steps == set(range(max(steps) + 1)), kind


def test_instants(outcome: Outcome) -> None:
    for role in ("scheduler", "worker", "server"):
        assert {"epoch 1", "epoch 2"} <= {event["name"] for event in outcome.of(role, ph="i")}
    assert {"state running", "lost server 1", "barrier 1"} <= {
        event["name"] for event in outcome.of("scheduler", ph="i")
    }
    assert len(outcome.of("worker", name="barrier", ph="X")) == 2


def test_spans_of_a_thread_nest(outcome: Outcome) -> None:
    threads = defaultdict(list)
    for event in outcome.events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    assert len(threads) >= 4
    for spans in threads.values():
        open_until: list[float] = []
        for begin, duration in sorted(spans):
            while open_until and open_until[-1] <= begin + 0.01:  # times are rounded to nanoseconds
                open_until.pop()
            assert not open_until or begin - duration <= open_until[-1] + 0.01
            open_until.append(begin - duration)


def test_all_are_on_one_clock(outcome: Outcome) -> None:
    """A sum comes after what is summed and before what is pulled, by the clocks of three processes."""
    ends = {(event["pid"], event["id"]): event["ts"] for event in outcome.of("worker", ph="e")}
    pushed, pulled = defaultdict[Any, dict[str, float]](dict), defaultdict[Any, dict[str, float]](dict)
    for event in outcome.of("worker"):
        if event.get("cat") not in ("push", "pull") or event["ph"] not in "Xb":
            continue
        args = event["args"]
        key = args["tensor"], args["step"], args["chunk"], args["epoch"], f"server {args['server']}"
        if event["cat"] == "push":
            pushed[key][outcome.name(event)] = event["ts"]
        else:
            pulled[key][outcome.name(event)] = ends[event["pid"], event["id"]]
    errors = outcome.whole["otherData"]["clock_error_us"]
    (error_us,) = [error for error in errors.values() if error]  # one is on another clock
    assert error_us < 1e6
    checked = 0
    for event in outcome.of("server", cat="aggregate"):
        args = event["args"]
        key = args["tensor"], args["step"], args["chunk"], args["epoch"], outcome.name(event)
        if len(pulled[key]) < 2:
            continue  # the server died before
        assert pushed[key]["worker 0"] < event["ts"]
        assert pulled[key]["worker 0"] > event["ts"] + event["dur"]
        assert pushed[key]["worker 1"] < event["ts"] + 2 * error_us
        assert pulled[key]["worker 1"] > event["ts"] + event["dur"] - 2 * error_us
        checked += 1
    assert checked >= 3 * MIN_STEPS


def test_arrows_have_two_ends(outcome: Outcome) -> None:
    begins = {event["id"]: event for event in outcome.events if event["ph"] == "s"}
    ends = {event["id"]: event for event in outcome.events if event["ph"] == "f"}
    both = begins.keys() & ends.keys()
    assert len(both) >= MIN_STEPS * 2 * 2 * 5  # two ways, two workers, and two parts of two tensors and one
    ways = {tuple(outcome.name(at[identity]) for at in (begins, ends)) for identity in both}
    there = {(f"worker {w}", f"server {s}") for w in range(2) for s in range(2)}
    assert ways == there | {(server, worker) for worker, server in there}


def test_torchs_profiler_shows_our_ranges(tmp_path: Path) -> None:
    # Its first start takes seconds, and no other thread runs meanwhile.
    with Cluster(workers=1, servers=1, lease_seconds=DEADLINE_SECONDS) as cluster:
        (seen,) = cluster.run(profiled, tmp_path)
    kinds = ("compact", "push", "wait", "scatter")
    assert set(seen) == {f"zenps::{kind}({tensor})" for kind in kinds for tensor in TENSORS}


# ── the logs ────────────────────────────────────────────────────────────────────────────────────


def test_every_line_says_whose_it_is_and_how_far_that_was(outcome: Outcome) -> None:
    keys = {"time", "level", "role", "rank", "epoch", "step", "logger", "message"}
    for name, lines in outcome.logs.items():
        assert lines, name
        for line in lines:
            assert line.keys() == keys, name
            assert line["role"] == name.rstrip("0123456789")
            assert all(line[key] is None or type(line[key]) is int for key in ("rank", "epoch", "step")), line


def test_lines_follow_the_members_and_the_steps(outcome: Outcome) -> None:
    for name, lines in outcome.logs.items():
        epochs = [line["epoch"] for line in lines if line["epoch"] is not None]
        assert epochs == sorted(epochs), name
        assert (1 in epochs) or (2 in epochs), name
        if not name.startswith("scheduler"):
            (rank,) = {line["rank"] for line in lines if line["epoch"]}
            assert rank in (0, 1)
    for name in ("scheduler", "worker0", "worker1"):
        (lost,) = [
            line for line in outcome.logs[name] if "server 1" in line["message"] and "lost" in line["message"]
        ]
        assert lost["step"] >= MIN_STEPS - 1
