"""Status page of the scheduler over HTTP, read-only.

It has its own threads. They ask the scheduler's loop for the status, and the loop never waits for them.
"""

from __future__ import annotations

import importlib.resources
import ipaddress
import threading
import time
from concurrent.futures import Future
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from zenps.config.settings import StatusConfig
from zenps.observe.http_server import Endpoint, Handler
from zenps.wire.scheduler_messages import Status
from zenps.wire.status import to_tree

from ..membership.tracker import FRESH_SECONDS

TIMEOUT_SECONDS: Final = 2.0
"""How long a reader waits for the loop, which answers ten times a second."""

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: the page's own files, its own origin, and nothing else.

Source: https://developer.mozilla.org/en-US/docs/Web/HTTP/Reference/Headers/Content-Security-Policy
"""


class _File(NamedTuple):
    """The response to a path: its content type and its bytes."""

    kind: str
    body: bytes


class Page(Endpoint):
    """A served status page, at the address in ``config``.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, config: StatusConfig) -> None:
        self._question: Future[Status] | None = None
        """The latest. All readers that come before its answer, or soon after that, share it."""
        self._fresh_until = 0.0
        self._encoded: tuple[Status | None, bytes] = (None, b"")
        self._lock = threading.Lock()
        """Guards these between readers. The loop does not take it."""
        handler = partial(_PageHandler, self, _files())
        super().__init__("status", config.host, config.port, handler)

    @property
    def has_question(self) -> bool:
        """True if readers wait for :meth:`answer`."""
        return self._question is not None and not self._question.done()

    def answer(self, status: Status) -> None:
        """Gives the status to the readers that wait for it; called by the scheduler's loop."""
        question = self._question
        if question is not None and not question.done():
            self._fresh_until = time.monotonic() + FRESH_SECONDS
            question.set_result(status)

    def read(self) -> bytes:
        """Returns the status as JSON; called by the threads of readers.

        Raises:
            TimeoutError: the loop does not answer.
        """
        with self._lock:
            question = self._question
            if question is None or (question.done() and time.monotonic() > self._fresh_until):
                question = self._question = Future()
        status = question.result(TIMEOUT_SECONDS)
        with self._lock:
            if self._encoded[0] is not status:
                self._encoded = status, msgspec.json.encode(to_tree(status))
            return self._encoded[1]


def _files() -> dict[str, _File]:
    """Returns the files of the page by their paths."""
    folder, text = importlib.resources.files("zenps.scheduler.page"), "{}; charset=utf-8".format
    return {
        path: _File(text(kind), folder.joinpath(name).read_bytes())
        for path, name, kind in (
            ("/", "page.html", "text/html"),
            ("/page.css", "page.css", "text/css"),
            ("/page.js", "page.js", "text/javascript"),
        )
    }


class _PageHandler(Handler):
    def __init__(self, page: Page, files: dict[str, _File], *connection: Any) -> None:
        self._page, self._files = page, files
        super().__init__(*connection)

    def do_GET(self) -> None:
        if self.server.is_local and not _names_this_machine(self.headers.get("Host", "")):
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "ask for localhost or an address")
        match self.path.partition("?")[0]:
            case path if path in self._files:
                self._send(*self._files[path], {"Content-Security-Policy": _POLICY})
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
            status = self._page.read()
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


def _names_this_machine(host: str) -> bool:
    """True if a request's Host is ``localhost`` or an IP address, against DNS rebinding.

    Any other name may be one that the DNS server of a hostile page has pointed to this machine.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
