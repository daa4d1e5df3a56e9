"""HTTP server of the status page, which is read-only.

It has its own threads. They ask the scheduler's loop for the status, and the loop never waits for them.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import io
import ipaddress
import logging
import re
import socket
import socketserver
import sys
import threading
import time
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from queue import SimpleQueue
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from zenps.config.settings import StatusConfig
from zenps.errors import cannot_listen
from zenps.observe import log
from zenps.wire.messages import Status
from zenps.wire.status import to_tree

logger = logging.getLogger("zenps.scheduler")

FRESH_SECONDS: Final = 0.25
"""How long one status answers all readers: so the loop makes at most four a second, however many they are."""

PATIENCE_SECONDS: Final = 2.0
"""How long a reader waits for the loop, which answers ten times a second."""

LIMIT_SECONDS: Final = 5.0
"""How long a connection may take, from its first to its last byte. Each serves one request."""

MOST_CONNECTIONS: Final = 32
"""One more connection closes the oldest, so that idle connections do not block others."""

MOST_REQUEST_BYTES: Final = 16 << 10

POLL_SECONDS: Final = 0.2
"""How often connections over their limit are closed, and how long :meth:`Page.close` may take."""

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """A served status page.

    Attributes:
        address: its ``host:port``; empty if the page is off.
    """

    def __init__(self, server: _Server | None = None, thread: threading.Thread | None = None) -> None:
        self._server = server
        self._thread = thread
        self.address = ""
        if server is not None:
            host, port = server.server_address[:2]
            self.address = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    @property
    def has_questions(self) -> bool:
        """True if a reader waits for :meth:`answer`."""
        return self._server is not None and self._server.mailbox.has_questions

    def answer(self, status: Status) -> None:
        """Gives the status to the readers that wait for it; called by the scheduler's loop."""
        if self._server is not None:
            self._server.mailbox.answer(status)

    def close(self) -> None:
        """Stops serving and frees the port; calling it again does nothing."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def serve(config: StatusConfig) -> Page:
    """Serves the page at the address in ``config``.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if config.port == -1:
        return Page()
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        server = _Server(family, address)
    except OSError as error:
        raise cannot_listen("status", config.host, config.port, error) from error
    run = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,), name="zenps-page", daemon=True)
    run.start()
    return Page(server, run)


class _Mailbox:
    """Hands the status from the scheduler's loop to the threads of readers."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[Future[Status]] = SimpleQueue()
        self._reading = threading.Lock()
        self._json = b""
        self._fresh_until = 0.0

    def read(self) -> bytes:
        """Returns the status as JSON. Raises :class:`TimeoutError` if the loop does not answer."""
        with self._reading:
            if time.monotonic() > self._fresh_until:
                question: Future[Status] = Future()
                self._questions.put(question)
                self._json = msgspec.json.encode(to_tree(question.result(PATIENCE_SECONDS)))
                self._fresh_until = time.monotonic() + FRESH_SECONDS
            return self._json

    @property
    def has_questions(self) -> bool:
        """See :attr:`Page.has_questions`."""
        return not self._questions.empty()

    def answer(self, status: Status) -> None:
        """See :meth:`Page.answer`."""
        while not self._questions.empty():
            self._questions.get_nowait().set_result(status)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self.mailbox = _Mailbox()
        self.html = importlib.resources.files("zenps.scheduler.page").joinpath("page.html").read_bytes()
        self.policy = _policy(self.html.decode())
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}
        """When each connection is closed, the oldest first."""
        super().__init__(address, _Handler)
        self.is_local = ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._until) >= MOST_CONNECTIONS:
                self._close(next(iter(self._until)))
            self._until[request] = time.monotonic() + LIMIT_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Runs every :data:`POLL_SECONDS`, and after each connection."""
        with self._lock:
            for connection, until in list(self._until.items()):
                if time.monotonic() > until:
                    self._close(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # once it is closed, its descriptor may be that of another connection
            self._until.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for connection in list(self._until):
                self._close(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # such as a reader that went away
            log.once(logger, ("page", type(error)), "the status page was not served: %r", error)

    def _close(self, connection: socket.socket) -> None:
        """Shuts the connection down. Its thread, which waits for it, closes it."""
        del self._until[connection]
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a reader of the status page had gone before its connection was closed")


def _policy(html: str) -> str:
    """Content security policy: the page's own style and script, its own origin, and nothing else.

    Source: https://developer.mozilla.org/en-US/docs/Web/HTTP/Reference/Headers/Content-Security-Policy
    """
    hashes = {}
    for tag in ("style", "script"):
        found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert found is not None
        digest = hashlib.sha256(found[1].encode()).digest()
        hashes[tag] = base64.b64encode(digest).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Bounded(io.RawIOBase):
    """The bytes that a connection sends, up to :data:`MOST_REQUEST_BYTES`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MOST_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise ConnectionAbortedError(f"a request of more than {MOST_REQUEST_BYTES} bytes")
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    timeout = LIMIT_SECONDS
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.connection), 4096)

    def do_GET(self) -> None:
        if self.server.is_local and not _names_this_machine(self.headers.get("Host", "")):
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "ask for localhost or an address")
        match self.path.partition("?")[0]:
            case "/":
                policy = {"Content-Security-Policy": self.server.policy}
                self._send("text/html; charset=utf-8", self.server.html, policy)
            case "/status.json":
                self._send_status("application/json")
            case "/healthz":
                self._send_status("text/plain; charset=utf-8", b"ok\n")
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _send_status(self, kind: str, instead: bytes = b"") -> None:
        """Sends the status, or ``instead`` if the scheduler has answered with a status."""
        try:
            status = self.server.mailbox.read()
        except TimeoutError:
            return self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the scheduler is busy")
        self._send(kind, instead or status)

    def _send(self, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        return "zenps"

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("status page: %s", format % args)


def _names_this_machine(host: str) -> bool:
    """True if a request's Host is ``localhost`` or an IP address, against DNS rebinding.

    Any other name may be one that the DNS server of a hostile page has pointed to this machine.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
