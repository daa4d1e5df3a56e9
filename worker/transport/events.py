"""Event thread of a worker: hands the scheduler's events to the channel, and lets the channel receive.

The lease's thread must not do so itself. Whoever takes the combining lock may have to reshard all that is in
flight, resolve a server's name, or wait for a connection, and a worker that sends no heartbeat meanwhile is
lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from .channel import CLOSE_SECONDS, Channel
from .commands import event_error


class EventThread:
    """Runs events one after another, in the order in which they were posted.

    Args:
        channel: an event that raises fails all of its rounds.
        poll_seconds: how often the channel receives what has arrived, if no thread of the caller polls:
            another rank may need a round again.
    """

    def __init__(self, channel: Channel, poll_seconds: float) -> None:
        self._channel = channel
        self._poll_seconds = poll_seconds
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zenps-events", daemon=True)
        self._thread.start()

    def post(self, event: Callable[[], None]) -> None:
        """Runs ``event`` after all that were posted before. Never waits."""
        self._events.put(event)

    def close(self) -> None:
        """Ends the thread after the events that were posted before."""
        self._events.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        next_poll = time.monotonic() + self._poll_seconds
        while True:
            try:
                event = self._events.get(timeout=max(next_poll - time.monotonic(), 0.0))
            except Empty:
                event = self._channel.poll
                next_poll = time.monotonic() + self._poll_seconds
            if event is None:
                return
            try:
                event()
            except Exception as error:  # noqa: BLE001  # its caller is another thread: the rounds pass it on
                self._channel.post(event_error(error))
