"""What a server does around its rounds; the rest of it is tested with whole clusters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tests.server.rounds.test_tracker import KEY, make_held, peer_of
from zenps.config.settings import ClusterConfig, Config
from zenps.observe import log
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server.rounds.states import Reply
from zenps.server.service import _Service
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder
from zenps.wire.messages import Failure
from zenps.wire.registration import Registration
from zenps.wire.scheduler_link import new_register
from zenps.wire.scheduler_messages import Heartbeat, Member, ToScheduler, View
from zenps.wire.sockets import Socket, bind_router, context

WORKERS = tuple(Member("worker", rank, "box", 1, "", "", peer_of(rank)) for rank in range(2))
VIEW = View(1, 0, WORKERS, (Member("server", 0, "box", 2, "tcp://box:1", ""),), bytes(8192), ring_epoch=1)
WAIT_MS = 20_000


@contextlib.contextmanager
def started(
    monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry
) -> Iterator[tuple[_Service, Socket]]:
    """A server that has the view, and its scheduler."""
    for name in ("rank", "epoch"):
        monkeypatch.setattr(log.here, name, None)
    with context() as ctx:
        scheduler, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        config = Config(cluster=ClusterConfig(scheduler=address, job="job", host="127.0.0.1"))
        service = _Service(config, ctx, ServerMetrics(registry), OFF)
        try:
            service._link.registration = Registration(new_register("server", None, "", "", {}))
            service._on_view(VIEW)
            yield service, scheduler
        finally:
            service._authenticator.close()


def test_a_view_that_comes_again_is_confirmed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(monkeypatch, CollectorRegistry()) as (service, scheduler):
        service._rounds.on_departed(0, "worker 0 was dropped", 0.0)
        service._on_view(VIEW)
        (reply,) = service._rounds.on_push(make_held(1, KEY), 0.0)
        for _ in range(2):
            assert scheduler.poll(WAIT_MS)
            beat = Decoder("job", ToScheduler).decode(scheduler.recv_multipart()[1])
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
            queue._queues[worker.identity + b"-secret"].size_bytes = 1 << 40
            queue._full[worker.identity + b"-secret"] = 0
        service._on_view(structs.replace(VIEW, epoch=2, workers=WORKERS[1:]))
        assert queue._queues.keys() == queue._full.keys() == {peer_of(1) + b"-secret"}
