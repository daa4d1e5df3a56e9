"""Submit queue: tensors on the CPU are pushed at once, those on a device once it has prepared them."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from zenps.observe.clock import now_ns

from ..core.interrupts import MASK, MaskedLock
from ..core.pending import Pending
from ..core.request import device_error
from ..core.spans import Spans
from ..core.steps import Steps
from ..core.waiting import Ready, Waiter
from ..encode.accelerator import QUERY_SECONDS
from .channel import Channel

POLL_SECONDS = 0.05
"""How long answers of servers may wait for a thread that waits for a device."""


class _Staged(NamedTuple):
    pending: Pending
    begun_ns: int


class SubmitQueue(Waiter):
    """Tensors on a device in order of submission, because a device works in order.

    No thread watches the device: each call into ZenPS pushes the tensors that have become ready, and a thread
    that waits for a result pushes all tensors first. Every method may be called from any thread.

    Args:
        channel: to the servers.
        steps: step counters; a name is free again when its device fails.
        spans: for a timeline.
    """

    def __init__(self, channel: Channel, steps: Steps, spans: Spans) -> None:
        self._channel = channel
        self._steps = steps
        self._spans = spans
        self._staged: deque[_Staged] = deque()
        self._lock = MaskedLock()
        """Held by who takes from the front."""

    def submit(self, pending: Pending) -> None:
        """Pushes a tensor once it is prepared.

        A tensor that is already prepared overtakes the queue; tensors on the CPU always are.
        """
        # First, because Ctrl-C may interrupt the wait for the lock. Then the caller takes the tensor's step
        # back, for which nothing may have been pushed.
        if self._staged:
            self.advance(until=0.0)
        if not pending.is_staged:
            self._channel.submit(pending)
        elif not self._submit_if_prepared(staged := _Staged(pending, now_ns())):
            self._staged.append(staged)

    def advance(self, until: float, ready: Ready = lambda: False) -> None:
        """Pushes prepared tensors; waits for the others until ``ready()``, or the monotonic time ``until``.

        Once the job is lost, tensors that wait fail: their device may never end its work.
        """
        while self._staged:
            with self._lock:
                while self._staged and self._submit_if_prepared(self._staged[0]):
                    self._staged.popleft()
            if not self._staged or ready() or time.monotonic() >= until:
                return
            with MASK.lifted:
                time.sleep(QUERY_SECONDS)

    def wait(self, ready: Ready, until: float) -> None:
        # Push everything before waiting: other ranks wait for these tensors.
        if self._staged:
            self.advance(until=0.0)
        while self._staged and not ready() and (now := time.monotonic()) < until:
            self.advance(min(until, now + POLL_SECONDS), ready)
            if self._staged:
                self._channel.poll(ready)
        self._channel.wait(ready, until)

    def poll(self, ready: Ready) -> None:
        self.advance(until=0.0)
        self._channel.poll(ready)

    def _submit_if_prepared(self, staged: _Staged) -> bool:
        """Pushes the tensor if it is prepared. Returns whether it was pushed or has failed."""
        pending, begun_ns = staged
        try:
            if self._channel.failure is not None:
                raise self._channel.failure
            if not pending.transfer.prepared():
                return False
            self._spans.trace.since(begun_ns, "stage", tensor=pending.name, step=pending.progress.step)
            self._channel.submit(pending)
        except Exception as error:  # noqa: BLE001  # this thread may push, or wait for, another tensor
            self._steps.take_back(pending.name, pending.progress)
            pending.fail(device_error(f"tensor {pending.name!r}", error))
        return True
