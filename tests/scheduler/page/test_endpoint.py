"""HTTP server of the status page over real sockets: what it serves, to whom, and hostile readers."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ports import hold_port
from tests.scheduler.nodes import running
from zenps.config.settings import StatusConfig
from zenps.errors import ConfigError
from zenps.observe import http_server
from zenps.scheduler.membership.tracker import FRESH_SECONDS
from zenps.scheduler.page import endpoint as page
from zenps.wire.scheduler_messages import NodeStatus, Status

DEADLINE_SECONDS = 30.0
SOON_SECONDS = 0.9 * http_server.LIMIT_SECONDS
"""Before that limit would end a connection."""


def status() -> Status:
    return running().status(1.0)


class Loop(contextlib.AbstractContextManager["Loop"]):
    """A page, and a thread instead of the scheduler's loop. While ``stopped``, it does not answer."""

    def __init__(self, config: StatusConfig) -> None:
        self.page = page.Page(config)
        self.asked = 0
        self.stopped = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.01):
            if not self.stopped and self.page.has_question:
                self.page.answer(self._look())

    def _look(self) -> Status:
        self.asked += 1
        return status()

    def connect(self) -> socket.socket:
        host, _, port = self.page.address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), DEADLINE_SECONDS)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join(DEADLINE_SECONDS)
        self.page.close()


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(loop: Loop, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(loop.page.address, timeout=DEADLINE_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def first_line(connection: socket.socket) -> bytes:
    """Returns the first line of the answer; empty if the connection ended without one."""
    with connection.makefile("rb") as stream:
        try:
            return stream.readline()
        except ConnectionResetError:
            return b""


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with Loop(StatusConfig()) as made:
        yield made


def file_of(loop: Loop, path: str, name: str, kind: str) -> Answer:
    """A file of the page, which a browser may take from nowhere else."""
    answer = ask(loop, path)
    assert (answer.status, answer.headers["Content-Type"]) == (200, f"{kind}; charset=utf-8")
    assert answer.body == Path(page.__file__).with_name(name).read_bytes()
    policy = answer.headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"} <= {*policy}
    return answer


def test_serves_the_page_the_status_and_health(loop: Loop) -> None:
    files = [
        file_of(loop, "/", "page.html", "text/html"),
        file_of(loop, "/page.css", "page.css", "text/css"),
        file_of(loop, "/page.js?2", "page.js", "text/javascript"),
    ]
    answer = ask(loop, "/status.json?now")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    tree = json.loads(answer.body)
    assert [node["slots"] for node in tree["nodes"]] == [2048, 2048, 0, 0]
    assert tree["throughput"] == {"pushed_bytes": 0, "pulled_bytes": 0, "rounds": 0, "steps": 0}
    assert ask(loop, "/healthz").body == b"ok\n"
    for answer in (*files, ask(loop, "/nothing")):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_head_has_no_body(loop: Loop) -> None:
    with loop.connect() as connection:
        connection.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with connection.makefile("rb") as stream:
            head, _, body = stream.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert f"Content-Length: {len(ask(loop).body)}\r\n".encode() in head
    assert body == b""


@pytest.mark.parametrize("path", ["/nothing", "/../etc/passwd", "/%2e%2e/", "/status.json/"])
def test_other_paths_are_not_found(loop: Loop, path: str) -> None:
    assert ask(loop, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "<b>"])
def test_nothing_can_be_changed(loop: Loop, method: str) -> None:
    answer = ask(loop, "/status.json", method)
    assert answer.status == 501
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:8080", "10.0.0.1"])
def test_answers_to_this_machine_s_names(loop: Loop, host: str) -> None:
    assert ask(loop, "/healthz", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "", "[", "127.0.0.1.evil", "a@b"]
)
def test_other_names_are_refused(loop: Loop, host: str) -> None:
    for path in ("/", "/status.json", "/healthz"):
        assert ask(loop, path, Host=host).status == 421


def test_the_page_may_only_ask_its_own_origin(loop: Loop) -> None:
    policy = ask(loop).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    files = [ask(loop, path).body.decode() for path in ("/", "/page.css", "/page.js")]
    assert re.findall(r"<link[^>]+href=\"(?!data:)([^\"]*)|\ssrc=\"([^\"]*)", files[0]) == [
        ("page.css", ""),
        ("", "page.js"),
    ]
    for text in files:
        assert re.findall(r"https?://|@import|url\(|innerHTML =|<style|<script>", text) == []


def test_an_oversized_request_is_refused(loop: Loop) -> None:
    for start in (b"GET /", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "):
        with loop.connect() as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(start + (1 << 22) * b"a")
            assert first_line(connection) == b""
    assert ask(loop).status == 200


@pytest.mark.parametrize("start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_slow_reader_is_disconnected(loop: Loop, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(http_server, "LIMIT_SECONDS", 0.5)
    begin = time.monotonic()
    with loop.connect() as connection:
        connection.sendall(start)
        connection.settimeout(0.05)
        while time.monotonic() < begin + DEADLINE_SECONDS:
            try:
                connection.sendall(b"a")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
    assert 0.4 < time.monotonic() - begin < SOON_SECONDS


def test_idle_connections_do_not_block_others(loop: Loop) -> None:
    before = threading.active_count()
    idle = [loop.connect() for _ in range(3 * http_server.MAX_CONNECTIONS)]
    try:
        begin = time.monotonic()
        assert ask(loop, "/status.json").status == 200
        assert time.monotonic() - begin < http_server.LIMIT_SECONDS
        assert threading.active_count() <= before + http_server.MAX_CONNECTIONS + 1
    finally:
        for connection in idle:
            connection.close()


def test_many_readers_cost_the_loop_a_few_answers_a_second(loop: Loop) -> None:
    before, begin = loop.asked, time.monotonic()
    for _ in range(100):
        assert ask(loop, "/status.json").status == 200
    assert 0 <= loop.asked - before <= 2 + (time.monotonic() - begin) / FRESH_SECONDS


def test_a_loop_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "TIMEOUT_SECONDS", 0.1)
    with Loop(StatusConfig()) as loop:
        loop.stopped = True
        assert [ask(loop, path).status for path in ("/status.json", "/healthz", "/")] == [503, 503, 200]
        monkeypatch.undo()
        loop.stopped = False
        assert ask(loop, "/healthz").status == 200


def test_many_readers_learn_together_that_the_loop_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, the last would wait until its connection is cut."""
    monkeypatch.setattr(page, "TIMEOUT_SECONDS", 1.0)
    readers = 8
    with Loop(StatusConfig()) as loop, ThreadPoolExecutor(readers) as pool:
        loop.stopped = True
        begin = time.monotonic()
        answers = [*pool.map(ask, readers * [loop], readers * ["/healthz"])]
        assert 1.0 < time.monotonic() - begin < 0.75 * readers
        assert [answer.status for answer in answers] == readers * [503]


def test_the_loop_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With readers that ask and never read, and without readers."""
    monkeypatch.setattr(page, "TIMEOUT_SECONDS", 20.0)
    shown = status()
    with Loop(StatusConfig()) as loop:
        loop.stopped = True
        for _ in range(8):
            with loop.connect() as connection:
                connection.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        begin = time.monotonic()
        for _ in range(1000):
            if loop.page.has_question:
                loop.page.answer(shown)
        assert time.monotonic() - begin < page.TIMEOUT_SECONDS


def test_closing_ends_connections_and_frees_the_port() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        with Loop(StatusConfig(port=port)) as loop, loop.connect() as connection:
            assert ask(loop, "/healthz").status == 200
            begin = time.monotonic()
            loop.page.close()
            loop.page.close()
            assert connection.recv(1) == b""
            assert time.monotonic() - begin < SOON_SECONDS
        again = page.Page(StatusConfig(port=port))
        assert again.address == f"127.0.0.1:{port}"
        again.close()


def test_a_large_cluster_is_served(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    load = {f"{n:064}": 1.0 for n in range(32)}
    node = NodeStatus("worker", 0, 200 * "h", 1, "", "", 1, "present", 0, 0.0, load)
    large = Status("job", "running", 1, 10.0, {}, 4096 * (node,))
    monkeypatch.setattr(loop, "_look", lambda: large)
    assert len(json.loads(ask(loop, "/status.json").body)["nodes"]) == 4096


def test_off() -> None:
    off = page.Page(StatusConfig(port=-1))
    assert off.address == ""
    assert not off.has_question
    off.close()


def test_elsewhere_than_on_loopback_any_name_is_answered() -> None:
    with Loop(StatusConfig(host="0.0.0.0")) as loop:
        assert ask(loop, "/healthz", Host="scheduler.cluster").status == 200


def test_ipv6() -> None:
    with Loop(StatusConfig(host="::1")) as loop:
        assert loop.page.address.startswith("[::1]:")
        assert ask(loop, "/healthz").status == 200


def test_a_taken_port_and_a_strange_address_are_refused(loop: Loop) -> None:
    port = int(loop.page.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"^status\.port = {port}: expected a free port"):
        page.Page(StatusConfig(port=port))
    with pytest.raises(
        ConfigError, match=r"^status\.host = '192\.0\.2\.1': expected an address of this machine"
    ):
        page.Page(StatusConfig(host="192.0.2.1"))
