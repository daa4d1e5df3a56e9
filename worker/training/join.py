"""Join: ranks whose inputs have ended take part in the steps of the others until all have ended.

Like ``torch.distributed.algorithms.Join``. Before each step of an optimizer, the ranks tell each other in a
small round which optimizer steps, or that their input has ended. A rank whose input has ended takes part in
the same step without gradients. In the end it gets the parameters and the optimizer's state of a rank that
has taken all steps, because those ranks may have clipped gradients, left out steps or changed the learning
rate.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from zenps.errors import MismatchError, UsageError, listing

from ..collectives.allgather import begin_allgather_int
from ..collectives.broadcast import from_first_present
from ..process import PROCESS
from .gradients.consistency import Announce
from .optimizer import DistributedOptimizer

ENDED: Final = 1
"""What a rank says whose input has ended. A rank that has left the job says 0."""

DROPS: Final = 1
PUSHES_AGAIN: Final = 2
STEPS: Final = 4
"""What a rank says that ends a step: this times the optimizer's number, from 1, plus what holds of both."""

_NAME: Final = "join"
"""Of the rounds of every block. A worker that joins a running job has not counted the blocks before."""


@contextlib.contextmanager
def join(*optimizers: DistributedOptimizer) -> Iterator[None]:
    """Context for a loop over an input that is longer on some ranks than on others::

        with zps.join(optimizer):
            for batch in loader:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    A rank whose loop has ended waits at the end of the block until all loops have ended, and contributes
    nothing. Averages are still divided by the number of all ranks, as by default under torch's ``Join``. Then
    it gets the parameters and the optimizers' state of a rank that has taken all steps, so that these are
    equal on all ranks. Buffers and learning rate schedulers are each rank's own. Gradients that were computed
    and not applied are dropped, except for those that backward has pushed already: they are part of the
    others' next step. Each step costs one more small round. If an exception ends the block, this returns at
    once.

    A ``GradScaler`` is also each rank's own. If the loops had different lengths, its scale may differ between
    ranks. Make it equal after the block, on all ranks::

        scaler.load_state_dict(zps.broadcast_object(scaler.state_dict()))

    In the block, only optimizer steps may wait for other ranks: other calls of ZenPS, such as
    :func:`zenps.allreduce`, and the unfreezing of parameters would wait for ranks that have left it.

    Args:
        optimizers: all that step in the block, in the same order on all ranks.

    Raises:
        UsageError: no optimizer is given, one is not a DistributedOptimizer or is in another ``join``
            already, or ``sync.consistency = ds-sync`` averages models.
        MismatchError: ranks step different optimizers at the same time.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            got = type(optimizer).__name__
            if isinstance(optimizer, Iterable):
                got += "; pass them one by one, as in join(*optimizers)"
            raise UsageError(f"join: expected DistributedOptimizers, got {got}")
    if not optimizers:
        raise UsageError("join: expected the optimizers that step in this block, got none")
    if PROCESS.world.averages_models:
        raise UsageError(
            "join: expected gradients to be averaged, got sync.consistency = ds-sync, which averages models; "
            "use bsp"
        )
    rounds = _Rounds(optimizers)
    with contextlib.ExitStack() as stack:
        for number, optimizer in enumerate(optimizers):
            stack.enter_context(optimizer.announcing(rounds.announcer(number)))
        yield
    while (step := rounds.next()) is not None:
        optimizer, is_dropped, pushes_again = step
        optimizer.step_for_others(is_dropped=is_dropped, pushes_again=pushes_again)
    for number, optimizer in enumerate(optimizers):
        optimizer.drop_leftovers(f"{_NAME}/{number}")
        if rounds.was_uneven:
            from_first_present(rounds.last, functools.partial(optimizer.adopt, name=f"{_NAME}/{number}"))


class _Rounds:
    """The rounds in which ranks say what they do next.

    Attributes:
        last: the ranks whose input has ended last.
        was_uneven: whether the input of a rank has ended while others took steps.
    """

    def __init__(self, optimizers: Sequence[DistributedOptimizer]) -> None:
        self._optimizers = optimizers
        self.last: Iterable[int] = ()
        self.was_uneven = False

    def announcer(self, number: int) -> Announce:
        """Returns a function that tells the others what this rank does with an optimizer."""

        def announce(is_dropped: bool, pushes_again: bool) -> Callable[[], bool]:
            agreed = self._tell(STEPS * (1 + number) + DROPS * is_dropped + PUSHES_AGAIN * pushes_again)
            return lambda: bool(agreed() & PUSHES_AGAIN)

        return announce

    def next(self) -> tuple[DistributedOptimizer, bool, bool] | None:
        """Tells the others that this rank's input has ended.

        Returns:
            the optimizer that they step, whether ``zero_grad()`` throws the step away, and whether any of
            them pushes gradients again; None if their input has ended, too.
        """
        if (said := self._tell(ENDED)()) == ENDED:
            return None
        return self._optimizers[said // STEPS - 1], bool(said & DROPS), bool(said & PUSHES_AGAIN)

    def _tell(self, said: int) -> Callable[[], int]:
        """Begins a round; returns a function that waits for it, and returns which step ranks take."""
        gather = begin_allgather_int(said, f"{_NAME}/next")
        return lambda: self._agreed(gather())

    def _agreed(self, by_rank: dict[int, int]) -> int:
        # What ranks say is the same on all; the workers that they know of may differ in an elastic job.
        steps = {rank: each for rank, each in by_rank.items() if each != ENDED}
        if steps:
            self.last = steps.keys()
            self.was_uneven |= len(steps) < len(by_rank)
        if len({each & ~PUSHES_AGAIN for each in steps.values()}) > 1:
            ranks = [
                f"rank {rank} {'drops' if each & DROPS else 'takes'} a step of optimizer {each // STEPS - 1}"
                for rank, each in steps.items()
            ]
            raise MismatchError(f"join: expected the same step on all ranks, but {listing(ranks)}")
        return functools.reduce(operator.or_, steps.values()) if steps else ENDED
