"""How a server follows views; the rest of it is tested with whole clusters."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from tests.server.rounds.test_tracker import KEY, make_held, peer_of
from zenps.config.settings import ClusterConfig, Config
from zenps.observe import log
from zenps.observe.metrics import ServerMetrics
from zenps.observe.trace import OFF
from zenps.server.service import _Service
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder
from zenps.wire.messages import Failure
from zenps.wire.registration import Registration
from zenps.wire.scheduler_link import new_register
from zenps.wire.scheduler_messages import Heartbeat, Member, ToScheduler, View
from zenps.wire.sockets import bind_router, context

WORKERS = tuple(Member("worker", rank, "box", 1, "", "", peer_of(rank)) for rank in range(2))
VIEW = View(1, 0, WORKERS, (Member("server", 0, "box", 2, "tcp://box:1", ""),), bytes(8192), ring_epoch=1)
WAIT_MS = 20_000


def test_a_view_that_comes_again_is_confirmed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rank", "epoch"):
        monkeypatch.setattr(log.here, name, None)
    with context() as ctx:
        scheduler, address = bind_router(ctx, "127.0.0.1", 0, MAX_ENVELOPE_BYTES)
        config = Config(cluster=ClusterConfig(scheduler=address, job="job", host="127.0.0.1"))
        service = _Service(config, ctx, ServerMetrics(CollectorRegistry()), OFF)
        try:
            service._link.registration = Registration(new_register("server", None, "", "", {}))
            service._on_view(VIEW)
            service._rounds.on_departed(0, "worker 0 was dropped", 0.0)
            service._on_view(VIEW)
            (reply,) = service._rounds.on_push(make_held(1, KEY), 0.0)
            for _ in range(2):
                assert scheduler.poll(WAIT_MS)
                beat = Decoder("job", ToScheduler).decode(scheduler.recv_multipart()[1])
                assert isinstance(beat, Heartbeat)
                assert beat.epoch == 1
        finally:
            service._authenticator.close()
    assert isinstance(reply.message, Failure)  # type: ignore[union-attr]
    assert reply.message.reason.endswith("worker 0 was dropped")  # type: ignore[union-attr]
