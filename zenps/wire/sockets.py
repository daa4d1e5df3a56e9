"""ZeroMQ sockets with the options that every role needs.

libzmq's defaults lose data (a ROUTER drops what it cannot send), wait for ever at exit, and accept messages
of any size. The reason for each option stands beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from socket import gaierror
from typing import Any

import zmq

from zenps.config.values import format_address, parse_address
from zenps.errors import ConfigError
from zenps.keys import Keys

from .addresses import bindable, is_reached_by_ipv4

Socket = zmq.Socket[bytes]

# zmq.Socket.send() adds only what other kinds of sockets need.
send_frame: Callable[[Socket, bytes | memoryview, int, bool], object] = zmq.backend.Socket.send  # type: ignore[assignment]

LINGER_MS = 1000
"""How long a closed socket may go on sending its queue: a last ``Leave`` or ``Failure``.

Without a linger libzmq 4.3.5 aborts the process if a connection ends just as it is closed, while only
some frames of a message have been sent (``session_base.cpp``; libzmq issue 3442)."""

ZAP_DOMAIN = b"zenps"

# pyzmq's own threshold: below it, a copy costs less than counting references.
COPY_BELOW_BYTES = 64 * 1024

# Plain integers: an enum's operator takes a microsecond, for each frame.
MORE = int(zmq.SNDMORE)

# Routing identity, envelope, positions, values, and one more that shows that there are too many.
MAX_FRAMES = 5

# The send queue of a ROUTER for one peer. A peer that reads never leaves so many: in the largest job a node
# is told of some 5000 departures at once.
MAX_QUEUED_MESSAGES = 8192

# Unread messages of one peer at a ROUTER, unless their bytes call for fewer.
MAX_UNREAD_MESSAGES = 64

HEARTBEAT_SECONDS = 2
"""How often a DEALER sends libzmq's heartbeat, which finds connections whose other end vanished without FIN.

A ROUTER sends none. When a connection has ended while its reading was paused, libzmq 4.3.5 aborts the process
as soon as it wants to send a heartbeat (``stream_engine_base.cpp``; libzmq issues 3937, 4229 and 4767). A
ROUTER pauses reading, so it relies on the heartbeats of its peers, which tell it when to give them up. A
DEALER never pauses reading: the requests that its caller has in flight bound what arrives."""

SILENT_SECONDS = 10
"""A connection is closed as dead after this long without anything received, be it a heartbeat or an answer to
one."""

BUSY_SECONDS = 60
"""The same where tensors travel. A heartbeat waits behind some megabytes that TCP has buffered on each side;
on a slow link with many users that takes longer than 10 s. A lost node is found earlier, by its lease."""


@contextlib.contextmanager
def context() -> Iterator[zmq.Context[Socket]]:
    """A ZeroMQ context that is closed, with all its sockets, at the end of the block."""
    ctx: zmq.Context[Socket] = zmq.Context()
    try:
        yield ctx
    finally:
        ctx.destroy(linger=LINGER_MS)


def open_dealer(
    ctx: zmq.Context[Socket],
    identity: bytes,
    max_message_bytes: int,
    keys: Keys | None = None,
    peer: str = "scheduler",
    max_queued: int = 0,
    silent_seconds: int = SILENT_SECONDS,
) -> Socket:
    """A DEALER for one ROUTER, which knows it by ``identity`` across reconnections.

    With ``keys`` it is encrypted, and connects only to the node named ``peer``. At most ``max_queued``
    messages wait behind those that TCP has taken; 0: any number. ``silent_seconds`` is
    :data:`SILENT_SECONDS`, or :data:`BUSY_SECONDS` where tensors travel.
    """
    socket = _socket(ctx, zmq.DEALER, max_message_bytes)
    # By default a worker's send queue is bounded by what is in flight, not by a count of messages: a full
    # queue would block the one thread that also has to read.
    socket.setsockopt(zmq.SNDHWM, max_queued)
    socket.setsockopt(zmq.RCVHWM, 0)
    silent_ms = 1000 * silent_seconds
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_SECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silent_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, silent_ms)  # the same for the ROUTER at the other end
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public_of(peer))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    # Sending raises zmq.Again when the queue is full, and also when the peer has refused us: then there is no
    # queue any more.
    socket.setsockopt(zmq.SNDTIMEO, 0)
    return socket


def connect(socket: Socket, address: str) -> None:
    """Connects to ``host:port`` or ``tcp://host:port``, by IPv4 or IPv6 as this machine's routes allow.

    A name is resolved again whenever the connection is lost. Once it was reached by IPv4, it stays IPv4.
    """
    host, port = parse_address(address)
    if is_reached_by_ipv4(host):
        socket.setsockopt(zmq.IPV6, 0)
    socket.connect(f"tcp://{format_address(host, port)}")


def bind_router(
    ctx: zmq.Context[Socket],
    host: str,
    port: int,
    max_message_bytes: int,
    keys: Keys | None = None,
    max_unread: int = MAX_UNREAD_MESSAGES,
    settings: tuple[str, str] = ("cluster.scheduler", "cluster.scheduler"),
) -> tuple[Socket, str]:
    """A ROUTER on ``host``, or on all interfaces if others may resolve ``host`` to another address.

    With ``keys`` every peer needs a key that a :class:`~zenps.wire.curve.Authenticator` in ``ctx`` knows.
    At most ``max_unread`` messages of one peer wait here, and one more that is on its way; beyond, TCP slows
    the peer down (backpressure). Returns the socket and its address, ``tcp://host:port`` with the real port.

    Raises:
        ConfigError: ``host`` cannot be resolved, or the port is taken. It names one of ``settings``, in this
            order.
    """
    socket = _socket(ctx, zmq.ROUTER, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    # libzmq 4.3.5 hands on the name of a peer's key as a message that counts as written and never as read
    # (``pipe.cpp``), so that a limit of one message would stop every encrypted connection for good.
    socket.setsockopt(zmq.RCVHWM, max_unread + (keys is not None))
    # Without it a message to a peer that is gone vanishes; with it, sending raises EHOSTUNREACH.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A peer that reconnects takes over its identity from the dead connection.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        # Without a domain, libzmq accepts every key while no ZAP handler answers.
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(f"tcp://{format_address(bindable(host), port or '*')}")
    except (zmq.ZMQError, OSError) as error:
        socket.close()
        setting = settings[not isinstance(error, gaierror)]
        allowed = f"an address that can be bound ({error})"
        raise ConfigError(setting, format_address(host, port), allowed) from None
    bound_port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return socket, f"tcp://{format_address(host, bound_port)}"


def receive_frames(socket: Socket) -> list[memoryview]:
    """The frames of the next message, uncopied; each keeps its memory alive.

    Frames beyond :data:`MAX_FRAMES` are dropped as they are received.
    """
    return _receive(socket)[1]


def receive_routed(socket: Socket) -> tuple[int, list[memoryview]]:
    """The descriptor of the connection that a message came by, and its frames as by :func:`receive_frames`.

    The descriptor is -1 for a peer that speaks a ZMTP older than 3, as no node does.
    """
    first, frames = _receive(socket)
    try:
        return int(first.get(zmq.SRCFD)), frames
    except zmq.ZMQError:
        return -1, frames


def _receive(socket: Socket) -> tuple[zmq.Frame, list[memoryview]]:
    # recv_multipart asks the socket whether there are more frames, which costs as much as a frame.
    receive = socket.recv
    first = frame = receive(0, False)
    frames = [frame.buffer]
    while frame.more:
        frame = receive(0, False)
        if len(frames) < MAX_FRAMES:
            frames.append(frame.buffer)
    return first, frames


def send_frames(
    socket: Socket, prefix: Sequence[bytes], frames: Sequence[memoryview]
) -> zmq.MessageTracker | None:
    """Sends ``prefix``, then ``frames``, each of single bytes: small ones by copy, large ones by reference.

    Frames sent by reference must not change until ZeroMQ drops them; pooled memory guarantees that.

    Returns:
        whether libzmq still has the last frame that is sent by reference; None if all are copied.
    """
    parts: list[bytes | memoryview] = [*prefix, *frames]
    last, tracker = parts.pop(), None
    for part in parts:
        if len(part) < COPY_BELOW_BYTES:
            send_frame(socket, part, MORE, True)
        else:
            tracker = socket.send(part, MORE, copy=False, track=True)
    if len(last) < COPY_BELOW_BYTES:
        send_frame(socket, last, 0, True)
    else:
        tracker = socket.send(last, copy=False, track=True)
    return tracker


def _socket(ctx: zmq.Context[Socket], kind: int, max_message_bytes: int) -> Socket:
    socket: Socket = ctx.socket(kind)
    options: dict[int, Any] = {
        zmq.LINGER: LINGER_MS,
        zmq.IPV6: 1,
        # A larger message costs its sender the connection.
        zmq.MAXMSGSIZE: max_message_bytes,
        zmq.RECONNECT_IVL: 50,
        zmq.RECONNECT_IVL_MAX: 2000,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket
