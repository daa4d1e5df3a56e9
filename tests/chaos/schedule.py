"""Fault schedule of the chaos test, drawn from a seed; and the pauses of training that faults cause."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Act = Literal["SIGKILL", "SIGSTOP, SIGKILL", "SIGSTOP, SIGCONT", "SIGTERM", "drain", "join", "scheduler"]

HARD: Final[tuple[Act, ...]] = ("SIGKILL", "SIGSTOP, SIGKILL", "SIGSTOP, SIGCONT")
"""Events after which a server's lease has to expire, because it does not leave."""

KILLS: Final[tuple[Act, ...]] = (*HARD, "SIGTERM")

# The two that stop a server first take longer, and stopping is the same for both.
_WEIGHTS: Final = (4, 1, 1, 2)

FOLLOWS: Final = 0.3
"""Share of events that come a random time after the one before, not at a step: that is during recovery."""

FIRST: Final = 0.02
LAST: Final = 0.85
"""Events happen between these fractions of all steps."""

ROOM: Final = 1 / 6
"""The fraction of all steps without other events, after the scheduler was killed apart."""


class Counts(NamedTuple):
    """The number of events of each kind in one run."""

    kills: int
    scheduler_kills: int
    drains: int
    joins: int


class Event(NamedTuple):
    """``act`` is due ``delay_seconds`` after step ``step`` was complete."""

    step: int
    delay_seconds: float
    act: Act


@dataclass
class Done:
    """An event that has happened, by ``time.monotonic()``."""

    act: Act
    step: int
    since: float
    until: float = 0.0
    """When its effects were over, as far as the harness can tell; 0.0 while they last."""

    def pause_seconds(self, steps: Sequence[tuple[float, float]]) -> float:
        """The rest of the step in flight at ``since``, or a longer step up to the second after ``until``.

        Args:
            steps: when each began and ended.
        """
        left = [(max(begin, self.since), end) for begin, end in steps if end > self.since]
        over = sum(end <= self.until for _, end in left) + 2
        return max((end - begin for begin, end in left[:over]), default=0.0)


def draw(dice: random.Random, counts: Counts, steps: int, lease_seconds: float, apart: bool) -> list[Event]:
    """The events of one run, in order.

    Args:
        apart: no other event comes while the scheduler is away; otherwise at least one does.
    """
    others: dict[Act, int] = {
        "drain": counts.drains,
        "join": counts.joins,
        "scheduler": counts.scheduler_kills,
    }
    acts: list[Act] = dice.choices(KILLS, _WEIGHTS, k=counts.kills)
    for act, count in others.items():
        acts += [act] * count
    dice.shuffle(acts)
    room = int(ROOM * steps) if apart and counts.scheduler_kills else 0
    places = sorted(dice.sample(range(int(FIRST * steps) + 1, int(LAST * steps) - room), len(acts)))
    if room:
        at = acts.index("scheduler") + 1
        places[at:] = [place + room for place in places[at:]]
    events: list[Event] = []
    for step, act in zip(places, acts, strict=True):
        after_scheduler = bool(events) and events[-1].act == "scheduler"
        follows = bool(events) and (after_scheduler or (act != "scheduler" and dice.random() < FOLLOWS))
        if follows and not (apart and after_scheduler):
            events.append(Event(events[-1].step, dice.uniform(0, 1.5 * lease_seconds), act))
        else:
            # Some milliseconds more, so that it comes at any point of a step.
            events.append(Event(step, dice.uniform(0, 0.03), act))
    return events
