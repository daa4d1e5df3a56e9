from __future__ import annotations

from zenps.scheduler.stragglers import WINDOW_SECONDS, Straggler, Stragglers


def test_servers_wait_at_the_same_time_and_barriers_besides() -> None:
    known = Stragglers(2)
    known.report(b"server-0", {1: 2.0, 0: 0.5})
    known.report(b"server-1", {1: 3.0})
    known.report(b"server-1", {1: 4.0})
    known.barriers.wait([1], [0.0], 2, 1.5)
    assert known.seconds() == {0: 0.5, 1: 5.5}


def test_a_straggler_is_named_once_in_a_window() -> None:
    known = Stragglers(2)
    named = []
    for second in range(100):
        known.report(b"server", {1: second / 4})
        named += [(second, late) for late in known.news(float(second))]
    assert [second for second, _ in named] == [12, 42, 72]
    assert named[1][1] == Straggler(1, 3.0, 12.0)


def test_a_little_now_and_then_is_no_news() -> None:
    known = Stragglers(2)
    for second in range(1000):
        known.report(b"server", {1: second * 0.09})
        assert known.news(float(second)) == []


def test_what_was_before_does_not_count() -> None:
    known = Stragglers(2)
    assert known.news(0.0) == []
    known.report(b"server", {1: 2.0})
    assert known.news(1.0) == []
    assert known.news(1.0 + WINDOW_SECONDS) == []
    known.report(b"server", {1: 4.0})
    assert known.news(2.0 + WINDOW_SECONDS) == []
