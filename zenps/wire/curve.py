"""Who is let in: the ZAP handler beside a ROUTER, and what failed handshakes say.

With CURVE, libzmq asks a handler in the same context about each peer that has proved to have some key
(ZAP, https://rfc.zeromq.org/spec/27/). Here the thread that owns the ROUTER answers: a thread of its own,
as in pyzmq's ``ThreadAuthenticator``, would have to be told of every change of the keys.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from zenps.config.values import is_loopback, parse_address
from zenps.errors import ConfigError, ProtocolError
from zenps.keys import Keys, node_name, read_owners
from zenps.observe import log

from .connections import HANDSHAKE_FAILURES, Connections, Event
from .sockets import ZAP_DOMAIN, Socket

if TYPE_CHECKING:  # who only asks a question, as zenps health does, counts nothing
    from zenps.observe.metrics import Refusal

Failure = Literal["unknown_key", "mechanism", "other"]

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"


class Handshakes:
    """Reports the handshakes of one socket that fail.

    Args:
        ctx: the socket's.
        socket: whose; it and this are used by one thread at a time. One that connects must not do so
            before: where it was refused, libzmq does not try again.
    """

    def __init__(self, ctx: zmq.Context[Socket], socket: Socket) -> None:
        self._watched = socket
        address = f"inproc://handshakes-{uuid.uuid4().hex}"
        socket.monitor(address, HANDSHAKE_FAILURES)
        self.socket: Socket = ctx.socket(zmq.PAIR)
        # A full queue would block libzmq's I/O thread, and with it every connection.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self.socket, zmq.POLLIN)
        self.hint = ""
        """For the message of a wait that has ended: handshakes failed, and libzmq does not say why."""

    def wait(self, seconds: float) -> None:
        """Until the socket has a message, a handshake has failed, or ``seconds`` have passed."""
        self._poller.poll(int(1000 * seconds) + 1)

    def failures(self) -> Iterator[Failure]:
        """How handshakes have failed since the last call."""
        while not self.socket.closed and self.socket.poll(0):
            yield _failure(parse_monitor_message(self.socket.recv_multipart()))

    def raise_for(self, keys: Keys | None, scheduler: str) -> None:
        """For a node: ends the wait for a scheduler that will not let it in.

        Raises:
            ConfigError: one side has keys and the other has none, or ours is not listed there.
        """
        for failure in self.failures():
            if failure == "unknown_key":
                name = keys.name if keys else ""
                allowed = f"a key that the scheduler at {scheduler} lists (security.keys there)"
                raise ConfigError("security.secret", name, allowed)
            if failure == "mechanism":
                file = str(keys.file) if keys else ""
                allowed = f"{'none' if keys else 'a list'}, as the scheduler at {scheduler} has"
                raise ConfigError("security.keys", file, f"{allowed}: with or without keys, but all alike")
            self.hint = " Handshakes failed: are the keys here and there of one job?"

    def close(self) -> None:
        """Stops watching; the socket goes on. Calling it again does nothing."""
        if not self.socket.closed:
            self._watched.disable_monitor()
            self.socket.close()


def _failure(event: Event) -> Failure:
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "unknown_key"
    return "mechanism" if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else "other"


class Gate:
    """Lets peers of a ROUTER in by their keys. Without keys, everybody, and nothing else happens.

    To be made before the ROUTER is bound, and used by the thread that owns it.

    Args:
        ctx: the ROUTER's.
        keys: this node's, or None. The list is read again whenever its file has changed.
        count: called for every connection that is refused.

    Attributes:
        sockets: those to poll; when one can be read, :meth:`attend`.
    """

    def __init__(self, ctx: zmq.Context[Socket], keys: Keys | None, count: Callable[[Refusal], None]) -> None:
        self._ctx = ctx
        self._keys = keys
        self._count = count
        self._connections: Connections | None = None
        self.sockets: list[Socket] = []
        if keys is None:
            return
        self._owners = keys.owners
        self._seen: tuple[int, ...] | None = None  # the list may have changed since the keys were loaded
        self._zap: Socket = ctx.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self.sockets.append(self._zap)

    def watch(self, connections: Connections) -> None:
        """Counts the ROUTER's failed handshakes, too: those without a key never come to the handler."""
        self._connections = connections
        if self._keys is not None:
            self.sockets.append(connections.monitor)

    def close(self) -> None:
        """Stops watching. To come before the context's end."""
        if self._connections is not None:
            self._connections.close()

    def owner(self, frame: memoryview | zmq.Frame) -> str:
        """The name of the node that sent a received frame; "" where there are no keys.

        Raises:
            ProtocolError: its key has been revoked.
        """
        if self._keys is None:
            return ""
        message = frame.obj if isinstance(frame, memoryview) else frame
        assert isinstance(message, zmq.Frame)
        name = self._owners.get(str(message.get("User-Id")).encode())
        if name is None:
            raise ProtocolError("key", f"its key is no longer listed in {self._keys.file}")
        return name

    def check(self, frame: memoryview | zmq.Frame, role: str, rank: int) -> None:
        """Refuses a frame by anybody but the node of this role and rank.

        Raises:
            ProtocolError: another node's key, or a revoked one.
        """
        if self._keys is None:
            return
        owner, name = self.owner(frame), node_name(role, rank)
        if owner != name:
            raise ProtocolError("key", f"a message of {name} by {owner}")

    def attend(self) -> None:
        """Answers peers that knock, counts those that failed, and reads the list again if it has changed."""
        failed = self._connections.failed_handshakes() if self._connections else []
        if self._keys is None:
            return
        self._read_again(self._keys)
        while self._zap.poll(0):
            self._answer(self._keys)
        for event in failed:
            if _failure(event) != "unknown_key":  # the handler has counted it
                self._count("handshake")
                log.once(
                    _logger,
                    "handshake",
                    "refused a connection of a peer that has no key, or means another "
                    "node, or hung up; further ones are only counted",
                )

    def _answer(self, keys: Keys) -> None:
        version, request, domain, address, _, mechanism, *credentials = self._zap.recv_multipart()
        # Of our own ROUTER alone, and with the ROUTER's domain: anything else is a mistake of ours.
        assert (version, domain, mechanism) == (_ZAP_VERSION, ZAP_DOMAIN, b"CURVE")
        public = z85.encode(credentials[0])
        if public in self._owners:
            status, user = (b"200", b"OK"), public
        else:
            status, user = (b"400", b"unknown key"), b""
            self._count("unknown_key")
            where, key = address.decode(errors="replace").removeprefix("::ffff:"), public.decode()
            log.once(
                _logger, (where, key), "refused a connection from %s: %s is not in %s", where, key, keys.file
            )
        self._zap.send_multipart([_ZAP_VERSION, request, *status, user, b""])

    def _read_again(self, keys: Keys) -> None:
        seen = self._fingerprint(keys)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            owners = read_owners(keys.file)
        except ConfigError as error:
            _logger.error("the keys stay as they were: %s", error)
            return
        if owners != self._owners:
            _logger.info("%s has changed: %d keys", keys.file, len(owners))
        self._owners = owners

    @staticmethod
    def _fingerprint(keys: Keys) -> tuple[int, ...]:
        """Changes with the file; a file that is gone is a change, too."""
        try:
            found = os.stat(keys.file)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def warn_if_open(keys: Keys | None, address: str) -> None:
    """Warns where anybody on a network could talk to ``address``, ``host:port``, or listen."""
    if keys is None and not is_loopback(parse_address(address)[0]):
        _logger.warning(
            "%s is no loopback address, and there are no keys: whoever reaches it can read, change and join "
            "this job. zenps keygen makes keys; security.keys and security.secret use them",
            address,
        )


_logger = logging.getLogger("zenps.security")
