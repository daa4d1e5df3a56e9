"""Finalizers: their calls follow the end of an object, once, and no signal is lost at it."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from types import FrameType

import pytest

from zenps.finalizers import call_after, release_finalizers, run_finalizers


class Dropped:
    """Something that is not hashable, as an array is not."""

    __hash__ = None  # type: ignore[assignment]


def test_a_call_follows_the_end_once() -> None:
    calls: list[str] = []
    first, second = Dropped(), Dropped()
    call_after(first, calls.append, "first")
    call_after(first, calls.append, "first again")
    call_after(second, calls.append, "second")
    run_finalizers()
    assert calls == []
    del first
    assert calls == [], "not where it is dropped"
    run_finalizers()
    run_finalizers()
    assert sorted(calls) == ["first", "first again"]
    del second
    run_finalizers()
    assert calls[2:] == ["second"]


def test_a_cycle_ends_with_a_collection() -> None:
    calls: list[object] = []
    cycle = Dropped()
    cycle.__dict__["itself"] = cycle
    call_after(cycle, calls.append, 1)
    del cycle
    gc.collect()
    run_finalizers()
    assert calls == [1]


def test_what_a_call_drops_has_its_own_call_at_once() -> None:
    calls: list[object] = []
    holder = [Dropped()]
    call_after(holder[0], calls.append, "inner")
    outer = Dropped()
    call_after(outer, holder.clear)
    del outer
    run_finalizers()
    assert calls == ["inner"]


def test_arguments_end_with_their_call() -> None:
    calls: list[object] = []
    argument, outer = Dropped(), Dropped()
    call_after(argument, calls.append, "argument")
    call_after(outer, id, argument)
    del argument, outer
    run_finalizers()
    assert calls == ["argument"]


def test_what_is_released_is_called_where_it_is_dropped() -> None:
    calls: list[object] = []
    first, second = Dropped(), Dropped()
    call_after(first, calls.append, "first")
    call_after(second, calls.append, "second")
    del first
    release_finalizers()
    assert calls == ["first"]
    del second
    assert calls == ["first", "second"]
    run_finalizers()
    assert calls == ["first", "second"]


def test_threads_share_the_calls() -> None:
    calls: list[int] = []

    def drop(begin: int) -> None:
        for number in range(begin, begin + 1000):
            call_after(Dropped(), calls.append, number)
            run_finalizers()

    threads = [threading.Thread(target=drop, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == list(range(4000))


def test_ctrl_c_is_not_lost_where_an_object_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def at_calls(_frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            signal.raise_signal(signal.SIGINT)

    dropped = Dropped()
    call_after(dropped, len, "")
    sys.setprofile(at_calls)
    try:
        del dropped  # runs no Python code, so that no call is seen
    finally:
        sys.setprofile(None)
    assert not lost
    run_finalizers()
