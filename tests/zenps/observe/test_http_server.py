"""The server of metrics and status page, in a process of its own, beside readers that take what they can."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from zenps.observe import http_server
from zenps.observe.http_server import MAX_THREADS
from zenps.observe.metrics import serve

DEADLINE_SECONDS = 30.0
SOON_SECONDS = 5.0
"""Half the limit of a connection: nobody waits until the others have run into theirs."""

# As an attacker's: more than the 1024 descriptors that a process has by default.
CONNECTIONS = 1100
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"

SERVE = """
import sys
from prometheus_client import CollectorRegistry
from zenps.observe.metrics import SchedulerMetrics, serve
registry = CollectorRegistry()
SchedulerMetrics(registry)
print(serve(registry, "127.0.0.1", 0).address, flush=True)
sys.stdin.read()
"""


class Served(NamedTuple):
    address: str
    pid: int

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        connection = socket.create_connection((host, int(port)), DEADLINE_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        return connection

    def count_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def scrape(self) -> float:
        """Returns how long a scrape takes."""
        begin = time.monotonic()
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=DEADLINE_SECONDS) as response:
            assert b"zenps_job_state" in response.read()
        return time.monotonic() - begin


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield Served(process.stdout.readline().strip(), process.pid)
            process.stdin.close()
            assert process.wait(DEADLINE_SECONDS) == 0
        finally:
            process.kill()


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} descriptors, and the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def be_idle(connection: socket.socket) -> None:
    """Sends nothing."""


def send_slowly(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed
        connection.sendall(b"a")


def ask_and_not_read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(REQUEST + b"\r\n")


@pytest.mark.usefixtures("_many_descriptors")
@pytest.mark.parametrize("behave", [be_idle, send_slowly, ask_and_not_read])
def test_no_number_of_connections_keeps_others_out(
    served: Served, behave: Callable[[socket.socket], None]
) -> None:
    before = served.count_descriptors()
    with contextlib.ExitStack() as opened:
        connections = []
        for number in range(1, CONNECTIONS + 1):
            connections.append(opened.enter_context(served.connect()))
            behave(connections[-1])
            if number % 100 == 0:
                assert served.count_descriptors() <= before + MAX_THREADS + 1
        for _ in range(3):
            for connection in connections:
                behave(connection)
            assert served.scrape() < SOON_SECONDS
            assert served.count_descriptors() <= before + MAX_THREADS + 1
    assert served.scrape() < SOON_SECONDS


EXHAUST = """
import contextlib, os, resource, socket, time
from prometheus_client import CollectorRegistry
from zenps.observe.metrics import SchedulerMetrics, serve
registry = CollectorRegistry()
SchedulerMetrics(registry)
host, _, port = serve(registry, "127.0.0.1", 0).address.rpartition(":")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
client = socket.socket()
client.settimeout(30)
opened = []
with contextlib.suppress(OSError):
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
client.connect((host, int(port)))
begin = time.process_time()
time.sleep(1)
print(time.process_time() - begin)
for descriptor in opened:
    os.close(descriptor)
client.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
print(client.recv(15))
"""


def test_it_waits_idly_for_a_free_descriptor() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXHAUST], capture_output=True, text=True, timeout=200, check=False
    )
    busy_seconds, answer = done.stdout.splitlines()
    assert float(busy_seconds) < 0.3
    assert answer == "b'HTTP/1.0 200 OK'", done.stderr


def test_closing_does_not_wait_for_the_next_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every role would end that much later."""
    monkeypatch.setattr(http_server, "POLL_SECONDS", 600.0)
    endpoint = serve(CollectorRegistry(), "127.0.0.1", 0)
    time.sleep(0.1)  # the thread polls by now
    begin = time.monotonic()
    endpoint.close()
    assert time.monotonic() - begin < SOON_SECONDS
