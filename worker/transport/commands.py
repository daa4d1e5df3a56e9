"""Commands of the channel: requests of any thread to the thread that has the combining lock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from msgspec import Struct

from zenps.errors import ZenPSError
from zenps.wire.scheduler_messages import View

from ..core.pending import Pending
from ..rounds.states import Round

logger = logging.getLogger("zenps.worker")


class Submit(Struct, frozen=True):
    """Begins the rounds of a tensor."""

    pending: Pending
    rounds: Sequence[Round]


class GiveUpAhead(NamedTuple):
    """Tells servers that this rank will not push a round."""

    tensor: str
    step: int


class Departed(NamedTuple):
    """The scheduler has reported a server as gone."""

    server: int


class Watermark(NamedTuple):
    """The scheduler has begun a watermark."""

    number: int


class Tick(NamedTuple):
    """Time has passed."""

    now: float


class Close:
    """The last command."""


Command = Submit | GiveUpAhead | View | Watermark | Departed | Future[None] | ZenPSError | Tick | Close


def event_error(error: Exception) -> ZenPSError:
    """Logs an unexpected error of the channel; returns the error with which all its rounds fail.

    The thread on which it was raised need not wait for any of these rounds: it only had the lock.
    """
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
