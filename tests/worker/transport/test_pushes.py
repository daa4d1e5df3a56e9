"""Pushes: what is shared with servers of the same host."""

from __future__ import annotations

from typing import cast

import numpy
import torch

from zenps.worker.core.request import Options
from zenps.worker.core.transfer import EncodedChunk, EncodedTensor, Sharding
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


def test_a_priority_of_numpy_is_a_plain_integer() -> None:
    """The send queue negates priorities: NumPy's uint8 of 1 became 255, and went last."""
    chunk = EncodedChunk(0, 0, 4, 4, "none", (VALUES,))
    encoded = EncodedTensor("dense", torch.Size([4]), torch.float32, 1, 0, Sharding(None, 1, 0), (chunk,))
    writer = PushWriter(0, "auto", cast(ServerSockets, Sockets()))
    (out,) = writer.write("weight", 0, encoded, Options(priority=cast(int, numpy.uint8(1))))
    assert (-out.priority, type(out.priority)) == (-1, int)
