"""Asking the scheduler what the cluster looks like."""

from __future__ import annotations

import contextlib
import time
import uuid

import msgspec
import zmq

from zenps.errors import DeadlineError, ProtocolError
from zenps.keys import Keys
from zenps.settings import ClusterConfig
from zenps.wire.curve import Handshakes
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.messages import Status, StatusRequest
from zenps.wire.sockets import Socket, open_dealer

__all__ = ["fetch", "to_json"]


def fetch(cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None = None) -> Status:
    """The cluster as the scheduler at ``cluster.scheduler`` sees it now; any key of the job may ask.

    Raises:
        ConfigError: the scheduler lists no such key, or we have keys and it has none, or the reverse.
        DeadlineError: no answer within ``timeout_seconds``.
    """
    ctx: zmq.Context[Socket] = zmq.Context()
    try:
        socket = open_dealer(ctx, f"status-{uuid.uuid4().hex}".encode(), MAX_ENVELOPE_BYTES, keys)
        handshakes = Handshakes(ctx, socket)
        try:
            socket.connect(f"tcp://{cluster.scheduler}")
            return _ask(socket, handshakes, cluster, timeout_seconds, keys)
        finally:
            handshakes.close()
    finally:
        # No linger: a request that could not be delivered by now has nobody waiting for its answer.
        ctx.destroy(linger=0)


def _ask(
    socket: Socket, handshakes: Handshakes, cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None
) -> Status:
    with contextlib.suppress(zmq.Again):  # refused already: the handshakes say why
        socket.send(encode(cluster.job, StatusRequest()))
    decoder = Decoder(cluster.job, Status)
    until = time.monotonic() + timeout_seconds
    while (left_seconds := until - time.monotonic()) > 0:
        handshakes.wait(left_seconds)
        handshakes.raise_for(keys, cluster.scheduler)
        if (status := _receive(socket, decoder)) is not None:
            return status
    raise DeadlineError(
        f"no answer from the scheduler at {cluster.scheduler} within {timeout_seconds:g} s; "
        f"is it running, and is its job {cluster.job!r}?{handshakes.hint}"
    )


def _receive(socket: Socket, decoder: Decoder[Status]) -> Status | None:
    while socket.poll(0):
        frames = socket.recv_multipart()
        with contextlib.suppress(ProtocolError):  # whatever it is that listens there, it may yet answer
            return decoder.decode(frames[0])
    return None


def to_json(status: Status) -> str:
    """``status`` as one JSON object; its ``nodes`` have role, rank, host, pid, address, epoch, load, …

    A counter that is no finite number is null, as JSON knows no other.
    """
    tree = msgspec.structs.asdict(status)
    tree["nodes"] = [msgspec.structs.asdict(node) for node in status.nodes]
    return msgspec.json.format(msgspec.json.encode(tree).decode())
