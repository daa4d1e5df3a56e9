from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from zenps.worker.transport.lock import CombiningLock

DEADLINE_SECONDS = 20.0
SOON_SECONDS = 0.2


class Driver:
    """Drives as a channel does: runs commands, and sleeps until there are more."""

    def __init__(self) -> None:
        self.lock = CombiningLock(self._drive)
        self.drives = threading.Event()
        self.by: list[int] = []

    def _drive(self, ready: Callable[[], bool], until: float) -> None:
        self.by.append(threading.get_ident())
        self.drives.set()
        while True:
            self.lock.run_commands()
            if ready() or (seconds := until - time.monotonic()) <= 0:
                return
            if select.select([self.lock.wake], [], [], seconds)[0]:
                self.lock.on_wake()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def lock(driver: Driver) -> Iterator[CombiningLock]:
    yield driver.lock
    assert not driver.lock.is_taken
    driver.lock.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def by() -> float:
    """Later than what waits for a thread gives up."""
    return time.monotonic() + 2 * DEADLINE_SECONDS


def test_a_free_wheel_runs_a_command_at_once_and_here(lock: CombiningLock) -> None:
    ran: list[int] = []
    lock.post(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]


def test_what_is_posted_while_another_drives_runs_there_and_in_order(
    driver: Driver, lock: CombiningLock, threads: ThreadPoolExecutor
) -> None:
    over = threading.Event()
    waiting = threads.submit(lock.wait, over.is_set, by())
    assert driver.drives.wait(DEADLINE_SECONDS)
    ran: list[tuple[int, int]] = []

    def run(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for number in range(100):
        lock.post(partial(run, number))
    lock.post(over.set)
    waiting.result(DEADLINE_SECONDS)
    assert ran == [(number, driver.by[0]) for number in range(100)]
    assert driver.by != [threading.get_ident()]


def test_a_driver_is_woken_once_for_all_that_it_has_heard_of(lock: CombiningLock) -> None:
    def is_woken() -> bool:
        return bool(select.select([lock.wake], [], [], 0)[0])

    def post_twice() -> None:
        assert not is_woken()
        lock.post(lambda: None)
        lock.post(lambda: None)
        assert is_woken()
        lock.on_wake()
        assert not is_woken()

    lock.post(post_twice)


def test_a_driver_that_never_looks_gets_more_commands_than_its_socket_has_room_for(
    lock: CombiningLock,
) -> None:
    ran: list[int] = []

    def post_on() -> None:
        for number in range(100_000):
            lock.post(partial(ran.append, number))

    lock.post(post_on)
    assert ran == list(range(100_000))


def test_a_command_posted_by_a_command_runs_after_it(lock: CombiningLock) -> None:
    ran: list[str] = []

    def first() -> None:
        lock.post(lambda: ran.append("second"))
        ran.append("first")

    lock.post(first)
    assert ran == ["first", "second"]


def test_a_handler_of_signals_may_come_at_any_time(lock: CombiningLock) -> None:
    ran: list[str] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: lock.post(lambda: ran.append("from a handler")))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        until = time.monotonic() + DEADLINE_SECONDS
        while len(ran) < 200 and time.monotonic() < until:
            lock.post(lambda: lock.post(lock.on_wake))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert len(ran) >= 200


def test_a_sleeper_that_is_told_leaves_while_another_drives(
    driver: Driver, lock: CombiningLock, threads: ThreadPoolExecutor
) -> None:
    over, ready = threading.Event(), threading.Event()
    driving = threads.submit(lock.wait, over.is_set, by())
    assert driver.drives.wait(DEADLINE_SECONDS)
    sleeping = threads.submit(lock.wait, ready.is_set, by())
    time.sleep(SOON_SECONDS)
    assert not sleeping.done()
    ready.set()
    lock.tell()
    sleeping.result(DEADLINE_SECONDS)
    assert lock.is_taken
    lock.post(over.set)
    driving.result(DEADLINE_SECONDS)


def test_a_sleeper_takes_the_wheel_that_the_driver_leaves(
    driver: Driver, lock: CombiningLock, threads: ThreadPoolExecutor
) -> None:
    first, second = threading.Event(), threading.Event()
    driving = threads.submit(lock.wait, first.is_set, by())
    assert driver.drives.wait(DEADLINE_SECONDS)
    sleeping = threads.submit(lock.wait, second.is_set, by())
    time.sleep(SOON_SECONDS)
    driver.drives.clear()
    lock.post(first.set)
    driving.result(DEADLINE_SECONDS)
    assert driver.drives.wait(DEADLINE_SECONDS)
    assert len(set(driver.by)) == 2
    lock.post(second.set)
    sleeping.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("has_driver", [True, False])
def test_waiting_ends_in_time(
    driver: Driver, lock: CombiningLock, has_driver: bool, threads: ThreadPoolExecutor
) -> None:
    over = threading.Event()
    if has_driver:
        driving = threads.submit(lock.wait, over.is_set, by())
        assert driver.drives.wait(DEADLINE_SECONDS)
    began = time.monotonic()
    lock.wait(lambda: False, began + SOON_SECONDS)
    assert SOON_SECONDS <= time.monotonic() - began < DEADLINE_SECONDS / 2
    lock.post(over.set)
    if has_driver:
        driving.result(DEADLINE_SECONDS)


def test_the_wheel_is_free_after_an_error_and_what_was_posted_is_done(lock: CombiningLock) -> None:
    ran: list[str] = []

    def fail() -> None:
        lock.post(fail_too)
        lock.post(lambda: ran.append("done"))
        raise KeyboardInterrupt

    def fail_too() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lock.post(fail)
    assert ran == ["done"]
    assert not lock.is_taken


def test_a_closed_wheel_takes_commands_still(lock: CombiningLock) -> None:
    ran: list[str] = []

    def close() -> None:
        lock.close()
        lock.post(lambda: ran.append("posted to whom it closes"))

    lock.post(close)
    lock.post(lambda: ran.append("posted later"))
    assert ran == ["posted to whom it closes", "posted later"]
