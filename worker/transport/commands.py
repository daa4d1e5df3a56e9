"""Commands to the channel: what other threads leave for the one that has its lock."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from msgspec import Struct

from zenps.errors import ZenPSError
from zenps.wire.scheduler_messages import View

from ..core.pending import Pending
from ..rounds.states import Round


class Submit(Struct, frozen=True):
    """Push a tensor."""

    pending: Pending
    rounds: Sequence[Round]


class GiveUpAhead(NamedTuple):
    """Tell servers that this rank will not push a round."""

    tensor: str
    step: int


class Departed(NamedTuple):
    """A server is gone."""

    server: int


class Watermark(NamedTuple):
    """The scheduler has begun a watermark."""

    number: int


class Close:
    """The last command."""


Command = Submit | GiveUpAhead | View | Watermark | Departed | Future[None] | ZenPSError | Close
