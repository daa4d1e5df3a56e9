"""Reduces pushes without a server around it."""

from __future__ import annotations

from collections.abc import Sequence

from zenps.buffers import BufferPool
from zenps.server.reducers.base import Outcome, Payload
from zenps.server.reducers.registry import make_reducers
from zenps.wire.messages import Push, Result


class OrdinaryMemory:
    """Memory for results that no worker of the same host reads."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool

    def place(self, values: memoryview) -> memoryview:
        return values


REDUCERS = make_reducers(OrdinaryMemory(BufferPool(keep_bytes=1 << 26)))


def read(push: Push, frames: Sequence[memoryview]) -> Payload:
    """What the reducer of its kind makes of a push."""
    payload = REDUCERS[push.kind].read(push, frames)
    assert isinstance(payload, Payload)
    return payload


def outcome_of(payloads: Sequence[Payload]) -> Outcome:
    return REDUCERS[payloads[0].push.kind].reduce(payloads)


def reduce(payloads: Sequence[Payload]) -> tuple[Result, Sequence[memoryview]]:
    """What every rank is replied."""
    result, frames = outcome_of(payloads).reply(payloads[0].push.rank)
    assert isinstance(result, Result)
    return result, frames
