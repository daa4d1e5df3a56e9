from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from zenps.worker.transport.lock import Wheel

DEADLINE_SECONDS = 20.0
SOON_SECONDS = 0.2


class Driver:
    """Drives as a channel does: runs commands, and sleeps until there are more."""

    def __init__(self) -> None:
        self.wheel = Wheel(self._drive)
        self.drives = threading.Event()
        self.by: list[int] = []

    def _drive(self, ready: Callable[[], bool], until: float) -> None:
        self.by.append(threading.get_ident())
        self.drives.set()
        while True:
            self.wheel.run_commands()
            if ready() or (seconds := until - time.monotonic()) <= 0:
                return
            if select.select([self.wheel.wake], [], [], seconds)[0]:
                self.wheel.on_wake()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def wheel(driver: Driver) -> Iterator[Wheel]:
    yield driver.wheel
    assert not driver.wheel.is_taken
    driver.wheel.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def by() -> float:
    """Later than what waits for a thread gives up."""
    return time.monotonic() + 2 * DEADLINE_SECONDS


def test_a_free_wheel_runs_a_command_at_once_and_here(wheel: Wheel) -> None:
    ran: list[int] = []
    wheel.post(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]


def test_what_is_posted_while_another_drives_runs_there_and_in_order(
    driver: Driver, wheel: Wheel, threads: ThreadPoolExecutor
) -> None:
    over = threading.Event()
    waiting = threads.submit(wheel.wait, over.is_set, by())
    assert driver.drives.wait(DEADLINE_SECONDS)
    ran: list[tuple[int, int]] = []

    def run(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for number in range(100):
        wheel.post(partial(run, number))
    wheel.post(over.set)
    waiting.result(DEADLINE_SECONDS)
    assert ran == [(number, driver.by[0]) for number in range(100)]
    assert driver.by != [threading.get_ident()]


def test_a_driver_is_woken_once_for_all_that_it_has_heard_of(wheel: Wheel) -> None:
    def is_woken() -> bool:
        return bool(select.select([wheel.wake], [], [], 0)[0])

    def post_twice() -> None:
        assert not is_woken()
        wheel.post(lambda: None)
        wheel.post(lambda: None)
        assert is_woken()
        wheel.on_wake()
        assert not is_woken()

    wheel.post(post_twice)


def test_a_driver_that_never_looks_gets_more_commands_than_its_socket_has_room_for(wheel: Wheel) -> None:
    ran: list[int] = []

    def post_on() -> None:
        for number in range(100_000):
            wheel.post(partial(ran.append, number))

    wheel.post(post_on)
    assert ran == list(range(100_000))


def test_a_command_posted_by_a_command_runs_after_it(wheel: Wheel) -> None:
    ran: list[str] = []

    def first() -> None:
        wheel.post(lambda: ran.append("second"))
        ran.append("first")

    wheel.post(first)
    assert ran == ["first", "second"]


def test_a_handler_of_signals_may_come_at_any_time(wheel: Wheel) -> None:
    ran: list[str] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: wheel.post(lambda: ran.append("from a handler")))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        until = time.monotonic() + DEADLINE_SECONDS
        while len(ran) < 200 and time.monotonic() < until:
            wheel.post(lambda: wheel.post(wheel.on_wake))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert len(ran) >= 200


def test_a_sleeper_that_is_told_leaves_while_another_drives(
    driver: Driver, wheel: Wheel, threads: ThreadPoolExecutor
) -> None:
    over, ready = threading.Event(), threading.Event()
    driving = threads.submit(wheel.wait, over.is_set, by())
    assert driver.drives.wait(DEADLINE_SECONDS)
    sleeping = threads.submit(wheel.wait, ready.is_set, by())
    time.sleep(SOON_SECONDS)
    assert not sleeping.done()
    ready.set()
    wheel.tell()
    sleeping.result(DEADLINE_SECONDS)
    assert wheel.is_taken
    wheel.post(over.set)
    driving.result(DEADLINE_SECONDS)


def test_a_sleeper_takes_the_wheel_that_the_driver_leaves(
    driver: Driver, wheel: Wheel, threads: ThreadPoolExecutor
) -> None:
    first, second = threading.Event(), threading.Event()
    driving = threads.submit(wheel.wait, first.is_set, by())
    assert driver.drives.wait(DEADLINE_SECONDS)
    sleeping = threads.submit(wheel.wait, second.is_set, by())
    time.sleep(SOON_SECONDS)
    driver.drives.clear()
    wheel.post(first.set)
    driving.result(DEADLINE_SECONDS)
    assert driver.drives.wait(DEADLINE_SECONDS)
    assert len(set(driver.by)) == 2
    wheel.post(second.set)
    sleeping.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("has_driver", [True, False])
def test_waiting_ends_in_time(
    driver: Driver, wheel: Wheel, has_driver: bool, threads: ThreadPoolExecutor
) -> None:
    over = threading.Event()
    if has_driver:
        driving = threads.submit(wheel.wait, over.is_set, by())
        assert driver.drives.wait(DEADLINE_SECONDS)
    began = time.monotonic()
    wheel.wait(lambda: False, began + SOON_SECONDS)
    assert SOON_SECONDS <= time.monotonic() - began < DEADLINE_SECONDS / 2
    wheel.post(over.set)
    if has_driver:
        driving.result(DEADLINE_SECONDS)


def test_the_wheel_is_free_after_an_error_and_what_was_posted_is_done(wheel: Wheel) -> None:
    ran: list[str] = []

    def fail() -> None:
        wheel.post(fail_too)
        wheel.post(lambda: ran.append("done"))
        raise KeyboardInterrupt

    def fail_too() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        wheel.post(fail)
    assert ran == ["done"]
    assert not wheel.is_taken


def test_a_closed_wheel_takes_commands_still(wheel: Wheel) -> None:
    ran: list[str] = []

    def close() -> None:
        wheel.close()
        wheel.post(lambda: ran.append("posted to whom it closes"))

    wheel.post(close)
    wheel.post(lambda: ran.append("posted later"))
    assert ran == ["posted to whom it closes", "posted later"]
