"""Join for any operation: a rank whose data has ended takes part in the others' allreduces with zeros.

Each call takes a turn, numbered alike on all ranks. In that turn every rank pushes eight bytes in addition to
its other pushes; they say whether it makes a call or has joined. If no rank has joined, that is all. Else
ranks exchange what they call, and those that have joined push zeros under the same names.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zenps import worker
from zenps.errors import MismatchError, UsageError, ZenPSError, listing
from zenps.worker.core.interrupts import MASK
from zenps.worker.core.pending import LeftError
from zenps.worker.process import PROCESS, Prefix

from .reduction import Reduction, as_zeros

WINDOW: Final = 256
"""How many turns may be unsettled, because each has a name of its own. The next one waits for the oldest."""

UNNAMED: Final = 8192
"""How many unnamed tensors of a kind get different names. Then names repeat, because nodes remember each."""

REDUCES: Final = "allreduce"
STEPS: Final = "optimizer.step"


@dataclass(eq=False)
class Call:
    """One call of an operation.

    Attributes:
        what: the operation and its arguments as plain data, the same on all ranks. Ranks that have joined
            serve it if it begins with :data:`REDUCES` or :data:`STEPS`. At the end of a step's is whether
            this rank pushes gradients again; once it is settled and ranks have joined, whether any does.
        work: runs once all ranks have made this call, and no rank has joined. None if everything is pushed
            already.
        result: what ``work`` has returned.
        error: why the call has failed on this rank.
    """

    what: list[Any]
    work: Callable[[], Any] | None = None
    result: Any = None
    error: Exception | None = None
    is_settled: bool = False

    def settle(self, joined: int) -> None:
        """Runs the work, unless ranks have joined. Errors are kept for whoever waits for the call."""
        self.is_settled = True
        self.error = UsageError(f"{self.what[0]}: an interrupt has ended it; call it again, on all ranks")
        try:
            if joined:
                # An interrupted gather cannot be repeated: then the next barrier takes another turn.
                self.work = None
                self.what = _agreed(self.what)
                _check_served(self.what)
            elif self.work is not None:
                self.result = self.work()
        except Exception as error:  # noqa: BLE001
            self.error = error
        else:
            self.error = None
        self.work = None


class Turns:
    """The calls of this rank, in order. Several threads may make calls that have no work."""

    def __init__(self) -> None:
        # Not one lock: a thread waits for other ranks while it settles, and they may wait for turns that
        # other threads take here.
        self._taking, self._settling = threading.RLock(), threading.RLock()
        self._optimizers: list[tuple[Prefix, weakref.ref[worker.DistributedOptimizer]]] = []
        """They may outlive the job in which they were made."""
        self._unsettled: deque[tuple[worker.Pending, Call | None]] = deque()
        self._barrier: Call | None = None
        """The last barrier; an interrupt may have ended the wait for it."""
        self.reset()

    def reset(self) -> None:
        """Begins anew, as all ranks do when they leave the job. Calls that nobody has waited for fail."""
        self._taken = 0
        for _, call in self._unsettled:
            if call is not None:
                call.is_settled, call.error = True, LeftError()
        self._unsettled.clear()
        self._barrier = None
        self._zeros: dict[str, Reduction] = {}
        self._counts: Counter[str] = Counter()
        """How many unnamed tensors of each kind had names so far."""

    def number_unnamed(self, kind: str) -> int:
        """Returns the next number of an unnamed tensor. Ranks that make the same calls count alike."""
        self._counts[kind] += 1
        return (self._counts[kind] - 1) % UNNAMED

    def add(self, optimizer: worker.DistributedOptimizer) -> Prefix:
        """Returns the name by which ranks call an optimizer; all ranks add theirs in the same order."""
        self._optimizers = [(name, each) for name, each in self._optimizers if each() is not None]
        name = PROCESS.new_prefix("horovod/optimizer")
        self._optimizers.append((name, weakref.ref(optimizer)))
        return name

    def take(self, call: Call | None) -> None:
        """Tells the other ranks that this one makes a call, or has joined if ``call`` is None."""
        has_joined = torch.tensor([int(call is None)], device="cpu")
        while True:
            with MASK, self._taking:  # a turn that other ranks learn of is known here
                if len(self._unsettled) < WINDOW:
                    name = f"horovod/turn/{self._taken % WINDOW}"
                    self._unsettled.append((worker.push_pull_async(has_joined, name, average=False), call))
                    self._taken += 1
                    return
            with self._settling:
                if len(self._unsettled) == WINDOW:
                    self._settle_first()

    def settle(self, call: Call) -> None:
        """Waits until all ranks have made this call, and runs its work.

        Raises:
            UsageError: a rank has joined, and the call is neither an allreduce nor a step.
            MismatchError: a rank has joined, and the others make different calls.
        """
        while not call.is_settled:
            with self._settling:
                if not call.is_settled:  # another thread may have settled it meanwhile
                    self._settle_first()
        if call.error is not None:
            raise call.error

    def is_settled(self, call: Call) -> bool:
        """Settles the calls that all ranks have made; returns whether ``call`` is one of them."""
        if self._settling.acquire(blocking=False):  # else another thread settles them, and may wait for ranks
            try:
                while not call.is_settled and worker.poll(self._unsettled[0][0]):
                    self._settle_first()
            finally:
                self._settling.release()
        return call.is_settled

    def run(self, what: list[Any], work: Callable[[], Any]) -> Any:
        """Waits for a turn, and returns what ``work`` returns in it. Errors are those of :meth:`settle`."""
        call = Call(what, work)
        self.take(call)
        self.settle(call)
        return call.result

    def barrier(self) -> None:
        """Waits until all ranks have called this; continues a barrier that an interrupt has ended.

        Errors are those of :meth:`settle`, and of :func:`zenps.barrier`.
        """
        call = self._barrier
        if call is None or (call.work is None and call.error is not None):
            call = Call(["barrier"], worker.barrier)
            with MASK:
                self.take(call)
                self._barrier = call
        elif call.is_settled:  # the interrupt came when the other ranks had made this call
            call.settle(0)
        self.settle(call)
        self._barrier = None

    def join(self) -> int:
        """Serves the calls of the other ranks until all have joined; returns the rank that joined last.

        Raises:
            MismatchError: the other ranks make different calls at the same time.
        """
        while self._unsettled:
            self._settle_first()
        joined_in = self._taken
        joined = 0
        while joined < worker.size():
            self.take(None)
            joined = self._settle_first()
        for zeros in self._zeros.values():
            zeros.wait()
        self._zeros.clear()
        gathered = worker.allgather_object([joined_in, dict(self._counts)], "horovod/joined_in")
        turns = [joined for joined, _ in gathered]
        for _, counts in gathered:  # a rank that joined early has made fewer calls
            self._counts |= counts
        last = max(range(len(turns)), key=lambda rank: (turns[rank], rank))
        if len(set(turns)) > 1:
            named = {str(name): reference() for name, reference in self._optimizers if name.is_taken}
            for each, optimizer in sorted(named.items()):  # ranks may have made them in another order
                if optimizer is not None:
                    optimizer.adopt(last, each)
        return last

    def _settle_first(self) -> int:
        """Settles the oldest turn; returns how many ranks have joined in it."""
        said, call = self._unsettled[0]
        try:
            joined = int(worker.synchronize(said))  # interrupted, it can be repeated
        except ZenPSError as error:
            self._unsettled.popleft()
            if call is None:
                raise
            call.is_settled, call.error, call.work = True, error, None
            return 0
        with MASK:  # whoever waits for the call again finds it settled
            self._unsettled.popleft()
            if call is not None:
                call.settle(joined)
        if call is None and joined < worker.size():
            self._serve(_agreed(None))
        return joined

    def _serve(self, what: Sequence[Any]) -> None:
        """Takes part in what the other ranks call."""
        for name in [name for name, zeros in self._zeros.items() if zeros.done()]:
            self._zeros.pop(name).wait()
        match what:
            case [kind, list(tensors)] if kind == REDUCES:
                for name, described in tensors:
                    # The round before under this name is over, because the others have begun the next.
                    if name in self._zeros:
                        self._zeros.pop(name).wait()
                    self._zeros[name] = Reduction(as_zeros(described), name, average=described[-1])
            case [kind, str(name), bool(is_dropped), bool(pushes_again)] if kind == STEPS:
                if (optimizer := self._optimizer(name)) is None:
                    raise UsageError(
                        "join(): another rank steps an optimizer that this rank has dropped; keep it"
                    )
                optimizer.step_for_others(is_dropped=is_dropped, pushes_again=pushes_again)

    def _optimizer(self, called: str) -> worker.DistributedOptimizer | None:
        """Returns the optimizer of this name; None if it was dropped.

        An optimizer that was made in an earlier job, and has not stepped in this one, takes its name only
        now. Optimizers that have a name are searched first: a late one might take the name of another.
        """
        for name, reference in sorted(self._optimizers, key=lambda each: not each[0].is_taken):
            optimizer = reference()
            if optimizer is not None and str(name) == called:
                return optimizer
        return None


def _agreed(what: list[Any] | None) -> list[Any]:
    """Returns the call that all ranks make that have not joined.

    Raises:
        MismatchError: they make different calls.
    """
    calls = worker.allgather_object(what, "horovod/call")
    made = {rank: call for rank, call in enumerate(calls) if call is not None}
    first: list[Any] = next(iter(made.values()))
    if first[0] == STEPS:
        first = [*first[:-1], any(call[-1] for call in made.values())]
    if any(_compared(call) != _compared(first) for call in made.values()):
        told = listing((f"rank {rank}: {call!s:.100}" for rank, call in made.items()), separator="; ")
        raise MismatchError(
            f"rank(s) {listing(set(range(len(calls))) - made.keys())} have called join(); expected the "
            f"others to make their calls in the same order, got {told}"
        )
    return first


def _compared(call: Sequence[Any]) -> Sequence[Any]:
    """Returns what must be the same on all ranks."""
    return call[:-1] if call[0] == STEPS else call


def _check_served(what: Sequence[Any]) -> None:
    if what[0] not in (REDUCES, STEPS):
        raise UsageError(
            f"{what[0]}: a rank has called join(), which only takes part in sums, averages and optimizer "
            "steps; call join() on this rank, too, before"
        )


TURNS: Final = Turns()
"""The turns of this process."""
