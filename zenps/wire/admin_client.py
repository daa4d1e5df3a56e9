"""One question to the scheduler, from a process that is no node of the cluster."""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TypeVar

import msgspec
import zmq

from zenps.config.settings import ClusterConfig
from zenps.errors import DeadlineError, ProtocolError
from zenps.keys import Keys

from .curve import Handshakes
from .frames import MAX_ENVELOPE_BYTES, MAX_STATUS_BYTES, Decoder, encode
from .messages import Drain, Status, StatusRequest
from .sockets import Socket, connect, open_dealer

Answer = TypeVar("Answer", bound=msgspec.Struct)


def ask(
    cluster: ClusterConfig,
    question: StatusRequest | Drain,
    answer: type[Answer],
    timeout_seconds: float,
    keys: Keys | None = None,
) -> Answer:
    """The scheduler's answer, from that at ``cluster.scheduler``.

    Raises:
        ConfigError: the scheduler lists no such key, or we have keys and it has none, or the reverse.
        DeadlineError: no answer within ``timeout_seconds``.
    """
    ctx: zmq.Context[Socket] = zmq.Context()
    try:
        max_bytes = MAX_STATUS_BYTES if answer is Status else MAX_ENVELOPE_BYTES
        socket = open_dealer(ctx, f"status-{uuid.uuid4().hex}".encode(), max_bytes, keys)
        handshakes = Handshakes(ctx, socket)
        try:
            connect(socket, cluster.scheduler)
            with contextlib.suppress(zmq.Again):  # refused already: the handshakes say why
                socket.send(encode(cluster.job, question))
            decoder = Decoder(cluster.job, answer, max_bytes)
            return _await(socket, handshakes, decoder, cluster, timeout_seconds, keys)
        finally:
            handshakes.close()
    finally:
        # No linger: a request that could not be delivered by now has nobody waiting for its answer.
        ctx.destroy(linger=0)


def _await(
    socket: Socket,
    handshakes: Handshakes,
    decoder: Decoder[Answer],
    cluster: ClusterConfig,
    timeout_seconds: float,
    keys: Keys | None,
) -> Answer:
    until = time.monotonic() + timeout_seconds
    while (left_seconds := until - time.monotonic()) > 0:
        handshakes.wait(left_seconds)
        handshakes.raise_for(keys, cluster.scheduler)
        if (answer := _receive(socket, decoder)) is not None:
            return answer
    raise DeadlineError(
        f"no answer from the scheduler at {cluster.scheduler} within {timeout_seconds:g} s; "
        f"is it running, and is its job {cluster.job!r}?{handshakes.hint}"
    )


def _receive(socket: Socket, decoder: Decoder[Answer]) -> Answer | None:
    while socket.poll(0):
        frames = socket.recv_multipart()
        with contextlib.suppress(ProtocolError):  # whatever it is that listens there, it may yet answer
            return decoder.decode(frames[0])
    return None
