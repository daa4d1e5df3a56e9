"""What a hypervisor took from this machine: processor time that was wanted here, and given to others."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

STAT: Final = Path("/proc/stat")


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
