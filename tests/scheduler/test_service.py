"""Scheduler process: its loop around a real socket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from zenps.config.settings import Config, StatusConfig
from zenps.observe import log
from zenps.observe.metrics import SchedulerMetrics
from zenps.observe.trace import open_trace
from zenps.scheduler import service
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.page.endpoint import Page
from zenps.scheduler.service import Outputs, _Service
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.scheduler_messages import Departed, Heartbeat, Member, Refused, Register
from zenps.wire.sockets import context, open_dealer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def scheduler(registry: CollectorRegistry, tmp_path: Path) -> Iterator[_Service]:
    config = Config()
    with context() as ctx, closing(open_trace("", "scheduler")) as trace:
        made = _Service(
            config, ctx, None, Outputs(SchedulerMetrics(registry), "", Page(StatusConfig(port=-1)), trace)
        )
        with closing(made):
            yield made


class Ticked(Exception):
    pass


class Enough(Exception):
    pass


@pytest.fixture
def waiting(scheduler: _Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The first 1000 messages that are received of an endless queue, and the ticks between them."""
    taken: list[str] = []
    envelope = memoryview(encode("default", Heartbeat(1, {})))

    def take(_: object) -> tuple[int, list[memoryview]]:
        """Receives a message without taking the real one from the socket, so that there is always another."""
        taken.append("message")
        if len(taken) > 1000:
            raise Enough
        return -1, [memoryview(b"unknown"), envelope]

    def tick(*_: float) -> list[Send]:
        taken.append("tick")
        return []

    monkeypatch.setattr(service, "receive_routed", take)
    monkeypatch.setattr(scheduler._membership, "on_tick", tick)
    with context() as ctx:
        dealer = open_dealer(ctx, b"sender", MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        dealer.send(envelope)
        assert scheduler._socket.poll(30_000)
        yield taken


def test_a_tick_knows_how_late_it_is(scheduler: _Service, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[float] = []

    def tick(_: float, late_seconds: float) -> list[Send]:
        late.append(late_seconds)
        if len(late) > 1:
            raise Enough
        time.sleep(0.5)  # as if the process were stopped
        return []

    monkeypatch.setattr(scheduler._membership, "on_tick", tick)
    with pytest.raises(Enough):
        scheduler._run()
    assert 0.5 - service.TICK_SECONDS <= late[1] < 30


def test_ticks_happen_however_many_messages_wait(
    scheduler: _Service, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_AT_ONCE", 100)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.0)
    with pytest.raises(Enough):
        scheduler._run()
    assert waiting.index("tick") == 100
    assert waiting.count("tick") >= 9


def test_not_every_message_causes_a_tick(
    scheduler: _Service, waiting: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(service, "TICK_SECONDS", 1000.0)
    with pytest.raises(Enough):
        scheduler._run()
    assert waiting.count("tick") == 1


def test_each_loss_is_counted_and_logged_once_after_many_other_messages(
    scheduler: _Service,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    for number in range(log.ONCE_KEYS + 1):
        log.once(service.logger, number, "dropped a message of peer %d", number)
    caplog.clear()
    losses = [
        Departed(Member("worker", rank, "box", 7, "", ""), True, f"worker {rank} is lost") for rank in (0, 1)
    ]
    left = Departed(Member("server", 0, "box", 8, "", ""), False, "server 0 left the job")
    scheduler._send([Send(peer, message) for message in (*losses, left) for peer in (b"a", b"b", b"c")])
    assert registry.get_sample_value("zenps_lost_nodes_total", {"role": "worker"}) == 2
    assert registry.get_sample_value("zenps_lost_nodes_total", {"role": "server"}) in (None, 0)
    assert [record.getMessage() for record in caplog.records] == ["worker 0 is lost", "worker 1 is lost"]


def test_the_metrics_agree_with_a_status(scheduler: _Service, registry: CollectorRegistry) -> None:
    stragglers = scheduler._membership._job.stragglers
    stragglers.report(b"server", {})
    stragglers.report(b"server", {1: 4.0})
    scheduler._send([Send(b"admin client", scheduler._membership.status(0.0))])
    assert registry.get_sample_value("zenps_late_seconds_total", {"rank": "1"}) == 4.0


def test_nodes_are_told_when_the_scheduler_ends_by_an_error_of_its_own(
    scheduler: _Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tick(*_: float) -> None:
        if scheduler._membership.live("server"):
            raise RuntimeError("planted")

    monkeypatch.setattr(scheduler, "_on_tick", tick)
    with context() as ctx:
        dealer = open_dealer(ctx, b"server", MAX_ENVELOPE_BYTES)
        dealer.connect(f"tcp://{scheduler.address}")
        dealer.send(encode("default", Register("server", -1, "box", 7, "tcp://box:1", "", {})))
        with pytest.raises(RuntimeError, match="planted"):
            scheduler.run()
        assert dealer.poll(30_000)
        refused = Decoder("default", Refused).decode(dealer.recv())
    assert refused == Refused("lost", "the scheduler ended: RuntimeError('planted'); see its log")
