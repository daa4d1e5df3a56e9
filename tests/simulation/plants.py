"""Faulty subclasses of the classes under test: the simulator has to find each mistake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy
from typing import Any

import msgspec

from zenps.config.settings import ClusterConfig
from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.admission import JoiningWorkers
from zenps.scheduler.membership.barriers import Barriers
from zenps.scheduler.membership.job import Job
from zenps.scheduler.membership.members import Node
from zenps.scheduler.membership.quorum import Quorum
from zenps.scheduler.membership.registration import Settings
from zenps.scheduler.membership.tracker import Membership
from zenps.server.rounds.states import HeldPush, Reduce, ServerRound
from zenps.server.rounds.tracker import Actions, ServerRounds
from zenps.wire.messages import FromServer, GiveUp
from zenps.wire.scheduler_messages import Barrier, Heartbeat, HeartbeatReply, Member, Refused, Register
from zenps.worker.rounds.states import Action, Frames, Outgoing, Round, SendPush
from zenps.worker.rounds.tracker import WorkerRounds

from .nodes import Parts
from .script import Scenario


class TakesAnyEpoch(WorkerRounds):
    """Believes answers of an older ring."""

    def on_reply(self, server: int, message: FromServer, frames: Frames, now: float) -> list[Action]:
        return super().on_reply(
            server, msgspec.structs.replace(message, ring_epoch=self._ring_epoch), frames, now
        )


class KeepsNothing(WorkerRounds):
    """Forgets a round when it has ended on this worker."""

    def _end(self, round_: Round, event: Any) -> None:
        super()._end(round_, event)
        self._kept.clear()


class TrustsTheFirstWatermark(WorkerRounds):
    """Settles rounds after one watermark instead of three."""

    def on_watermark(self, watermark: int) -> None:
        super().on_watermark(watermark)
        for key in [key for key, round_ in self._kept.items() if round_.ended_after < watermark]:
            self._settle(key)


class NeverSettles(WorkerRounds):
    """Keeps rounds that all ranks have ended."""

    def on_watermark(self, watermark: int) -> None:
        self.watermark = max(self.watermark, watermark)


class SaysItIsTheFirstTime(WorkerRounds):
    """Does not mark repeated pushes: other ranks are not asked for rounds that they have ended."""

    def on_resharded(
        self, round_: Round, ring_epoch: int, encoded: object, outgoing: Sequence[Outgoing], now: float
    ) -> list[Action]:
        replace = msgspec.structs.replace
        first = [replace(out, push=replace(out.push, again=False)) for out in outgoing]
        return super().on_resharded(round_, ring_epoch, encoded, first, now)


class OverwritesEarlierPushes(WorkerRounds):
    """Reuses the memory of pushes under an older ring, which a lost server may still read."""

    def on_resharded(
        self, round_: Round, ring_epoch: int, encoded: object, outgoing: Sequence[Outgoing], now: float
    ) -> list[Action]:
        actions = super().on_resharded(round_, ring_epoch, encoded, outgoing, now)
        round_.earlier.clear()
        return actions


class TakesWhatIsOfAnyRing(WorkerRounds):
    """Pushes what was sharded for a ring that has passed meanwhile."""

    def on_resharded(
        self, round_: Round, ring_epoch: int, encoded: object, outgoing: Sequence[Outgoing], now: float
    ) -> list[Action]:
        return super().on_resharded(round_, self._ring_epoch, encoded, outgoing, now)


class PushesWhatHasFailed(WorkerRounds):
    """Pushes a round that has failed while it was resharded."""

    def on_resharded(
        self, round_: Round, ring_epoch: int, encoded: object, outgoing: Sequence[Outgoing], now: float
    ) -> list[Action]:
        if round_.state == "kept" and ring_epoch == self._ring_epoch:
            return [SendPush(out) for out in outgoing]
        return super().on_resharded(round_, ring_epoch, encoded, outgoing, now)


class OverwritesWhatHasEnded(WorkerRounds):
    """Reuses the memory of a push when this worker has all answers."""

    def _end(self, round_: Round, event: Any) -> None:
        super()._end(round_, event)
        round_.outgoing = [
            msgspec.structs.replace(out, frames=[copy(frame) for frame in out.frames])
            for out in round_.outgoing
        ]


class NeverRepeats(WorkerRounds):
    """Relies on every message to arrive."""

    def on_tick(self, now: float, behind: Set[int] = frozenset()) -> list[Action]:
        return [action for action in super().on_tick(now, behind) if not isinstance(action, SendPush)]


class GoesOnWithOthers(WorkerRounds):
    """Repeats under a new ring rounds that began with a lost rank."""

    def on_view(
        self, ring_epoch: int, servers: Iterable[Member], workers: Set[int] = frozenset()
    ) -> list[Action]:
        return super().on_view(ring_epoch, servers, self._workers or workers)


class CountsOn(WorkerRounds):
    """Keeps its rounds from before joining workers were admitted."""

    def reset(self) -> list[Action]:
        return []


class ReducesAsTheyCome(ServerRounds):
    """Reduces pushes in the order of arrival."""

    def _complete(self, round_: ServerRound, now: float) -> Actions:
        arrived = list(round_.held.values())
        actions = super()._complete(round_, now)
        return [Reduce(a.key, arrived, 0.0) if isinstance(a, Reduce) else a for a in actions]


class KeepsTheOldRing(ServerRounds):
    """Continues its rounds under a new ring."""

    def on_view(
        self, ring: int, peers: Mapping[int, bytes], departed: Mapping[int, str], now: float
    ) -> Actions:
        if not self._epoch:
            return super().on_view(ring, peers, departed, now)
        self._epoch, self._peers = ring, dict(peers)
        return []


class NeverAsks(ServerRounds):
    """Waits for missing pushes without asking the ranks for them."""

    def _ask(self, now: float) -> Actions:
        return []


class ForgetsToForget(ServerRounds):
    """Counts the memory of ended rounds as used."""

    def _end(self, round_: ServerRound, event: Any) -> None:
        before = self._admission.open_bytes
        super()._end(round_, event)
        self._admission.open_bytes = before


class RefusesWhatIsOlder(ServerRounds):
    """Admits repeated pushes after a loss only if there is room, which other rounds have taken."""

    def on_push(self, held: HeldPush, now: float) -> Actions:
        push = msgspec.structs.replace(held.push, again=False)
        return super().on_push(msgspec.structs.replace(held, push=push), now)


class KeepsRoomForWhatNobodyPushes(ServerRounds):
    """Keeps a round that has room open, and nothing else may open beside it."""

    def _expire(self, round_: ServerRound, now: float) -> Actions:
        return super()._expire(round_, now) if round_.held else []

    def _has_pushes(self) -> bool:
        return bool(self._open)


class WaitsForWhatIsGivenUp(ServerRounds):
    """Does not listen to a rank that will push nothing more for a round."""

    def on_give_up(self, rank: int, given_up: GiveUp, now: float) -> Actions:
        return []


class NeverSaysWhatItGivesUp(WorkerRounds):
    """Ends a failed round without a word to the servers that wait for it."""

    def _give_up(self, round_: Round) -> list[Action]:
        super()._give_up(round_)
        self._given_up.clear()
        return []


class ContinuesWithoutAnybody(ServerRounds):
    """Reduces without a lost rank what others may have ended with it."""

    def _complete(self, round_: ServerRound, now: float) -> Actions:
        self._lost.clear()
        return super()._complete(round_, now)


class NeverContinuesWithout(ServerRounds):
    """Waits for the push of a lost rank."""

    def _continue_without(self, lost: Set[int], now: float) -> Actions:
        return []


class _EagerJob(Job):
    def begin_epoch(self, event: Any, now: float) -> list[Send]:
        sends = super().begin_epoch(event, now)
        return [self.send_view(worker) for worker in self.members.present("worker")] + sends


class TellsWorkersFirst(Membership):
    """Shows workers a view that servers may not have."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job = _EagerJob(cluster, now)


class BeginsAnew(Membership):
    """Starts a new job instead of recovering the old one from its members."""

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        return super()._on_register(peer, msgspec.structs.replace(message, view=None), now)


class _LoyalJob(Job):
    def _is_dead(self, lost: Sequence[Member]) -> bool:
        return False

    def on_returned(self, now: float) -> list[Send]:
        return [] if self.recovery.missing() else self.recover(now)


class WaitsForADeadJob(Membership):
    """Takes a server that is left over for a member of this job, and waits for the others of its view."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job = _LoyalJob(cluster, now)


class _AnyQuorum(Quorum):
    def may_continue(self) -> bool:
        return True


class ContinuesWithAnyHalf(Membership):
    """Continues after a restart with however few workers; those that are missing may do so elsewhere."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job.quorum = _AnyQuorum(self._job.members)


class _HastyBarriers(Barriers):
    def on_barrier(self, node: Node, arrival: Barrier, now: float) -> list[Send]:
        sends, sequence = super().on_barrier(node, arrival, now), arrival.sequence
        waiting = self._open[sequence].waiting if sequence in self._open else {}
        return sends or (
            self._answer(sequence, "") if len(waiting) >= len(self._members.present("worker")) - 1 else []
        )


class _HastyJob(Job):
    def _begin_generation(self, generation: int, now: float, reason: str = "") -> None:
        super()._begin_generation(generation, now, reason)
        self.barriers = _HastyBarriers(self.members, self.views, self.cluster, self.stragglers.barriers)


class LetsOneThrough(Membership):
    """Ends a barrier when the second to last has come."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job = _HastyJob(cluster, now)


class _ImpatientJoiningWorkers(JoiningWorkers):
    def are_all_ready(self) -> bool:
        return bool(self._ready)


class LetsInTooEarly(Membership):
    """Admits joining workers when the first member has reached the end of its step."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job.joining = _ImpatientJoiningWorkers(self._job.members)


class _ForgetfulJob(Job):
    def _admit(self, now: float) -> list[Send]:
        passed = self.barriers.passed
        sends = super()._admit(now)
        self.barriers.passed = passed
        return sends


class CountsBarriersOn(Membership):
    """Takes a barrier for passed because one of that number was passed before an admission."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job = _ForgetfulJob(cluster, now)


class _NamelessJob(Job):
    def fail(self, event: Any, kind: Any, reason: str) -> list[Send]:
        return super().fail(event, kind, "a worker is lost")


class NamesNobody(Membership):
    """Does not name the lost node in the error."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job = _NamelessJob(cluster, now)


class NeverMissesAWorker(Membership):
    """Waits for a lost worker."""

    def on_tick(self, now: float, late_seconds: float = 0.0) -> list[Send]:
        for node in self._job.members.present("worker"):
            node.last_heard = now
        return super().on_tick(now, late_seconds)


class RefusesWhoComesBack(Membership):
    """Takes an elastic job that has begun for complete, though it has lost a worker."""

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        if message.role == "worker" and message.view is None and self.epoch:
            return [Send(peer, Refused("usage", "the cluster is complete"))]
        return super()._on_register(peer, message, now)


class HidesWhoWaits(Membership):
    """Tells no member that workers wait for their admission."""

    def _on_heartbeat(self, node: Node, message: Heartbeat, now: float) -> list[Send]:
        return [
            Send(send.peer, msgspec.structs.replace(send.message, joining=0))
            if isinstance(send.message, HeartbeatReply)
            else send
            for send in super()._on_heartbeat(node, message, now)
        ]


class TakesGenerationsForOne(Membership):
    """Does not distinguish workers that torchrun has restarted from those before."""

    def _on_register(self, peer: bytes, message: Register, now: float) -> list[Send]:
        return super()._on_register(peer, msgspec.structs.replace(message, generation=0), now)


class _MixingJob(Job):
    def restart_workers(self, generation: int, now: float, reason: str = "") -> None:
        workers = self.members.present("worker")
        super().restart_workers(generation, now, reason)
        for worker in workers[1:]:
            self.members.add(worker)


class MixesGenerations(Membership):
    """Begins a generation with workers of the previous one."""

    def __init__(
        self, job: str, cluster: ClusterConfig, settings: Settings, now: float, **others: Any
    ) -> None:
        super().__init__(job, cluster, settings, now, **others)
        self._job = _MixingJob(cluster, now)


PLANTS: dict[Scenario, list[Parts]] = {
    "steady": [
        *(
            Parts(worker_rounds=part)
            for part in (TakesAnyEpoch, KeepsNothing, TrustsTheFirstWatermark, NeverSettles)
        ),
        *(Parts(worker_rounds=part) for part in (SaysItIsTheFirstTime, NeverRepeats, TakesWhatIsOfAnyRing)),
        *(Parts(rounds=part) for part in (ReducesAsTheyCome, KeepsTheOldRing, NeverAsks, ForgetsToForget)),
        *(Parts(rounds=part) for part in (RefusesWhatIsOlder, WaitsForWhatIsGivenUp)),
        Parts(rounds=KeepsRoomForWhatNobodyPushes),
        Parts(worker_rounds=NeverSaysWhatItGivesUp),
        *(Parts(membership=part) for part in (TellsWorkersFirst, BeginsAnew, LetsOneThrough)),
        Parts(membership=WaitsForADeadJob),
    ],
    "fail": [*(Parts(membership=part) for part in (NamesNobody, NeverMissesAWorker))],
    "continue": [
        *(Parts(worker_rounds=part) for part in (GoesOnWithOthers, CountsOn, OverwritesWhatHasEnded)),
        Parts(worker_rounds=PushesWhatHasFailed),
        *(Parts(rounds=part) for part in (ContinuesWithoutAnybody, NeverContinuesWithout)),
        *(Parts(membership=part) for part in (LetsInTooEarly, CountsBarriersOn, ContinuesWithAnyHalf)),
        *(Parts(membership=part) for part in (BeginsAnew, RefusesWhoComesBack, HidesWhoWaits)),
    ],
    "restart": [*(Parts(membership=part) for part in (TakesGenerationsForOne, MixesGenerations))],
}
"""The faulty classes, by the scenario that reveals the mistake."""
