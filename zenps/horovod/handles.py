"""Handles of asynchronous calls: their results, whether these are there, and the names of their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from zenps.errors import UsageError, ZenPSError
from zenps.worker.core.pending import Pending

from .reduction import Reduction
from .turns import TURNS, Call


class Handle:
    """The result of an asynchronous call, for :func:`synchronize`. Calling it does the same.

    Args:
        call: takes its turn here.
        names: of its tensors.
        collect: returns the result, once the turn is settled.
        parts: what has been pushed already.
    """

    def __init__(
        self, call: Call, names: list[str], collect: Callable[[], Any], parts: Sequence[Reduction] = ()
    ) -> None:
        self._call = call
        self._collect: Callable[[], Any] | None = collect
        self._parts = parts
        self._result: Any = None
        _last_calls.update(dict.fromkeys(names, call))
        for one, part in zip(names, parts, strict=False):
            _last_pushes[one], _calls[part.pending] = part.pending, call
        TURNS.take(call)

    def done(self) -> bool:
        """Returns whether the result is there, in place if it belongs there, or an error for :meth:`wait`."""
        if not TURNS.is_settled(self._call):
            return False
        if self._call.error is None and not all(part.done() for part in self._parts):
            return False
        with contextlib.suppress(ZenPSError):
            self.wait()
        return True

    def wait(self) -> Any:
        """Returns the result, or raises why there is none. May be called repeatedly."""
        if self._collect is not None:
            TURNS.settle(self._call)
            with torch.no_grad():
                self._result = self._collect()
            self._collect = None
        return self._result

    __call__ = wait


def poll(handle: Handle) -> bool:
    """Returns whether :func:`synchronize` need not wait any more; then a result in place is written.

    This may wait itself. Once all ranks have made the call, it begins allgathers, broadcasts, and allreduces
    by Min, Max and Product, and waits for ranks that neither wait for the result nor poll it.
    """
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Waits for the result of an asynchronous call: a tensor, or the list of a grouped call.

    Raises:
        MismatchError: ranks have tensors that do not fit one another.
        UsageError: a rank has called ``join()``, which does not take part in this call.
        DeadlineError, PeerLostError: as :func:`zenps.push_pull`.
    """
    return handle.wait()


_last_calls: Final = WeakValueDictionary[str, Call]()
"""The last call of each name."""

_last_pushes: Final = WeakValueDictionary[str, Pending]()
"""The last round of each name; while it is in flight, the world keeps it."""

_calls: Final = WeakKeyDictionary[Pending, Call]()
"""The call of each round. It lives as long as the round, whatever becomes of its handle."""


def names_of(kind: str, name: str | None, count: int, is_group: bool) -> list[str]:
    """Returns the names of a new call's tensors on the wire.

    Raises:
        UsageError: another call has one of them, and this rank has not waited for a result since. It does not
            matter whether the round has ended meanwhile, so the error does not depend on timing.
    """
    if name is None:
        names = [f"horovod/{kind}/noname/{TURNS.number_unnamed(kind)}" for _ in range(count)]
    elif is_group:
        names = [f"horovod/{kind}/{name}.{number}" for number in range(count)]
    else:
        names = [f"horovod/{kind}/{name}"]
    for one in names:
        if (before := _last_calls.get(one)) is not None and not before.is_settled:
            raise UsageError(f"{one!r} is in flight; wait for its result before using the name again")
    for one in names:
        # Unless the call has failed, all ranks have pushed it, and may have its result already.
        if (pushed := _last_pushes.get(one)) is not None and _calls[pushed].error is None:
            with contextlib.suppress(ZenPSError):
                pushed.wait()
    return names


def delivered(results: list[Tensor], outputs: Sequence[Tensor] | None, is_group: bool) -> Any:
    """Returns the results of a call, written to ``outputs`` if it is in place."""
    if outputs is not None:
        results = [output.copy_(result) for output, result in zip(outputs, results, strict=True)]
    return results if is_group else results[0]
