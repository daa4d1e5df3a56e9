"""Finalizers: callbacks for dropped objects, run later, at a point where their exceptions are not lost.

Python drops an exception that is raised while a finalizer runs ("Exception ignored in …"). A signal handler
may also run there, so a Ctrl-C at that moment would be lost. A script may drop a result anywhere. So dropping
an object runs no Python code here: it only queues the finalizer. Queued finalizers run when memory is needed
next.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable


class _End(weakref.ref[object]):
    """A weak reference to an object, with the function to call once the object is gone."""

    __slots__ = ("args", "function")

    function: Callable[..., object]
    args: tuple[object, ...]


# This keeps the weak references alive: one that is itself dropped would call nothing.
_awaited: dict[int, _End] = {}
_ended: deque[_End] = deque()


def call_after(dropped: object, function: Callable[..., object], *args: object) -> None:
    """Lets :func:`run_finalizers` call ``function(*args)`` once the last reference to ``dropped`` is gone.

    Finalizers of objects that are alive at the interpreter's exit do not run.
    """
    end = _End(dropped, _ended.append)
    end.function, end.args = function, args
    _awaited[id(end)] = end


def run_finalizers() -> None:
    """Runs the finalizers of all objects dropped so far, on this thread. Any thread may call it."""
    while _ended:
        try:
            end = _ended.popleft()
        except IndexError:  # another thread has popped the last one
            return
        if _awaited.pop(id(end), None) is not None:
            end.function(*end.args)
        del end  # dropping its arguments may queue the next finalizer


def release_finalizers() -> None:
    """Hands the finalizers of objects that are still alive to Python, which runs them when these are dropped.
    Call it when nobody will call :func:`run_finalizers` for long: memory and descriptors would be kept until
    then.
    """
    run_finalizers()
    for key, end in list(_awaited.items()):
        if (living := end()) is not None and _awaited.pop(key, None) is not None:
            weakref.finalize(living, end.function, *end.args).atexit = False
