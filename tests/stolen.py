"""A test that failed while the hypervisor gave this machine's processors to others runs again.

Leases run out, and ends come late, where processes that could run may not: such a failure says nothing of the
code. Any other failure stands.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

import pytest

from benchmarks.processors import now

MUCH: Final = 0.25
"""Of the processor time that was wanted. A machine that nobody else needs has below 0.02."""

RERUNS: Final = 2

_began = now()


def _much_was_stolen() -> bool:
    return now().stolen_since(_began) > MUCH


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    # `make test-gpu` runs in environments that may lack the plug-in.
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=RERUNS, condition=_much_was_stolen))
    # A process of xdist sends two short messages for each test. With Nagle's algorithm the second may wait
    # 40 ms for the acknowledgement of the first.
    if hasattr(config, "workerinput"):
        database: Any = vars(config)["failures_db"]
        database.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global _began
    _began = now()
