"""Stolen processor time: time that this machine wanted, and its hypervisor gave to others."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

STAT: Final = Path("/proc/stat")


class ProcessorTime(NamedTuple):
    """The time of all processors since the machine started, in ticks."""

    used: int
    stolen: int

    def stolen_since(self, earlier: ProcessorTime) -> float:
        """The stolen share of the time that was wanted since then."""
        stolen = self.stolen - earlier.stolen
        return stolen / max(stolen + self.used - earlier.used, 1)


def parse(stat: str) -> ProcessorTime:
    """Parses ``/proc/stat``: https://docs.kernel.org/filesystems/proc.html, 1.7."""
    user, nice, system, _idle, _waiting, interrupts, softirqs, stolen = map(int, stat.split()[1:9])
    return ProcessorTime(user + nice + system + interrupts + softirqs, stolen)


def now() -> ProcessorTime:
    """The present times; zeros on a system without ``/proc/stat``."""
    return parse(STAT.read_text()) if STAT.exists() else ProcessorTime(0, 0)
