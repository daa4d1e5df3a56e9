"""Asking the scheduler what the cluster looks like."""

from __future__ import annotations

import time
import uuid

import msgspec
import zmq

from zenps.errors import DeadlineError, ProtocolError
from zenps.settings import ClusterConfig
from zenps.wire.frames import MAX_ENVELOPE_BYTES, Decoder, encode
from zenps.wire.messages import Status, StatusRequest
from zenps.wire.sockets import Socket, connect_dealer

__all__ = ["fetch", "to_json"]


def fetch(cluster: ClusterConfig, timeout_seconds: float) -> Status:
    """The cluster as the scheduler at ``cluster.scheduler`` sees it now.

    Raises:
        DeadlineError: no answer within ``timeout_seconds``.
    """
    ctx: zmq.Context[Socket] = zmq.Context()
    try:
        identity = f"status-{uuid.uuid4().hex}".encode()
        socket = connect_dealer(ctx, f"tcp://{cluster.scheduler}", identity, MAX_ENVELOPE_BYTES)
        socket.send(encode(cluster.job, StatusRequest()))
        return _receive(socket, Decoder(cluster.job, Status), time.monotonic() + timeout_seconds)
    except TimeoutError:
        raise DeadlineError(
            f"no answer from the scheduler at {cluster.scheduler} within {timeout_seconds:g} s; "
            f"is it running, and is its job {cluster.job!r}?"
        ) from None
    finally:
        # No linger: a request that could not be delivered by now has nobody waiting for its answer.
        ctx.destroy(linger=0)


def _receive(socket: Socket, decoder: Decoder[Status], until: float) -> Status:
    while (left_seconds := until - time.monotonic()) > 0:
        if socket.poll(int(1000 * left_seconds) + 1):
            frames = socket.recv_multipart()
            try:
                return decoder.decode(frames[0])
            except ProtocolError:
                continue  # whatever it is that listens there, it may yet answer
    raise TimeoutError


def to_json(status: Status) -> str:
    """``status`` as one JSON object; its ``nodes`` have role, rank, host, pid, address, epoch, load, …

    A counter that is no finite number is null, as JSON knows no other.
    """
    tree = msgspec.structs.asdict(status)
    tree["nodes"] = [msgspec.structs.asdict(node) for node in status.nodes]
    return msgspec.json.format(msgspec.json.encode(tree).decode())
