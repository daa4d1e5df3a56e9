"""push_pull by BytePS's names and argument order, asynchronous and in place."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from zenps.errors import UsageError, ZenPSError
from zenps.horovod.compression import Compression, Compressor
from zenps.horovod.reduction import Reduction, check_in_place
from zenps.horovod.turns import UNNAMED
from zenps.worker.process import PROCESS


class Handle:
    """The result of an asynchronous push_pull, for :func:`synchronize`."""

    def __init__(self, reduction: Reduction, output: Tensor | None) -> None:
        self._reduction = reduction
        self._output = output
        self._result: Tensor | None = None

    def done(self) -> bool:
        """Returns whether the result is there, in place if it belongs there, or an error for :meth:`wait`."""
        if not self._reduction.done():
            return False
        with contextlib.suppress(ZenPSError):
            self.wait()
        return True

    def wait(self) -> Tensor:
        """Returns the result: a new tensor, or the one that is overwritten. May be called repeatedly."""
        if self._result is None:
            result = self._reduction.wait()
            with torch.no_grad():
                self._result = result if self._output is None else self._output.copy_(result)
        return self._result


def push_pull_async(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Handle:
    """Begins to average or sum a tensor over all ranks; the result comes from :func:`synchronize`.

    Args:
        tensor: as :func:`zenps.push_pull` takes it, dense or sparse COO.
        average: divide by the number of ranks; averages of integers are rounded towards zero.
        name: the same on all ranks. Without one, a counter names the tensor.
        version: not needed here.
        priority: as :func:`zenps.push_pull_async` takes it.

    Raises:
        TensorError, UsageError: as :func:`zenps.push_pull_async`.
    """
    return _begin(tensor, average, name, priority, None)


def push_pull_async_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Handle:
    """Begins a push_pull in place: ``tensor`` is overwritten by :func:`synchronize`, or by :func:`poll`.

    Raises:
        TensorError: ``tensor`` is sparse, or as :func:`push_pull_async` raises.
    """
    check_in_place([tensor])
    return _begin(tensor, average, name, priority, tensor)


def push_pull_inplace(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Tensor:
    """Averages or sums in place; returns ``tensor``. Arguments and errors are those of
    :func:`push_pull_async_inplace`."""
    return push_pull_async_inplace(tensor, average, name, version, priority).wait()


def push_pull(
    tensor: Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0,
    compression: type[Compressor] = Compression.none,
) -> Tensor:  # fmt: skip
    """Returns the average or sum of a tensor over all ranks. Autograd reduces gradients in the same way.

    Arguments are those of :func:`push_pull_async`; ``compression`` says how the tensor travels.

    Raises:
        UsageError: no ``name`` is given, or it is in flight.
        MismatchError, DeadlineError, PeerLostError, TensorError: as :func:`zenps.push_pull`.
    """
    if name is None:
        raise UsageError("push_pull: expected a name, the same on all ranks; pass name=…")
    compressed, context = compression.compress(tensor)
    result = _PushPull.apply(compressed, average, name, priority)  # type: ignore[no-untyped-call]
    return compression.decompress(result, context)


def poll(handle: Handle) -> bool:
    """Returns whether :func:`synchronize` would return at once; then a result in place is written."""
    return handle.done()


def synchronize(handle: Handle) -> Tensor:
    """Waits for the result of an asynchronous push_pull. Errors are those of :func:`zenps.push_pull`."""
    return handle.wait()


def declare(name: str) -> int:
    """Does nothing and returns 0: here tensors need not be declared in the same order on all ranks."""
    return 0


def _begin(tensor: Tensor, average: bool, name: str | None, priority: int, output: Tensor | None) -> Handle:
    own = f"noname/{_number_unnamed()}" if name is None else name
    return Handle(Reduction(tensor, f"byteps/{own}", average=average, priority=priority), output)


def _number_unnamed() -> int:
    """Returns the next number of an unnamed tensor, from 0 in each world: some ranks may be new processes."""
    taken = PROCESS.numbers("byteps/noname")
    if len(taken) == UNNAMED:
        taken.clear()
    taken.add(number := len(taken))
    return number


class _PushPull(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, average: bool, name: str, priority: int) -> Tensor:
        ctx.arguments = average, name, priority
        return _begin(tensor, average, name, priority, None).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        # By this function again: gradients of gradients are reduced, too.
        reduced = _PushPull.apply(gradient, *ctx.arguments)  # type: ignore[no-untyped-call]
        return reduced, None, None, None
