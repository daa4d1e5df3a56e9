"""A test that failed while the hypervisor gave this machine's processors to others runs again.

Leases run out, and ends come late, where processes that could run may not: such a failure says nothing of the
code. Any other failure stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
    for item in items if config.pluginmanager.hasplugin("rerunfailures") else ():
        item.add_marker(pytest.mark.flaky(reruns=RERUNS, condition=_much_was_stolen))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global _began
    _began = now()
