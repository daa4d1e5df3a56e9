"""Status for programs: throughput and JSON."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import msgspec

from zenps.wire.scheduler_messages import Change, NodeStatus, Status
from zenps.wire.status import late_workers, throughput, to_json


def node(role: Literal["server", "worker"], rank: int = 0, **fields: Any) -> NodeStatus:
    values: dict[str, Any] = {"state": "present", "load": {}} | fields
    return NodeStatus(role, rank, "box", 1, "", "", epoch=3, slots=0, silent_seconds=0.0, **values)


def status(*nodes: NodeStatus) -> Status:
    return Status("default", "running", 3, 10.0, {}, nodes)


def test_throughput_is_the_sum_of_servers_and_the_mean_of_workers() -> None:
    server = node("server", rates={"rounds": 2.5, "received_bytes": 512.0, "sent_bytes": 2.0**20})
    busy = node("worker", rates={"rounds": 8.0, "step": 4.0})
    idle = node("worker", rates={})
    seen = status(server, server, busy, idle, node("worker", state="lost"))
    expected = {"pushed_bytes": 1024.0, "pulled_bytes": 2.0**21, "rounds": 4.0, "steps": 2.0}
    assert throughput(seen) == json.loads(to_json(seen))["throughput"] == expected


def test_stragglers_are_workers_whatever_ranks_servers_have() -> None:
    late = [node("worker", rank, late_seconds=9.0 * (rank == 1)) for rank in range(4)]
    seen = status(*late, node("server", 1))
    assert [n.role for n in late_workers(seen)] == ["worker"]
    assert json.loads(to_json(seen))["stragglers"] == [1]


def test_changes_have_names() -> None:
    seen = msgspec.structs.replace(status(), changes=(Change(1.5, "worker 0", "lost", 3),))
    expected = {"seconds_ago": 1.5, "who": "worker 0", "state": "lost", "epoch": 3}
    assert json.loads(to_json(seen))["changes"] == [expected]


def test_json_is_valid_whatever_a_node_reports() -> None:
    tree = json.loads(to_json(status(node("server", load={"rounds": math.nan}))))
    assert tree["nodes"][0]["load"] == {"rounds": None}
