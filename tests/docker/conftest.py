"""A real Docker engine, and the image built on it. ``make test-docker`` runs what is here."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.test_files import default_base_image
from tests.docker.compose import COMPOSE_FILE, GENERATIONS, call, docker

IMAGE = "zenps:cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They take minutes, and nothing but an engine that was asked for may let them run."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if not os.environ.get("ZENPS_TEST_DOCKER"):
                item.add_marker(pytest.mark.skip(reason="make test-docker runs it on a Docker engine"))


@pytest.fixture(scope="session")
def build_environment() -> Iterator[dict[str, str]]:
    """What a build needs here: this machine's network, and pip's settings, a folder of wheels over HTTP."""
    found = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    found["ZENPS_BUILD_NETWORK"] = "host"
    locks = Path(found.get("PIP_FIND_LINKS", "/nowhere"))
    with contextlib.ExitStack() as stack:
        if locks.is_dir():
            found["PIP_FIND_LINKS"] = stack.enter_context(_served(locks))
            if any(locks.glob("torch-*+cpu-*.whl")):
                found["TORCH_INDEX"] = ""
        yield os.environ | found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are no news."""


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=folder)
    try:  # at the same address as the last time, layers come from the cache
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 8099), handler)
    except OSError:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def image(build_environment: dict[str, str]) -> str:
    """The name of the image, built as ``docker compose build`` does."""
    assert docker("version").returncode == 0, "no Docker engine answers"
    assert GENERATIONS, "neither docker compose nor docker-compose is installed"
    command = [*next(iter(GENERATIONS.values())), "-f", str(COMPOSE_FILE), "build", "scheduler"]
    built = call(command, environment=build_environment, seconds=880)
    assert built.returncode == 0, built.stdout[-4000:]
    return IMAGE


@pytest.fixture(scope="session")
def base_image() -> str:
    return os.environ.get("BASE_IMAGE") or default_base_image()


@pytest.fixture(scope="session")
def prometheus(base_image: str) -> str:
    """Where the image of Prometheus cannot be pulled: one of the same name from Debian's package."""
    name = "prom/prometheus:v3.5.0"
    if docker("image", "inspect", name).returncode == 0 or docker("pull", name).returncode == 0:
        return name
    recipe = f"""
        FROM {base_image}
        RUN apt-get update && apt-get install -y --no-install-recommends prometheus
        RUN install -d -o nobody /prometheus
        USER nobody
        ENTRYPOINT ["prometheus"]
        CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
        """
    built = docker("build", "--network", "host", "-t", name, "-", stdin=recipe, seconds=600)
    assert built.returncode == 0, built.stdout
    return name
