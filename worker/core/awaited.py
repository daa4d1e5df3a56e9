"""A result that a thread of our own brings, and any thread may wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from zenps.errors import DeadlineError, ZenPSError

from .communicator import Pending
from .spans import Spans


class Awaited(Pending):
    """A tensor in flight.

    Args:
        name: of the tensor.
        timeout_seconds: a last resort: other deadlines come first.
        record: is called once with the seconds that the caller waited, if there is a result.
        spans: for a timeline.
    """

    def __init__(
        self, name: str, timeout_seconds: float, record: Callable[[float], None], spans: Spans
    ) -> None:
        self.name = name
        self._timeout_seconds = timeout_seconds
        self._record: Callable[[float], None] | None = record
        self._spans = spans
        self._has_ended = threading.Event()
        self._finishing = threading.Lock()
        self._outcome: Tensor | ZenPSError | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, done={self.done()})"

    def done(self) -> bool:
        return self._has_ended.is_set()

    def wait(self) -> Tensor:
        with self._finishing:
            if self._record is not None:
                self._await()
        outcome = self._outcome
        assert outcome is not None
        if isinstance(outcome, ZenPSError):
            raise outcome
        return outcome

    def end(self, outcome: Tensor | ZenPSError) -> None:
        """For who brings it: it is over. Once it is, nothing changes its outcome."""
        if self._outcome is None:
            self._outcome = outcome
            self._has_ended.set()

    def _await(self) -> None:
        assert self._record is not None
        begin = time.perf_counter()
        with self._spans("wait", self.name):
            if not self._has_ended.wait(min(self._timeout_seconds, threading.TIMEOUT_MAX)):
                self.end(DeadlineError(f"tensor {self.name!r}: no sum within {self._timeout_seconds:g} s"))
        if isinstance(self._outcome, Tensor):
            self._record(time.perf_counter() - begin)
        self._record = None
