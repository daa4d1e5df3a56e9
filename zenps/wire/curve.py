"""CURVE authentication of peers: the ZAP handler of a ROUTER, and the reasons why handshakes fail.

With CURVE, libzmq asks a handler in the same context about each peer that has proved to own some key (ZAP,
https://rfc.zeromq.org/spec/27/). Here the thread that owns the ROUTER answers: a thread of its own, as in
pyzmq's ``ThreadAuthenticator``, would need notice of every change of the keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from zenps.config.values import is_loopback, parse_address
from zenps.errors import ConfigError, ProtocolError
from zenps.keys import Keys, node_name
from zenps.observe import log

from .connections import HANDSHAKE_FAILURES, Connections, Event, open_monitor
from .sockets import ZAP_DOMAIN, Socket

if TYPE_CHECKING:  # short commands such as zenps health should not import metrics
    from zenps.observe.metrics import Refusal

logger = logging.getLogger("zenps.security")

Failure = Literal["unknown_key", "mechanism", "other"]

_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"


class Handshakes:
    """Reports failed handshakes of one socket.

    Args:
        socket: used by one thread at a time, together with this object. A socket must connect only after this
            object was made: once it was refused, libzmq does not try again.
    """

    def __init__(self, socket: Socket) -> None:
        self._watched = socket
        self.socket = open_monitor(socket, HANDSHAKE_FAILURES)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self.socket, zmq.POLLIN)
        self.hint = ""
        """A hint for the error of a wait that has ended, if handshakes failed and libzmq does not say why."""

    def wait(self, seconds: float) -> None:
        """Waits until the socket has a message, a handshake has failed, or ``seconds`` have passed."""
        self._poller.poll(int(1000 * seconds) + 1)

    def failures(self) -> Iterator[Failure]:
        """The reasons of the handshakes that have failed since the last call."""
        while not self.socket.closed and self.socket.poll(0):
            yield _failure(parse_monitor_message(self.socket.recv_multipart()))

    def raise_for(self, keys: Keys | None, scheduler: str) -> None:
        """Ends the wait of a node for a scheduler that has refused it.

        Raises:
            ConfigError: one side has keys and the other has none, or the scheduler does not list our key.
        """
        for failure in self.failures():
            if failure == "unknown_key":
                name = keys.name if keys else ""
                allowed = f"a key that the scheduler at {scheduler} lists (security.keys there)"
                raise ConfigError("security.secret", name, allowed)
            if failure == "mechanism":
                file = str(keys.listed.file) if keys else ""
                allowed = f"{'none' if keys else 'a list'}, as the scheduler at {scheduler} has"
                raise ConfigError("security.keys", file, f"{allowed}: all nodes have keys, or none has")
            self.hint = "; handshakes failed: check that the keys here and there are of one job"

    def close(self) -> None:
        """Stops watching; the socket stays open. May be called again."""
        if not self.socket.closed:
            self._watched.disable_monitor()
            self.socket.close()


def _failure(event: Event) -> Failure:
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "unknown_key"
    return "mechanism" if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else "other"


class Authenticator:
    """Admits peers of a ROUTER whose keys are listed. Without keys it admits everybody.

    It must be made before the ROUTER is bound, and be used by the thread that owns the ROUTER.

    Args:
        ctx: the context of the ROUTER.
        keys: of this node, or None. The list of public keys is read again whenever its file has changed.
        count: called for every connection that is refused.
        role: the only role whose nodes may connect; empty: any.

    Attributes:
        sockets: to poll; when one is readable, call :meth:`attend`.
    """

    def __init__(
        self, ctx: zmq.Context[Socket], keys: Keys | None, count: Callable[[Refusal], None], role: str = ""
    ) -> None:
        self._role = role
        self._keys = keys
        self._count = count
        self._connections: Connections | None = None
        self.sockets: list[Socket] = []
        if keys is None:
            return
        self._zap: Socket = ctx.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self.sockets.append(self._zap)

    def watch(self, connections: Connections) -> None:
        """Also counts the ROUTER's failed handshakes: peers without a key never come to the ZAP handler."""
        self._connections = connections
        if self._keys is not None:
            self.sockets.append(connections.monitor)

    def close(self) -> None:
        """Stops watching. Call it before the context ends."""
        if self._connections is not None:
            self._connections.close()

    def owner(self, frame: memoryview) -> str:
        """The name of the node that sent a frame, by its memory as it was received; "" without keys.

        Raises:
            ProtocolError: its key has been revoked.
        """
        if self._keys is None:
            return ""
        assert isinstance(frame.obj, zmq.Frame)
        listed = self._keys.listed
        name = listed.owners.get(str(frame.obj.get("User-Id")).encode())
        if name is None:
            raise ProtocolError("key", f"its key is no longer listed in {listed.file}")
        return name

    def check(self, frame: memoryview, role: str, rank: int) -> None:
        """Refuses a frame that was not sent by the node of this role and rank.

        Raises:
            ProtocolError: the sender has the key of another node, or a revoked one.
        """
        if self._keys is None:
            return
        owner, name = self.owner(frame), node_name(role, rank)
        if owner != name:
            raise ProtocolError("key", f"a message of {name} by {owner}")

    def attend(self) -> None:
        """Answers ZAP requests, counts failed handshakes, and reads the list of keys again if it changed."""
        failed = self._connections.failed_handshakes() if self._connections else []
        if self._keys is None:
            return
        self._keys.listed.read_again()
        while self._zap.poll(0):
            self._answer(self._keys)
        for event in failed:
            if _failure(event) != "unknown_key":  # the ZAP handler has counted that
                self._count("handshake")
                log.once(
                    logger,
                    "handshake",
                    "refused a connection of a peer that has no key, or means another "
                    "node, or hung up; further ones are only counted",
                )

    def _answer(self, keys: Keys) -> None:
        version, request, domain, address, _, mechanism, *credentials = self._zap.recv_multipart()
        # Requests come only from our own ROUTER, with its domain: anything else is a bug here.
        assert (version, domain, mechanism) == (_ZAP_VERSION, ZAP_DOMAIN, b"CURVE")
        public = z85.encode(credentials[0])
        name = keys.listed.owners.get(public)
        where, key = address.decode(errors="replace").removeprefix("::ffff:"), public.decode()
        status, user = (b"200", b"OK"), public
        if name is None:
            status, user = (b"400", b"unknown key"), b""
            self._count("unknown_key")
            why = "refused a connection from %s: %s is not in %s"
            log.once(logger, (where, key), why, where, key, keys.listed.file)
        elif self._role and name.partition("-")[0] != self._role:
            # Under the identity of another node it would take over that node's connection.
            status, user = (b"400", b"wrong role"), b""
            self._count("wrong_role")
            log.once(
                logger,
                (where, key),
                "refused a connection from %s: it has the key of %s, expected one of a %s",
                where,
                name,
                self._role,
            )
        self._zap.send_multipart([_ZAP_VERSION, request, *status, user, b""])


def warn_if_open(keys: Keys | None, address: str) -> None:
    """Warns if there are no keys and other machines may reach ``address``, ``host:port``."""
    if keys is None and not is_loopback(parse_address(address)[0]):
        logger.warning(
            "%s is not a loopback address, and there are no keys: whoever reaches it can read, change and "
            "join this job. zenps keygen makes keys; security.keys and security.secret use them",
            address,
        )
