from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from zenps.worker.core.interrupts import MASK, Handler, MaskedLock
from zenps.worker.core.waiting import Notifier
from zenps.worker.transport.lock import CombiningLock

pytestmark = pytest.mark.usefixtures("interruptible")


def press() -> None:
    """As Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_mask() -> None:
    done = []

    def work() -> None:
        with MASK:
            press()
            with MASK:
                press()
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_masked_lock_is_free_when_an_interrupt_that_it_held_back_is_raised() -> None:
    lock, done = MaskedLock(), []

    def handle(*_: object) -> None:
        with lock:
            done.append("handler")

    signal.signal(signal.SIGINT, handle)
    with lock:
        press()
        done.append("work")
    assert done == ["work", "handler"]


def test_a_wait_for_a_masked_lock_can_be_interrupted() -> None:
    lock = MaskedLock()
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(30)
    timer = threading.Timer(0.1, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt), lock:
        pytest.fail("another thread holds it")
    may_end.set()
    thread.join(30)
    timer.join(30)
    with lock:
        pass
    press_raises()


def test_an_interrupt_that_was_held_back_is_raised_where_the_mask_is_lifted() -> None:
    def work() -> None:
        with MASK:
            press()
            with MASK.lifted:
                pytest.fail("lifted without the interrupt that was held back")

    with pytest.raises(KeyboardInterrupt):
        work()
    press_raises()


def test_after_an_interrupt_that_was_raised_within_it_a_mask_goes_on() -> None:
    done = []

    def work() -> None:
        with MASK:
            press()
            with pytest.raises(KeyboardInterrupt), MASK.lifted:
                pytest.fail("lifted without the interrupt that was held back")
            press()
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all"]


def test_an_interrupt_where_the_mask_is_lifted_is_raised_there() -> None:
    with MASK:
        with pytest.raises(KeyboardInterrupt), MASK.lifted:
            press()
        press()  # held back again: the test ends this line
        with pytest.raises(KeyboardInterrupt), MASK.lifted:
            pass
    press_raises()


def test_what_waits_in_a_handler_where_the_mask_is_lifted_leaves_it_lifted() -> None:
    with MASK:
        with MASK.lifted:
            with MASK, MASK.lifted:
                pass
            press_raises()
            with MASK.lifted:
                pass
            press_raises()
        press()  # held back again: the test ends this line
        with pytest.raises(KeyboardInterrupt), MASK.lifted:
            pass
    press_raises()


def test_a_mask_in_a_handler_where_another_is_lifted_holds_interrupts_back() -> None:
    done = []

    def work() -> None:
        with MASK:
            press()
            done.append("all")

    with MASK, MASK.lifted, pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all"]
    press_raises()


def test_after_an_interrupt_just_before_a_mask_goes_on_the_next_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with MASK:
        with monkeypatch.context() as patch:
            patch.setattr(type(MASK.lifted), "__exit__", interrupt)
            with pytest.raises(KeyboardInterrupt), MASK, MASK.lifted:
                pass
        press()  # held back again: the test ends this line
        with pytest.raises(KeyboardInterrupt), MASK.lifted:
            pass
    press_raises()


def test_without_a_mask_lifting_it_does_nothing() -> None:
    with MASK.lifted:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_disposition_that_interrupts_no_python_code_stays(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with MASK:
        assert signal.getsignal(signal.SIGINT) is handler
        with MASK.lifted:
            assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_script_s_own_handler_is_called_once_and_may_return() -> None:
    calls: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGINT, note)
    with MASK:
        press()
        press()
        assert not calls
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is note


@pytest.mark.parametrize("later", [signal.SIG_IGN, signal.default_int_handler])
def test_a_handler_that_the_script_s_own_installs_stays(later: Handler | signal.Handlers) -> None:
    """As one that ends the job at the second Ctrl-C, or ignores it."""

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, later)
        raise SystemExit

    signal.signal(signal.SIGINT, handle)
    with MASK:
        press()
        with pytest.raises(SystemExit), MASK.lifted:
            pytest.fail("lifted without the interrupt that was held back")
        if later is signal.default_int_handler:
            press()
            with pytest.raises(KeyboardInterrupt), MASK.lifted:
                pytest.fail("lifted without the interrupt that was held back")
    assert signal.getsignal(signal.SIGINT) is later


def test_on_other_threads_it_does_nothing() -> None:
    def masked(inside: Callable[[], object]) -> None:
        with MASK, MASK.lifted:
            inside()

    begun, go_on = threading.Event(), threading.Event()

    def inside() -> None:
        begun.set()
        go_on.wait(20)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(masked, inside)
        assert begun.wait(20)
        press_raises()
        go_on.set()
        other.result(20)


def press_raises() -> None:
    with pytest.raises(KeyboardInterrupt):
        press()


def wait_for_a_notifier() -> None:
    Notifier().wait(lambda: False, time.monotonic() + 0.01)


def wait_for_a_lock_that_is_taken() -> None:
    lock: CombiningLock[None] = CombiningLock()
    assert lock.take_or_sleep(lambda: False, 0.0)
    try:
        assert not lock.take_or_sleep(lambda: False, time.monotonic() + 0.01)
    finally:
        assert lock.release()
        lock.close()


@pytest.mark.parametrize("wait", [wait_for_a_notifier, wait_for_a_lock_that_is_taken])
def test_a_wait_may_be_interrupted_at_any_line(wait: Callable[[], None]) -> None:
    """The interrupt is what is raised, not that a lock was lost to it."""
    for number in itertools.count():
        lines = itertools.count()

        def trace(
            _frame: FrameType, event: str, _arg: object, lines: Iterator[int] = lines, number: int = number
        ) -> Any:
            is_lifted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if event == "line" and is_lifted and next(lines) == number:
                raise KeyboardInterrupt
            return trace

        def work() -> None:
            with MASK:
                before = sys.gettrace()
                sys.settrace(trace)
                try:
                    wait()
                finally:
                    sys.settrace(before)

        try:
            work()
        except KeyboardInterrupt:
            continue
        break
    assert number > 3, "the mask was never lifted"


def fork_and_press() -> str:
    """What Ctrl-C does in a fork of this thread, in which it is the main one."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        found = "nothing"
        try:
            with MASK:
                press()
                found = "masked"
        except KeyboardInterrupt:
            found += ", raised"
        os.write(writer, found.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as lines:
        return lines.read()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_lifted", [False, True])
def test_a_process_that_another_thread_forks_hears_interrupts(is_lifted: bool) -> None:
    """The thread that would end the mask is not in it."""
    with ThreadPoolExecutor(1) as pool, MASK, MASK.lifted if is_lifted else contextlib.nullcontext():
        assert pool.submit(fork_and_press).result(20) == "masked, raised"
    press_raises()
