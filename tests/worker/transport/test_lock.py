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


Command = Callable[[], None]


class Driver:
    """Uses the lock exactly as a channel does; but commands are functions, and no server is polled."""

    def __init__(self) -> None:
        self.lock: CombiningLock[Command] = CombiningLock()
        self.polls = threading.Event()
        self.polled_by: list[int] = []

    def post(self, command: Command) -> None:
        if self.lock.take_or_leave(command):
            try:
                command()
            finally:
                self._release()

    def wait(self, ready: Callable[[], bool], until: float) -> None:
        while not ready() and time.monotonic() < until:
            if self.lock.take_or_sleep(ready, until):
                try:
                    self._poll(ready, until)
                finally:
                    self._release()

    def _release(self) -> None:
        try:
            while not self.lock.release():
                while self.lock.commands:
                    command = self.lock.commands.popleft()
                    command()
        except BaseException:  # the lock must not stay with a thread that is about to leave
            self._release()
            raise

    def _poll(self, ready: Callable[[], bool], until: float) -> None:
        self.polled_by.append(threading.get_ident())
        self.polls.set()
        while True:
            while self.lock.commands:
                command = self.lock.commands.popleft()
                command()
            if ready() or (seconds := until - time.monotonic()) <= 0:
                return
            if select.select([self.lock.wake], [], [], seconds)[0]:
                self.lock.on_wake()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert not driver.lock.is_taken
    driver.lock.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def by() -> float:
    """Later than what waits for a thread gives up."""
    return time.monotonic() + 2 * DEADLINE_SECONDS


def await_sleeper(driver: Driver) -> None:
    """Waits until another thread sleeps, because the lock is taken."""
    until = time.monotonic() + DEADLINE_SECONDS
    while not driver.lock._sleepers.alarms:
        assert time.monotonic() < until, "no thread sleeps"
        time.sleep(0.001)


def test_a_free_lock_is_taken_for_a_command_at_once_and_here(driver: Driver) -> None:
    ran: list[int] = []
    driver.post(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]


def test_commands_that_are_left_to_the_owner_run_there_and_in_order(
    driver: Driver, threads: ThreadPoolExecutor
) -> None:
    over = threading.Event()
    waiting = threads.submit(driver.wait, over.is_set, by())
    assert driver.polls.wait(DEADLINE_SECONDS)
    ran: list[tuple[int, int]] = []

    def run(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for number in range(100):
        driver.post(partial(run, number))
    driver.post(over.set)
    waiting.result(DEADLINE_SECONDS)
    assert ran == [(number, driver.polled_by[0]) for number in range(100)]
    assert driver.polled_by != [threading.get_ident()]


def test_the_owner_is_woken_once_for_all_commands_that_it_has_heard_of(driver: Driver) -> None:
    def is_woken() -> bool:
        return bool(select.select([driver.lock.wake], [], [], 0)[0])

    def post_twice() -> None:
        assert not is_woken()
        driver.post(lambda: None)
        driver.post(lambda: None)
        assert is_woken()
        driver.lock.on_wake()
        assert not is_woken()

    driver.post(post_twice)


def test_an_owner_that_never_looks_gets_more_commands_than_its_socket_has_room_for(
    driver: Driver,
) -> None:
    ran: list[int] = []

    def post_on() -> None:
        for number in range(100_000):
            driver.post(partial(ran.append, number))

    driver.post(post_on)
    assert ran == list(range(100_000))


def test_a_command_posted_by_a_command_runs_after_it(driver: Driver) -> None:
    ran: list[str] = []

    def first() -> None:
        driver.post(lambda: ran.append("second"))
        ran.append("first")

    driver.post(first)
    assert ran == ["first", "second"]


def test_a_handler_of_signals_may_come_at_any_time(driver: Driver) -> None:
    ran: list[str] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: driver.post(lambda: ran.append("from a handler")))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005, 0.0005)
    try:
        until = time.monotonic() + DEADLINE_SECONDS
        while len(ran) < 200 and time.monotonic() < until:
            driver.post(lambda: driver.post(driver.lock.on_wake))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert len(ran) >= 200


def test_a_sleeper_that_is_notified_leaves_while_another_polls(
    driver: Driver, threads: ThreadPoolExecutor
) -> None:
    over, ready = threading.Event(), threading.Event()
    polling = threads.submit(driver.wait, over.is_set, by())
    assert driver.polls.wait(DEADLINE_SECONDS)
    sleeping = threads.submit(driver.wait, ready.is_set, by())
    await_sleeper(driver)
    assert not sleeping.done()
    ready.set()
    driver.lock.notify()
    sleeping.result(DEADLINE_SECONDS)
    assert driver.lock.is_taken
    driver.post(over.set)
    polling.result(DEADLINE_SECONDS)


def test_a_sleeper_takes_the_lock_that_the_owner_releases(
    driver: Driver, threads: ThreadPoolExecutor
) -> None:
    first, second = threading.Event(), threading.Event()
    polling = threads.submit(driver.wait, first.is_set, by())
    assert driver.polls.wait(DEADLINE_SECONDS)
    sleeping = threads.submit(driver.wait, second.is_set, by())
    await_sleeper(driver)
    driver.polls.clear()
    driver.post(first.set)
    polling.result(DEADLINE_SECONDS)
    assert driver.polls.wait(DEADLINE_SECONDS)
    assert len(set(driver.polled_by)) == 2
    driver.post(second.set)
    sleeping.result(DEADLINE_SECONDS)


@pytest.mark.parametrize("has_owner", [True, False])
def test_waiting_ends_in_time(driver: Driver, has_owner: bool, threads: ThreadPoolExecutor) -> None:
    over = threading.Event()
    if has_owner:
        polling = threads.submit(driver.wait, over.is_set, by())
        assert driver.polls.wait(DEADLINE_SECONDS)
    began = time.monotonic()
    driver.wait(lambda: False, began + SOON_SECONDS)
    assert SOON_SECONDS <= time.monotonic() - began < DEADLINE_SECONDS / 2
    driver.post(over.set)
    if has_owner:
        polling.result(DEADLINE_SECONDS)


def test_the_lock_is_free_after_an_error_and_the_commands_that_were_left_are_done(driver: Driver) -> None:
    ran: list[str] = []

    def fail() -> None:
        driver.post(fail_too)
        driver.post(lambda: ran.append("done"))
        raise KeyboardInterrupt

    def fail_too() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        driver.post(fail)
    assert ran == ["done"]
    assert not driver.lock.is_taken


def test_a_closed_lock_takes_commands_still(driver: Driver) -> None:
    ran: list[str] = []

    def close() -> None:
        driver.lock.close()
        driver.post(lambda: ran.append("posted to whom it closes"))

    driver.post(close)
    driver.post(lambda: ran.append("posted later"))
    assert ran == ["posted to whom it closes", "posted later"]
