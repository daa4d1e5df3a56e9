"""A test that failed while the hypervisor gave this machine's processors to others runs again.

Leases run out, and ends come late, where processes that could run may not: such a failure says nothing of the
code. Any other failure stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

STAT: Final = Path("/proc/stat")

MUCH: Final = 0.25
"""Of the processor time that was wanted. A machine that nobody else needs has below 0.02."""

RERUNS: Final = 2


class ProcessorTime(NamedTuple):
    """Of all processors since the machine started, in ticks."""

    used: int
    stolen: int

    def stolen_since(self, earlier: ProcessorTime) -> float:
        """Of the time that was wanted since then, the share that was not given."""
        stolen = self.stolen - earlier.stolen
        return stolen / max(stolen + self.used - earlier.used, 1)


def parse(stat: str) -> ProcessorTime:
    """From ``/proc/stat``: https://docs.kernel.org/filesystems/proc.html, 1.7."""
    user, nice, system, _idle, _waiting, interrupts, softirqs, stolen = map(int, stat.split()[1:9])
    return ProcessorTime(user + nice + system + interrupts + softirqs, stolen)


def now() -> ProcessorTime:
    """Nothing on a system that does not say."""
    return parse(STAT.read_text()) if STAT.exists() else ProcessorTime(0, 0)


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
