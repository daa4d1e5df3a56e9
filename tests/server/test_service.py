"""What a server does around its rounds; the rest of it is tested with whole clusters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from msgspec import structs
from prometheus_client import CollectorRegistry

from tests.server.rounds.test_tracker import KEY, make_held, peer_of
from zenps.config.settings import ClusterConfig, Config
from zenps.errors import ConfigError, PeerLostError
from zenps.observe import log
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server import service as server_service
from zenps.server.rounds.states import Reply
from zenps.server.service import _Service
from zenps.wire.connections import LOOK_SECONDS
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.messages import Failure
from zenps.wire.registration import Registration
from zenps.wire.scheduler_link import new_register
from zenps.wire.scheduler_messages import (
    Departed,
    FromScheduler,
    Heartbeat,
    Leave,
    Member,
    Refused,
    Register,
    Stop,
    ToScheduler,
    View,
)
from zenps.wire.sockets import Socket, bind_router, context

WORKERS = tuple(Member("worker", rank, "box", 1, "", "", peer_of(rank)) for rank in range(2))
VIEW = View(1, 0, WORKERS, (Member("server", 0, "box", 2, "tcp://box:1", ""),), bytes(8192), ring_epoch=1)
WAIT_MS = 20_000


@contextlib.contextmanager
def made(monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry) -> Iterator[tuple[_Service, Socket]]:
    """A server that has not registered yet, and its scheduler."""
    for name in ("rank", "epoch"):
        monkeypatch.setattr(log.here, name, None)
    with context() as ctx:
        scheduler, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        config = Config(cluster=ClusterConfig(scheduler=address, job="job", host="localhost"))
        yield _Service(config, ctx, ServerMetrics(registry), OFF), scheduler


@contextlib.contextmanager
def started(
    monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry
) -> Iterator[tuple[_Service, Socket]]:
    """A server that has the view, and its scheduler."""
    with made(monkeypatch, registry) as (service, scheduler):
        try:
            service._link.registration = Registration(new_register("server", None, "", "", {}))
            service._on_view(VIEW)
            yield service, scheduler
        finally:
            service._authenticator.close()


def play(scheduler: Socket, answers: Sequence[FromScheduler]) -> list[ToScheduler]:
    """Answers the registration, and listens until the server leaves; returns what it has said."""
    heard: list[ToScheduler] = []
    while Leave() not in heard and scheduler.poll(WAIT_MS):
        peer, envelope = scheduler.recv_multipart()
        heard.append(Decoder("job", ToScheduler).decode(envelope))
        if isinstance(heard[-1], Register):
            for answer in answers:
                scheduler.send_multipart([peer, encode("job", answer)])
    return heard


LOST = Departed(WORKERS[1], True, "worker 1 is lost")
LEFT = Departed(WORKERS[0], False, "worker 0 left the job")


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (Stop(), nullcontext()),
        (Refused("lost", "the job has failed"), pytest.raises(PeerLostError, match=r"^the job has failed$")),
    ],
)
def test_a_server_serves_until_it_is_told_to_end_and_then_leaves(
    last: FromScheduler,
    ending: AbstractContextManager[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with made(monkeypatch, CollectorRegistry()) as (service, scheduler), ThreadPoolExecutor() as pool:
        playing = pool.submit(play, scheduler, [VIEW, LEFT, LOST, last])
        with ending:
            service.run("box:8000")
        first, *heard = playing.result(WAIT_MS / 1000)
    assert isinstance(first, Register)
    assert (first.role, first.address, first.metrics) == ("server", service._address, "box:8000")
    assert first.address.startswith("tcp://localhost:"), "as cluster.host says"
    assert heard[-1] == Leave()
    assert 1 in [message.epoch for message in heard if isinstance(message, Heartbeat)]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "worker" in text] == [LOST.reason]


def test_a_server_that_cannot_listen_names_the_setting() -> None:
    with context() as ctx:
        _, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        taken = int(address.rpartition(":")[2])
        for field, host, port in (
            ("cluster.server_port", "127.0.0.1", taken),
            ("cluster.host", "no-such-host.invalid", 0),
            ("cluster.host", "no-such-host.invalid", 1234),
        ):
            config = Config(cluster=ClusterConfig(scheduler=address, host=host, server_port=port))
            with pytest.raises(ConfigError, match=f"{host}:{port}': expected an address that") as caught:
                _Service(config, ctx, ServerMetrics(CollectorRegistry()), OFF)
            assert caught.value.field == field


def test_a_server_that_fails_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with made(monkeypatch, CollectorRegistry()) as (service, scheduler), ThreadPoolExecutor() as pool:
        monkeypatch.setattr(service, "_check_peers", fail)
        playing = pool.submit(play, scheduler, [VIEW])
        with pytest.raises(RuntimeError, match="planted"):
            service.run("")
        assert Leave() in playing.result(WAIT_MS / 1000)


def test_a_server_notices_for_how_long_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may have pushed meanwhile: what they sent waits to be read."""
    stops: list[float] = []
    ticks: list[float] = []

    def tick(now: float) -> None:
        ticks.append(now)
        if len(ticks) == 1:
            time.sleep(0.5)  # as if the process were stopped
        elif len(ticks) == 4:
            raise RuntimeError("planted")

    monkeypatch.setattr(server_service, "TICK_SECONDS", 0.15)
    monkeypatch.setattr(server_service, "STOPPED_SECONDS", 0.3)
    with started(monkeypatch, CollectorRegistry()) as (service, _):
        monkeypatch.setattr(service._dispatcher, "tick", tick)
        monkeypatch.setattr(service._rounds, "on_stopped", lambda seconds, now: stops.append(seconds))
        with pytest.raises(RuntimeError, match="planted"):
            service._serve_until_told()
    assert 0.5 - LOOK_SECONDS - 0.01 < max(stops) < WAIT_MS / 1000


def test_a_stop_is_noticed_before_what_came_meanwhile_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(server_service, "STOPPED_SECONDS", 0.3)
    with started(monkeypatch, CollectorRegistry()) as (service, _):
        poll = service._poller.poll

        def stopped(timeout_ms: int) -> object:
            time.sleep(0.5)  # as if the process were stopped
            order.append("polled")
            return [*poll(timeout_ms), (service._socket, zmq.POLLIN)]

        def receive() -> None:
            order.append("received")
            raise RuntimeError("planted")

        monkeypatch.setattr(service, "_poller", SimpleNamespace(register=lambda *_: None, poll=stopped))
        monkeypatch.setattr(service, "_receive", receive)
        monkeypatch.setattr(service._rounds, "on_stopped", lambda seconds, now: order.append("stopped"))
        with pytest.raises(RuntimeError, match="planted"):
            service._serve_until_told()
    assert order == ["polled", "stopped", "received"]


def test_a_server_that_was_stopped_listens_before_it_calls_the_scheduler_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole job may have been stopped: then nothing has come when it goes on."""
    began = time.monotonic()
    polled = [began]
    with started(monkeypatch, CollectorRegistry()) as (service, _):
        cluster = service._config.cluster
        stopped_seconds = 10 * cluster.rendezvous_seconds

        def poll(timeout_ms: int) -> list[object]:
            polled.append(polled[-1] + (timeout_ms / 1000 if len(polled) > 1 else stopped_seconds))
            return []

        monkeypatch.setattr(server_service, "time", SimpleNamespace(monotonic=lambda: polled[-1]))
        monkeypatch.setattr(service, "_poller", SimpleNamespace(register=lambda *_: None, poll=poll))
        with pytest.raises(PeerLostError, match="is lost: silent for"):
            service._serve_until_told()
    listened_seconds = polled[-1] - began - stopped_seconds
    assert listened_seconds > cluster.rendezvous_seconds - cluster.lease_seconds


def test_rounds_that_wait_for_a_worker_that_takes_nothing_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(monkeypatch, CollectorRegistry()) as (service, _):
        assert service._rounds.on_push(make_held(1, KEY), 0.0) == []
        monkeypatch.setattr(
            service._replies, "drop_stalled", lambda: service._replies.dropped.update({peer_of(0): "dropped"})
        )
        assert service._rounds.open_rounds == 1
        service._check_peers(1.0)
        assert service._rounds.open_rounds == 0
        (reply,) = service._rounds.on_push(make_held(1, KEY), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert reply.message.reason.endswith("dropped")


def test_a_view_that_comes_again_is_confirmed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(monkeypatch, CollectorRegistry()) as (service, scheduler):
        service._rounds.on_departed(0, "worker 0 was dropped", 0.0)
        service._on_view(VIEW)
        (reply,) = service._rounds.on_push(make_held(1, KEY), 0.0)
        for _ in range(2):
            assert scheduler.poll(WAIT_MS)
            beat: ToScheduler = Decoder("job", ToScheduler).decode(scheduler.recv_multipart()[1])
            assert isinstance(beat, Heartbeat)
            assert beat.epoch == 1
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Failure)
    assert reply.message.reason.endswith("worker 0 was dropped")


def test_a_round_that_fails_counts_once_however_often_it_is_pushed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    with caplog.at_level("WARNING", "zenps.server"), started(monkeypatch, registry) as (service, _):
        service._rounds.on_departed(0, "worker 0 was dropped", 0.0)
        for _ in range(3):
            service._dispatcher.execute(service._rounds.on_push(make_held(1, KEY), 0.0))
        assert service._rounds.duplicates == 2
    assert registry.get_sample_value("zenps_server_rounds_total", {"outcome": "failed"}) == 1
    assert [record.getMessage() for record in caplog.records] == ["tensor 'a', step 0: worker 0 was dropped"]


def test_a_worker_that_was_dropped_is_told_why_when_it_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(monkeypatch, CollectorRegistry()) as (service, _):
        held = make_held(0, KEY)
        service._replies.dropped[held.peer] = "worker 0 was dropped"
        actions = service._dispatcher._on_push(held.peer, held.push, memoryview(b""), [], 0)
    assert actions == [
        Reply([held.peer], Failure(1, *KEY, "lost", "tensor 'a', step 0: worker 0 was dropped"))
    ]


def test_what_waits_for_a_worker_that_is_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job has ever new workers: a server kept a queue for each there was."""
    with started(monkeypatch, CollectorRegistry()) as (service, _):
        queue = service._replies._send_queue
        for worker in WORKERS:
            service._workers.recognise(worker.identity, worker.identity + b"-secret")
            queue._queues[worker.identity + b"-secret"].shared_bytes = 1 << 40
            queue._full[worker.identity + b"-secret"] = 0
        service._on_view(structs.replace(VIEW, epoch=2, workers=WORKERS[1:]))
        assert queue._queues.keys() == queue._full.keys() == {peer_of(1) + b"-secret"}


def test_views_are_shown_in_metrics_and_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "zenps.server")
    registry = CollectorRegistry()
    with started(monkeypatch, registry) as (service, _):
        assert registry.get_sample_value("zenps_slots") == 4096
        halves = (np.arange(4096) % 2).astype("<u2").tobytes()
        service._on_view(structs.replace(VIEW, epoch=2, ring_epoch=2, owners=halves))
        service._on_view(structs.replace(VIEW, epoch=3, ring_epoch=2, owners=halves))
        assert registry.get_sample_value("zenps_slots") == 2048
        assert registry.get_sample_value("zenps_epoch") == log.here.epoch == 3
        assert log.here.rank == 0
        address = service._address
    assert caplog.messages == [
        f"listening on {address}",
        "owns 4096 of 4096 slots",
        "owns 2048 of 4096 slots",
    ]


def test_what_a_server_holds_is_in_its_heartbeats_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    with started(monkeypatch, registry) as (service, scheduler):
        for _ in range(3):
            assert service._rounds.on_push(make_held(1, KEY, size_bytes=1000), 0.0) == []
        service._rounds.late.seconds[1] = 4.0
        service._on_view(VIEW)
        for _ in range(2):
            assert scheduler.poll(WAIT_MS)
            beat: ToScheduler = Decoder("job", ToScheduler).decode(scheduler.recv_multipart()[1])
        service._show_gauges()
    assert isinstance(beat, Heartbeat)
    assert beat.load["open_rounds"] == registry.get_sample_value("zenps_open_rounds") == 1
    assert beat.late == {1: 4.0}
    assert beat.load["late_seconds"] == 4.0
    held_bytes = service._rounds.held_bytes
    assert beat.load["held_bytes"] == registry.get_sample_value("zenps_held_bytes") == held_bytes >= 1000
    budget_bytes = service._rounds._admission.budget_bytes
    assert beat.load["budget_bytes"] == registry.get_sample_value("zenps_budget_bytes") == budget_bytes
    assert registry.get_sample_value("zenps_duplicate_pushes_total") == 2
