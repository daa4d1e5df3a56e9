"""The status page: how the cluster looks in a browser. Whoever reads it can change nothing.

Threads of its own serve it, and ask the scheduler's loop, which never waits for them, for the status.
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
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from queue import SimpleQueue
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from zenps.cli.status import to_tree
from zenps.config.settings import StatusConfig
from zenps.errors import cannot_listen
from zenps.observe import log
from zenps.wire.messages import Status

logger = logging.getLogger("zenps.scheduler")

FRESH_SECONDS: Final = 0.25
"""For so long a status serves all who look: however many they are, the loop makes four a second."""

PATIENCE_SECONDS: Final = 2.0
"""How long a reader waits for the loop, which turns ten times a second."""

LIMIT_SECONDS: Final = 5.0
"""How long a connection may take, from first to last byte: each is for one request."""

MOST_CONNECTIONS: Final = 32
"""The next one makes the oldest go: those that only wait keep nobody out."""

MOST_REQUEST_BYTES: Final = 16 << 10

POLL_SECONDS: Final = 0.2
"""How often old connections are looked for, and how long an end takes."""

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """A status page that is served; ``address`` is its ``host:port``, empty where it is off."""

    def __init__(self, server: _Server | None = None) -> None:
        self._server = server
        self.address = ""
        if server is not None:
            host, port = server.server_address[:2]
            self.address = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"
            self._thread = threading.Thread(
                target=server.serve_forever, args=(POLL_SECONDS,), name="zenps-page", daemon=True
            )
            self._thread.start()

    def answer(self, look: Callable[[], Status]) -> None:
        """For the scheduler's loop: gives what ``look`` returns to those who have asked, if any."""
        if self._server is not None:
            self._server.desk.answer(look)

    def close(self) -> None:
        """Stops serving and frees the port; calling it again does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def serve(config: StatusConfig) -> Page:
    """Serves the page where ``config`` says.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if config.port == -1:
        return Page()
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return Page(_Server(family, address))
    except OSError as error:
        raise cannot_listen("status", config.host, config.port, error) from error


class _Desk:
    """Where readers' threads ask, and the scheduler's loop answers."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Future[Status]] = SimpleQueue()
        self._reading = threading.Lock()
        self._json = b""
        self._fresh_until = 0.0

    def read(self) -> bytes:
        """The status as JSON. Raises :class:`TimeoutError` where the loop does not answer."""
        with self._reading:
            if time.monotonic() > self._fresh_until:
                question: Future[Status] = Future()
                self._asked.put(question)
                self._json = msgspec.json.encode(to_tree(question.result(PATIENCE_SECONDS)))
                self._fresh_until = time.monotonic() + FRESH_SECONDS
            return self._json

    def answer(self, look: Callable[[], Status]) -> None:
        """See :meth:`Page.answer`."""
        while not self._asked.empty():
            self._asked.get_nowait().set_result(look())


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self.desk = _Desk()
        self.html = importlib.resources.files("zenps.scheduler.page").joinpath("page.html").read_bytes()
        self.policy = _policy(self.html.decode())
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}
        """When each connection is cut, the oldest first."""
        super().__init__(address, _Handler)
        self.is_local = ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._until) >= MOST_CONNECTIONS:
                self._cut(next(iter(self._until)))
            self._until[request] = time.monotonic() + LIMIT_SECONDS
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Runs every :data:`POLL_SECONDS`, and after each connection."""
        with self._lock:
            for connection, until in list(self._until.items()):
                if time.monotonic() > until:
                    self._cut(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # what is closed is not to be cut: its number may be another's by then
            self._until.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for connection in list(self._until):
                self._cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # those are of readers that went away
            log.once(logger, ("page", type(error)), "the status page was not served: %r", error)

    def _cut(self, connection: socket.socket) -> None:
        """Its thread, which waits for it, closes it."""
        del self._until[connection]
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a reader of the status page was gone before it was cut")


def _policy(html: str) -> str:
    """The page's own style and script, its own origin, and nothing else."""
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
    """What a connection sends, up to :data:`MOST_REQUEST_BYTES`."""

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
        """The status, or what is to be sent if there is one."""
        try:
            status = self.server.desk.read()
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
    """Whether a request's Host is no name that somebody's DNS could point here from a page of theirs."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
