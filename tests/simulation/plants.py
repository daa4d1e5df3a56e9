"""Parts with a mistake each: the simulator has to find every one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from zenps.scheduler.barriers import Barriers
from zenps.scheduler.job import Job
from zenps.scheduler.members import Node
from zenps.scheduler.membership import Membership, Send
from zenps.scheduler.registration import Settings
from zenps.server.round import Aggregate
from zenps.server.round import Round as ServerRound
from zenps.server.rounds import Actions, Held, Rounds
from zenps.settings import ClusterConfig
from zenps.wire.messages import FromServer, Register
from zenps.worker.exchange import Exchange
from zenps.worker.round import Action, Frames, Outgoing, Round

from .nodes import Parts

__all__ = ["PLANTS"]


class TakesAnyEpoch(Exchange):
    """Believes answers of an older ring."""

    def on_reply(self, server: int, message: FromServer, frames: Frames, now: float) -> list[Action]:
        return super().on_reply(server, msgspec.structs.replace(message, epoch=self._epoch), frames, now)


class KeepsNothing(Exchange):
    """Forgets a round when it has ended here."""

    def _end(self, round_: Round, event: Any) -> None:
        super()._end(round_, event)
        self._kept.clear()


class TrustsTheFirstWave(Exchange):
    """Takes one wave for three."""

    def on_wave(self, wave: int) -> None:
        super().on_wave(wave)
        for key in [key for key, round_ in self._kept.items() if round_.ended_after < wave]:
            self._settle(key)


class NeverSettles(Exchange):
    """Keeps rounds that all ranks have ended."""

    def on_wave(self, wave: int) -> None:
        self.wave = max(self.wave, wave)


class SaysItIsTheFirstTime(Exchange):
    """Does not say that it pushes again: nobody is asked for what he has ended."""

    def _cut(self, round_: Round) -> None:
        super()._cut(round_)
        replace = msgspec.structs.replace
        round_.outgoing = [Outgoing(s, replace(push, again=False), f) for s, push, f in round_.outgoing]


class NeverRepeats(Exchange):
    """Relies on every message to arrive."""

    def _push(self, round_: Round, now: float) -> list[Action]:
        actions = super()._push(round_, now)
        round_.repeat_at = math.inf
        return actions


class SumsAsTheyCome(Rounds):
    """Adds ranks in the order of arrival."""

    def _complete(self, round_: ServerRound, now: float) -> Actions:
        arrived = list(round_.held.values())
        actions = super()._complete(round_, now)
        return [Aggregate(a.key, arrived, 0.0) if isinstance(a, Aggregate) else a for a in actions]


class KeepsTheOldRing(Rounds):
    """Goes on with its rounds under a new ring."""

    def on_view(
        self, ring: int, peers: Mapping[int, bytes], departed: Mapping[int, str], now: float
    ) -> Actions:
        if not self._epoch:
            return super().on_view(ring, peers, departed, now)
        self._epoch, self._peers = ring, dict(peers)
        return []


class NeverAsks(Rounds):
    """Waits for pushes that ranks do not know to be missing."""

    def _ask(self) -> Actions:
        return []


class ForgetsToForget(Rounds):
    """Loses count of its memory."""

    def _forget(self, place: tuple[str, int], event: Any) -> None:
        before = self.held_bytes
        super()._forget(place, event)
        self.held_bytes = before


class RefusesWhatIsOlder(Rounds):
    """Admits what comes again after a loss only if there is room: others have taken it."""

    def on_push(self, held: Held, now: float) -> Actions:
        push = msgspec.structs.replace(held.push, again=False)
        return super().on_push(msgspec.structs.replace(held, push=push), now)


class _EagerJob(Job):
    def change(self, event: Any, now: float) -> list[Send]:
        sends = super().change(event, now)
        return [self.show_view(worker) for worker in self.members.present("worker")] + sends


class TellsWorkersFirst(Membership):
    """Shows workers a view that servers may not have."""

    def __init__(self, job: str, cluster: ClusterConfig, settings: Settings, now: float) -> None:
        super().__init__(job, cluster, settings, now)
        self._job = _EagerJob(cluster, now)


class BeginsAnew(Membership):
    """Comes back without asking what there was."""

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        return super()._on_register(peer, msgspec.structs.replace(message, view=None), now)


class _HastyBarriers(Barriers):
    def on_barrier(self, node: Node, sequence: int, now: float) -> list[Send]:
        sends = super().on_barrier(node, sequence, now)
        waiting = self._open[sequence].waiting if sequence in self._open else {}
        return sends or (
            self._answer(sequence, "") if len(waiting) >= len(self._members.present("worker")) - 1 else []
        )


class _HastyJob(Job):
    def _begin_generation(self, generation: int) -> None:
        super()._begin_generation(generation)
        self.barriers = _HastyBarriers(self.members, False, math.inf, self.stragglers.barriers)


class LetsOneThrough(Membership):
    """Ends a barrier when the second to last has come."""

    def __init__(self, job: str, cluster: ClusterConfig, settings: Settings, now: float) -> None:
        super().__init__(job, cluster, settings, now)
        self._job = _HastyJob(cluster, now)


PLANTS = [
    *(Parts(exchange=part) for part in (TakesAnyEpoch, KeepsNothing, TrustsTheFirstWave, NeverSettles)),
    *(Parts(exchange=part) for part in (SaysItIsTheFirstTime, NeverRepeats)),
    *(Parts(rounds=part) for part in (SumsAsTheyCome, KeepsTheOldRing, NeverAsks, ForgetsToForget)),
    Parts(rounds=RefusesWhatIsOlder),
    *(Parts(membership=part) for part in (TellsWorkersFirst, BeginsAnew, LetsOneThrough)),
]
