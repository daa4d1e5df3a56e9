"""Commands of the channel: requests of any thread to the thread that has the combining lock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from msgspec import Struct

from zenps.errors import ConfigError, ZenPSError
from zenps.wire.scheduler_messages import View

from ..core.pending import Pending
from ..rounds.states import Round

TICK_SECONDS = 0.5

logger = logging.getLogger("zenps.worker")


class Submit(Struct, frozen=True):
    """Begins the rounds of a tensor."""

    pending: Pending
    rounds: Sequence[Round]


class GiveUpAhead(NamedTuple):
    """Tells servers that this rank will not push a round, so that no other rank waits for it."""

    tensor: str
    step: int


class Departed(NamedTuple):
    """The scheduler has reported a server as gone: its connectivity check ends."""

    server: int


class Watermark(NamedTuple):
    """The scheduler has begun a watermark."""

    number: int


class Ticks:
    """Tick clock: when the next tick is due.

    A late tick is skipped, but never two in a row: this process was stopped, or no thread has polled. What
    has come meanwhile is read before a deadline expires.

    Attributes:
        next: when the next tick is due.
    """

    def __init__(self) -> None:
        self.next = 0.0
        self._was_skipped = True  # so that the first tick is not

    def is_due(self, now: float) -> bool:
        """Returns whether a tick is to run at the monotonic time ``now``."""
        if now < self.next:
            return False
        self._was_skipped = not self._was_skipped and now > self.next + TICK_SECONDS
        self.next = now + TICK_SECONDS
        return not self._was_skipped


class Close:
    """Closes the sockets. No other command follows."""


Command = Submit | GiveUpAhead | View | Watermark | Departed | Future[None] | ZenPSError | Close
"""A view is applied: rounds are resharded if the ring has changed. A future is completed after all that came
before it. An error fails all rounds, also those that are submitted later."""


def event_error(error: Exception) -> ZenPSError:
    """Returns the error with which all rounds of the channel fail; logs an unexpected one.

    The thread on which it was raised need not wait for any of these rounds: it only had the lock.
    """
    if isinstance(error, ConfigError):  # the list of keys lacks a new server
        return error
    logger.error("an event of the channel failed", exc_info=error)
    reason = f"an event of the channel failed ({error!r}); this worker's log has more"
    return ZenPSError(f"{reason}: restart the job")


def answer_error(name: str, error: Exception) -> ZenPSError:
    """Returns the error of the tensor ``name`` whose answer could not be processed."""
    if isinstance(error, ZenPSError):
        return error
    logger.error("an answer to tensor %r could not be processed", name, exc_info=error)
    reason = f"an answer could not be processed ({error!r}); push it again, on all ranks"
    failed = ZenPSError(f"tensor {name!r}: {reason}")
    failed.__cause__ = error
    return failed
