"""The queue of transfers that wait for their device."""

from __future__ import annotations

import threading
import time

from zenps.errors import TensorError, ZenPSError
from zenps.worker.core.transfer import Transfer
from zenps.worker.encode.gpu_queue import Staging


class Slow(Transfer):
    """Prepared when its test says so."""

    def __init__(self, error: ZenPSError | None = None) -> None:
        self.ready = False
        self.error = error

    def prepared(self) -> bool:
        if self.ready and self.error:
            raise self.error
        return self.ready

    def absorb(self, *_: object) -> None:
        raise AssertionError

    def restart(self, *_: object) -> None:
        raise AssertionError

    def finish(self) -> None:  # type: ignore[override]
        raise AssertionError


def never(_: ZenPSError) -> None:
    raise AssertionError


def test_what_is_prepared_begins_at_once() -> None:
    staging, begun, transfer = Staging(), [], Slow()
    transfer.ready = True
    staging.add(transfer, lambda: begun.append(1), never)
    assert begun == [1]


def test_transfers_begin_in_order() -> None:
    staging, begun = Staging(), list[int]()
    transfers = [Slow() for _ in range(3)]
    for number, transfer in enumerate(transfers):
        staging.add(transfer, lambda number=number: begun.append(number), never)  # type: ignore[misc]
    transfers[1].ready = True
    staging.advance(0)
    assert begun == []
    transfers[0].ready = True
    staging.advance(0)
    assert begun == [0, 1]
    transfers[2].ready = True
    staging.advance(0)
    assert begun == [0, 1, 2]


def test_what_is_prepared_overtakes_what_is_not() -> None:
    staging, begun, transfer = Staging(), list[int](), Slow()
    staging.add(Slow(), lambda: begun.append(0), never)
    transfer.ready = True
    staging.add(transfer, lambda: begun.append(1), never)
    assert begun == [1]


def test_whatever_is_added_pushes_what_has_become_ready() -> None:
    staging, begun = Staging(), list[str]()
    slow, ready = Slow(), Slow()
    staging.add(slow, lambda: begun.append("slow"), never)
    slow.ready = ready.ready = True
    staging.add(ready, lambda: begun.append("ready"), never)
    assert sorted(begun) == ["ready", "slow"]


def test_a_transfer_that_fails_does_not_hold_up_the_next() -> None:
    staging, begun, failed = Staging(), list[int](), list[ZenPSError]()
    error = TensorError("indices outside")
    bad, good = Slow(error), Slow()
    staging.add(bad, lambda: begun.append(0), failed.append)
    staging.add(good, lambda: begun.append(1), never)
    bad.ready = good.ready = True
    staging.advance(0)
    assert (begun, failed) == ([1], [error])


def test_advance_waits_no_longer_than_it_may() -> None:
    staging = Staging()
    staging.add(Slow(), lambda: None, never)
    begin = time.monotonic()
    staging.advance(begin + 0.05)
    assert 0.05 <= time.monotonic() - begin < 1


def test_advance_returns_when_everything_has_begun() -> None:
    staging, begun, transfer = Staging(), list[int](), Slow()
    staging.add(transfer, lambda: begun.append(1), never)
    threading.Timer(0.05, lambda: setattr(transfer, "ready", True)).start()
    begin = time.monotonic()
    staging.advance(begin + 20)
    assert begun == [1]
    assert time.monotonic() - begin < 10
