"""Scheduler process from its start to its end: one job over real sockets, as each observer sees it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import structs

from zenps.config.settings import ClusterConfig, Config, SyncConfig
from zenps.config.shared import server_settings, shared_settings
from zenps.observe import log
from zenps.scheduler import service
from zenps.wire.admin_client import ask
from zenps.wire.fields import Role
from zenps.wire.scheduler_link import SchedulerLink, new_register
from zenps.wire.scheduler_messages import Barrier, BarrierReply, Status, StatusRequest, Stop, View
from zenps.wire.sockets import context

DEADLINE_SECONDS = 30.0
Message = TypeVar("Message")


class Node:
    """A node of a job with one worker and one server."""

    def __init__(self, link: SchedulerLink, role: Role, config: Config) -> None:
        settings = shared_settings(config) if role == "worker" else server_settings(config)
        self._link = link
        self._register = new_register(role, None, "", "", settings)

    def join(self) -> View:
        view = self._link.join(self._register)
        self._link.beat(time.monotonic(), view.epoch, {})
        return view

    def receive(self, kind: type[Message]) -> Message:
        """The first message of this kind that comes."""
        until = time.monotonic() + DEADLINE_SECONDS
        while (left_seconds := until - time.monotonic()) > 0:
            for message in self._link.receive():
                if isinstance(message, kind):
                    return message
            self._link.socket.poll(int(1000 * left_seconds))
        raise TimeoutError(f"no {kind.__name__}")


def serve_and_play(config: Config, play: Callable[[ClusterConfig], Any]) -> Any:
    """Serves a job until its end, while a thread does ``play``; returns what that returned."""
    with ThreadPoolExecutor() as pool:
        playing: list[Future[Any]] = []

        def on_ready(address: str) -> None:
            playing.append(pool.submit(play, structs.replace(config.cluster, scheduler=address)))

        try:
            service.serve(config, on_ready)
        finally:  # if both have failed, this is the reason
            played = playing[0].result(DEADLINE_SECONDS)
        return played


def read(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_SECONDS) as answer:
        return str(answer.read().decode())


def test_a_job_as_its_nodes_its_operator_and_its_records_see_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FAREWELL_SECONDS", 0.1)
    monkeypatch.setattr(log.here, "epoch", None)
    caplog.set_level("INFO", "zenps.scheduler")
    config = Config(sync=SyncConfig(trace=str(tmp_path / "trace.json")))

    def play(cluster: ClusterConfig) -> tuple[Status, str, dict[str, Any]]:
        roles: list[Role] = ["server", "worker"]
        with context() as ctx, ThreadPoolExecutor() as pool:
            links = {role: SchedulerLink(ctx, cluster, role) for role in roles}
            server, worker = (Node(link, role, config) for role, link in links.items())
            joining = pool.submit(server.join)
            view = worker.join()
            for each in (view, joining.result(DEADLINE_SECONDS)):
                assert (each.epoch, len(each.workers), len(each.servers)) == (1, 1, 1)
            links["worker"].send(Barrier(1))
            assert worker.receive(BarrierReply) == BarrierReply(1, "", view.incarnation)
            assert links["worker"].clock.offset is not None
            status = ask(cluster, StatusRequest(), Status, DEADLINE_SECONDS)
            seen = read(status.nodes[0].metrics, "/metrics"), json.loads(read(status.page, "/status.json"))
            links["worker"].leave()
            server.receive(Stop)
            links["server"].leave()
            return status, *seen

    status, measured, shown = serve_and_play(config, play)
    own, *others = status.nodes
    assert (own.role, own.state, own.epoch) == ("scheduler", "present", 1)
    assert sorted((node.role, node.rank, node.state) for node in others) == [
        ("server", 0, "present"),
        ("worker", 0, "present"),
    ]
    assert [node["role"] for node in shown["nodes"]] == [node.role for node in status.nodes]
    for line in (
        'zenps_job_state{state="running"} 1.0',
        'zenps_job_state{state="gathering"} 0.0',
        'zenps_live_nodes{role="worker"} 1.0',
        'zenps_live_nodes{role="server"} 1.0',
        'zenps_barriers_total{outcome="completed"} 1.0',
        "zenps_epoch 1.0",
    ):
        assert line in measured.splitlines()
    assert f"listening on {own.address}" in caplog.messages
    assert f"status page at http://{status.page}/" in caplog.messages
    assert [text for text in caplog.messages if text in ("running", "stopped")] == ["running", "stopped"]
    assert log.here.epoch == 1, "each line of the log names it"
    (part,) = tmp_path.iterdir()
    events = Counter(event["name"] for event in json.loads(part.read_text()))
    assert events["epoch 1"] == events["barrier 1"] == events["state running"] == 1
    for closed in (own.metrics, status.page):
        with pytest.raises(OSError, match="refused"):
            read(closed, "/")
