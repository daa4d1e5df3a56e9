"""Bounded HTTP server: serves metrics and the status page to readers that it does not trust.

Whatever readers do, it holds a fixed number of connections, each for a fixed time. So idle connections, slow
senders and slow readers take no descriptors from the data path, and do not keep others out. (Under waitress
3.0.2, slow senders keep all others out: each byte extends its ``channel_timeout``.)
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from zenps.config.values import format_address, is_loopback
from zenps.errors import cannot_listen

from . import log

logger = logging.getLogger("zenps.http")

LIMIT_SECONDS: Final = 10.0
"""How long a connection may take, from its first to its last byte: as long as Prometheus waits for metrics by
default. Each connection serves one request."""

MAX_CONNECTIONS: Final = 32
"""One more connection closes the oldest, so that idle connections do not block others."""

MAX_THREADS: Final = 2 * MAX_CONNECTIONS
"""The most threads: those of open connections, and those that still prepare an answer for a closed one."""

MAX_REQUEST_BYTES: Final = 16 << 10

POLL_SECONDS: Final = 0.2
"""How often connections over their limit are closed."""

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Endpoint:
    """A server that runs, or none if ``port`` is -1.

    Args:
        section: of the settings ``host`` and ``port``.
        port: 0 for any free one.
        handler: of each connection.

    Attributes:
        address: its ``host:port``; empty if it is off.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, section: str, host: str, port: int, handler: Callable[..., Handler]) -> None:
        self.address = ""
        self._server: Server | None = None
        if port == -1:
            return
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = server = Server(family, address, handler)
        except OSError as error:
            raise cannot_listen(section, host, port, error) from error
        here, port = server.server_address[:2]
        self.address = format_address(str(here), port)
        self._thread = threading.Thread(
            target=server.serve_forever, args=(POLL_SECONDS,), name="zenps-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving and frees the port; calling it again does nothing."""
        if self._server is not None:
            # Otherwise the thread would notice the end only at its next poll, and delay the role's end.
            with contextlib.suppress(OSError):  # macOS refuses it
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Accepts connections, and closes those that are over a limit.

    Attributes:
        is_local: whether it listens on loopback.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    """The backlog. Where it is full, the kernel lets a client wait for a second and more to connect."""

    def __init__(self, family: int, address: Any, handler: Callable[..., Handler]) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}
        """When each connection is closed, the oldest first."""
        self._free_threads = threading.Semaphore(MAX_THREADS)
        super().__init__(address, handler)
        self.is_local = is_loopback(str(self.server_address[0]))

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the connection still waits, so this is called again at once
                time.sleep(POLL_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection on a thread of its own, unless closed connections still occupy all threads."""
        with self._lock:
            if len(self._until) >= MAX_CONNECTIONS:
                self._close(next(iter(self._until)))
        if not self._free_threads.acquire(timeout=POLL_SECONDS):
            self.shutdown_request(request)
            return
        with self._lock:
            self._until[request] = time.monotonic() + LIMIT_SECONDS
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._free_threads.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Runs on the thread of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_threads.release()

    def service_actions(self) -> None:
        """Runs every :data:`POLL_SECONDS`, and after each connection."""
        with self._lock:
            for connection, until in list(self._until.items()):
                if time.monotonic() > until:
                    self._close(connection)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:  # once it is closed, its descriptor may be that of another connection
            self._until.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stops listening, and ends all connections."""
        super().server_close()
        with self._lock:
            for connection in list(self._until):
                self._close(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs what a handler raised, once."""
        error = sys.exception()
        if not isinstance(error, OSError):  # such as a reader that went away
            log.once(logger, ("http", type(error)), "a request over HTTP was not served: %r", error)

    def _close(self, connection: socket.socket) -> None:
        """Shuts the connection down. Its thread, which waits for it, closes it."""
        del self._until[connection]
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a reader had gone before its connection was closed")


class _Bounded(io.RawIOBase):
    """The bytes that a connection sends, up to :data:`MAX_REQUEST_BYTES`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise ConnectionAbortedError(f"a request of more than {MAX_REQUEST_BYTES} bytes")
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class Handler(BaseHTTPRequestHandler):
    """Serves the one request of a connection; subclasses have ``do_GET``."""

    timeout = LIMIT_SECONDS
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"
    server: Server

    def setup(self) -> None:
        """Limits the bytes that are read of the request."""
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.connection), 4096)

    def end_headers(self) -> None:
        """Adds the headers of every answer."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        """Returns the ``Server`` header."""
        return "zenps"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs each request, for debugging."""
        logger.debug(format, *args)
