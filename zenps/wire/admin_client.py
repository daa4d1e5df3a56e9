"""Admin client: sends one request to the scheduler, from a process that is not a node of the cluster."""

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
from .frames import MAX_ENVELOPE_BYTES, MAX_STATUS_BYTES, SAME_VERSION, Decoder, encode
from .scheduler_messages import Drain, Ended, Status, StatusRequest
from .sockets import Socket, connect, open_dealer

Answer = TypeVar("Answer", bound=msgspec.Struct)


def ask(
    cluster: ClusterConfig,
    question: StatusRequest | Drain | Ended,
    answer: type[Answer],
    timeout_seconds: float,
    keys: Keys | None = None,
) -> Answer:
    """Asks the scheduler at ``cluster.scheduler`` and returns its answer.

    Args:
        answer: the type of message that answers ``question``.

    Raises:
        ConfigError: the scheduler does not list our key, or only one of the two has keys.
        DeadlineError: no answer within ``timeout_seconds``.
    """
    ctx: zmq.Context[Socket] = zmq.Context()
    try:
        max_bytes = MAX_STATUS_BYTES if answer is Status else MAX_ENVELOPE_BYTES
        decoder = Decoder(cluster.job, answer, max_bytes)
        socket = open_dealer(ctx, f"status-{uuid.uuid4().hex}".encode(), max_bytes, keys)
        with contextlib.closing(Handshakes(socket)) as handshakes:
            connect(socket, cluster.scheduler)
            with contextlib.suppress(zmq.Again):  # refused already; the handshakes tell the reason
                socket.send(encode(cluster.job, question))
            until = time.monotonic() + timeout_seconds
            while (left_seconds := until - time.monotonic()) > 0:
                handshakes.wait(left_seconds)
                handshakes.raise_for(keys, cluster.scheduler)
                if (received := _receive(socket, decoder)) is not None:
                    return received
            raise DeadlineError(
                f"no answer from the scheduler at {cluster.scheduler} within {timeout_seconds:g} s; "
                f"check that it runs, and that its job is {cluster.job!r}; {SAME_VERSION}{handshakes.hint}"
            )
    finally:
        # No linger: nobody waits any more for the answer to a request that was not delivered.
        ctx.destroy(linger=0)


def _receive(socket: Socket, decoder: Decoder[Answer]) -> Answer | None:
    while socket.poll(0):
        frames = socket.recv_multipart()
        with contextlib.suppress(ProtocolError):  # a valid answer may still follow
            return decoder.decode(frames[0])
    return None
