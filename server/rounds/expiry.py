"""Expiry of open rounds: decides the end of one that has waited long enough, or can never be complete."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Literal

from .states import ServerRound

# How long a resumed round waits for its first push while no push of any round comes: on a slow link it may be
# queued behind many. A rank that has given the round up answers ``resume`` by ``give-up``; this limit is for
# lost messages. A later push opens the round again.
RESUMED_SECONDS = 15.0

# How long no round expires after the server was stopped. Workers wait longer than that beyond the deadline,
# so that they hear from the server which rank is late.
STOP_GRACE_SECONDS = 2.0
# How long at most from the first of several short stops on: without a limit, workers would give up first.
STOPS_GRACE_SECONDS = 3.0


class StopGrace:
    """Grace after a stop: no round expires, because there may be pushes that nobody has read."""

    def __init__(self) -> None:
        self._until = -math.inf
        self._latest = math.inf
        """When it ends even if short stops follow; infinite once it has ended."""

    def begin(self, stopped_seconds: float, now: float) -> None:
        """Begins at the end of a stop, or goes on after another one."""
        if stopped_seconds > STOP_GRACE_SECONDS:  # much may have come since the stop before
            self._latest = now + STOPS_GRACE_SECONDS
        else:
            self._latest = min(self._latest, now - stopped_seconds + STOPS_GRACE_SECONDS)
        self._until = min(now + STOP_GRACE_SECONDS, self._latest)

    def end(self, now: float) -> bool:
        """Ends if the time is over; returns whether rounds may expire."""
        if now < self._until:
            return False
        self._latest = math.inf
        return True


def ending(
    round_: ServerRound,
    peers: Set[int],
    passed: Set[int],
    now: float,
    last_push: float,
    deadline_seconds: float,
) -> Literal["nobody left", "given up", "deadline"] | None:
    """Returns how a round ends now; None if it goes on waiting.

    If a rank has ended this step and its push is missing, it got no reply, and the round fails. In a recovery
    round it may have had its reply before: then this rank is asked for its push instead, as long as any rank
    needs the reply.

    Args:
        peers: the ranks that every round waits for.
        passed: those of them that have ended this step (:meth:`.history.History.has_passed`).
        now: the time.
        last_push: when a push came last, of any round.
        deadline_seconds: how long a round waits for its last push.
    """
    if not round_.held:
        is_quiet = now > max(round_.opened, last_push) + RESUMED_SECONDS
        is_wanted = not round_.resumed & peers <= passed and not is_quiet
        return None if is_wanted else "nobody left"
    # Those that wait for the reply. If only lost ranks do, a present one may still come that lacks it.
    waiting = round_.held.keys() & peers or peers
    if waiting <= passed:
        return "nobody left"
    if not round_.is_recovery and passed - round_.ranks:
        return "given up"
    if now > round_.opened + deadline_seconds:
        return "deadline"
    forgotten = round_.forgotten
    return "nobody left" if forgotten is not None and now > round_.added + forgotten.wait_seconds else None
