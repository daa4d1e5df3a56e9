"""Parameter-server backend: tensors are pushed to servers, which sum them, and pulled."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zenps.schemes.base import Scheme

from ..core.pending import Pending, Waiting
from ..core.request import Options, Request
from ..core.statistics import Counted
from ..core.steps import Steps
from ..encode.planner import Planner
from ..encode.sharder import Sharder
from ..transport.submit_queue import SubmitQueue
from .base import Backend, Session

CONTROL = Options(purpose="control")


class ServerBackend(Backend):
    """Encodes and pushes on the calling thread; libzmq's own moves the bytes.

    What lies on a GPU is pushed later, when the GPU has got so far and this worker is called again.

    Args:
        session: this worker's part in the cluster.
        scheme: of tensors that go over servers.
        sharder: distributes them.
        steps: of each tensor.
    """

    def __init__(self, session: Session, scheme: Scheme, sharder: Sharder, steps: Steps) -> None:
        self.partition = scheme.wire.partition or session.config.sync.partition
        self._session = session
        self._steps = steps
        self._planner = Planner(session.config, scheme, sharder)
        self._queue = SubmitQueue(session.channel, steps, session.spans)
        self._waiting = Waiting(self._queue, session.timeout_seconds, session.statistics, session.spans)

    def begin(self, request: Request) -> Pending:
        return self.push(request, "round")

    def close(self) -> None:
        """The session's channel is closed by its lease."""

    def push(self, request: Request, counted: Counted) -> Pending:
        """As :meth:`begin`.

        Args:
            counted: what of the round goes into statistics.
        """
        name, options = request.name, request.options
        progress = self._steps.begin(name, self._planner.count_names(request))
        try:
            transforms = self._planner.transforms(request.tensor)
            for transform in transforms:
                request = request._replace(tensor=transform.apply(request.tensor))
            with self._session.spans("compact", name, progress.step) as span:
                transfer = self._planner.begin(request, progress.expected_rows)
                if span:
                    span.note(rows=transfer.rows_given)
        except BaseException:  # Ctrl-C too: a name in flight for ever could not be pushed again
            self._steps.take_back(name)
            raise
        pending = Pending(name, options, transfer, progress, self._waiting, transforms, counted)
        self._queue.submit(pending)
        return pending

    def negotiate(self, table: Tensor, name: str) -> Pending:
        """Sums a small dense tensor by which ranks tell one another something. It is not counted."""
        return self.push(Request(table, name, CONTROL), "nothing")

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        """Polls until ``ready()`` or the monotonic time ``until``."""
        self._session.channel.wait(ready, until)

    def flush(self, until: float) -> None:
        """Waits until all tensors on a GPU are pushed, at most until the monotonic time ``until``."""
        self._queue.advance(until)
