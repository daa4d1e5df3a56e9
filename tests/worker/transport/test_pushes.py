"""Pushes: what is shared with servers of the same host."""

from __future__ import annotations

from typing import cast

import numpy
import torch

from zenps.wire.messages import Push
from zenps.worker.core.request import Options
from zenps.worker.core.transfer import EncodedChunk, EncodedTensor, Sharding
from zenps.worker.rounds.states import Outgoing
from zenps.worker.transport.pushes import PushWriter
from zenps.worker.transport.server_sockets import ServerSockets

POSITIONS, VALUES, SHARED = (memoryview(data) for data in (b"positions", b"values", b"shared"))


class Sockets:
    """Shares the values of each push."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bytes, bool]] = []

    def share(self, server: int, values: memoryview, is_pooled: bool) -> memoryview:
        self.calls.append((server, bytes(values), is_pooled))
        return SHARED


def test_values_are_shared_and_positions_travel() -> None:
    sockets = Sockets()
    writer = PushWriter(0, "auto", cast(ServerSockets, sockets))
    chunks = (
        EncodedChunk(0, 0, 4, 4, "none", (VALUES,)),
        EncodedChunk(1, 0, 4, 2, "coo", (POSITIONS, VALUES)),
    )
    encoded = EncodedTensor("sparse", torch.Size([8]), torch.float32, 1, 0, Sharding(None, 1, 0), chunks)
    shared = writer.share(encoded, Options(purpose="broadcast"))
    assert [chunk.frames for chunk in shared.chunks] == [(SHARED,), (POSITIONS, SHARED)]
    assert sockets.calls == [(0, b"values", False), (1, b"values", False)]
    assert [chunk.frames for chunk in encoded.chunks] == [(VALUES,), (POSITIONS, VALUES)]


def test_a_push_has_all_that_tensor_chunk_and_options_say() -> None:
    writer = PushWriter(3, "bitmap", cast(ServerSockets, Sockets()))
    chunk = EncodedChunk(5, 1, 40, 6, "delta", (POSITIONS, VALUES), fragment=2, fragments=4)
    sharding = Sharding(None, 2, 0, ring_epoch=9)
    encoded = EncodedTensor(
        "sparse", torch.Size([80, 7]), torch.float32, 7, 0, sharding, (chunk,), values="int8"
    )
    options = Options(average=True, stands_for=(4, 5), given="drained", priority=8)
    push = Push(
        ring_epoch=9,
        rank=3,
        tensor="table",
        step=11,
        chunk=1,
        chunks=2,
        kind="sparse",
        dtype="float32",
        shape=(80, 7),
        span=40,
        columns=7,
        rows=6,
        codec="delta",
        average=True,
        again=True,
        answer="bitmap",
        values="int8",
        stands_for=(4, 5),
        fragment=2,
        fragments=4,
        given="drained",
    )
    written = writer.write("table", 11, encoded, options, again=True)
    assert written == [Outgoing(5, push, (POSITIONS, VALUES), 8)]
    (summed,) = writer.write("table", 11, encoded, Options(average=False))
    assert (summed.push.average, summed.push.again, summed.priority) == (False, False, 0)


def test_a_priority_of_numpy_is_a_plain_integer() -> None:
    """The send queue negates priorities: NumPy's uint8 of 1 became 255, and went last."""
    chunk = EncodedChunk(0, 0, 4, 4, "none", (VALUES,))
    encoded = EncodedTensor("dense", torch.Size([4]), torch.float32, 1, 0, Sharding(None, 1, 0), (chunk,))
    writer = PushWriter(0, "auto", cast(ServerSockets, Sockets()))
    (out,) = writer.write("weight", 0, encoded, Options(priority=cast(int, numpy.uint8(1))))
    assert (-out.priority, type(out.priority)) == (-1, int)
