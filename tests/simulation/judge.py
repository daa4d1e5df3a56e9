"""Error oracle: checks that every error in a run is explained by its faults, and comes in time."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from zenps.scheduler.membership.recovery import RECOVERY_GRACE_SECONDS
from zenps.worker.rounds.states import Round

from .nodes import TICK_SECONDS, Violation

if TYPE_CHECKING:
    from .simulation import Simulation
    from .workers import Worker


class Judge:
    """Checks every error of a worker and every failure of the job.

    Attributes:
        errors: the number of workers' errors, by the rule that allows them.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.errors: Counter[str] = Counter()
        self._failures: list[str] = []
        """Why schedulers have declared the job failed."""

    @property
    def _may_be_silenced(self) -> bool:
        """True if messages may have been lost for so long that a live node is taken for lost."""
        return any(fault.kind in ("cut", "lose") for fault in self._simulation.script.faults)

    def on_error(self, worker: Worker, reason: str) -> None:
        """A worker ends with an error."""
        if (why := self._excuse(worker, reason)) is None:
            raise Violation(f"worker {worker.rank}, {worker.name!r}, was told: {reason}")
        self.errors[why] += 1

    def on_failed(self, reason: str) -> None:
        """A scheduler declares the job failed."""
        self._failures.append(reason)
        simulation = self._simulation
        gone = [worker for worker in simulation.workers if worker.is_gone]
        is_right = bool(gone)
        if simulation.script.scenario == "continue":
            # No worker was left to continue, and none had to.
            has_ended = any(worker.ended == "done" for worker in simulation.workers)
            is_right = (
                has_ended
                or self._is_without_quorum(reason)
                or not any(self._is_heard(worker) for worker in simulation.workers)
            )
        if not is_right:
            raise Violation(f"the job has failed: {reason}")

    def _is_without_quorum(self, reason: str) -> bool:
        """True if a scheduler has failed the job, and misses no fewer workers than it has.

        If it was restarted, it may miss fewer, and a server: none of its view may be there then.
        """
        scheduler = self._simulation.scheduler
        missing = len(set(re.findall(r"worker \d+ \(host[^)]*\)", reason)))
        misses_both = scheduler.started > 0 and missing > 0 and "server " in reason
        is_minority = scheduler.membership.live("worker") <= missing
        return "another scheduler may have these" in reason and (is_minority or misses_both)

    def _was_without_quorum(self, worker: Worker, reason: str) -> bool:
        """As :meth:`_is_without_quorum` if a restarted scheduler has begun another job, whose workers it has.

        Those of the ``worker``'s job that had returned are told the same ``reason``, unless that was lost.
        """
        missing = set(re.findall(r"worker \d+ \(host ([\w-]+), pid (\d+)\)", reason))
        members = [other for other in self._simulation.workers if other.view and other.job == worker.job]
        here = [other for other in members if not other.is_gone or other.error == reason]
        is_minority = sum((other.host, str(other.pid)) not in missing for other in here) <= len(missing)
        return bool(missing) and (is_minority or "server " in reason)

    def on_failed_round(self, worker: Worker, round_: Round, reason: str) -> None:
        """A round fails. That is right only if a rank was lost after it began, whose push may be missing.

        It begins when the first rank pushes it: that may have seen a rank that the others do not know.
        """
        if self._simulation.script.scenario != "continue" or "lost" not in reason:
            return
        scheduler, key = self._simulation.scheduler, (round_.tensor, round_.step)
        alike = [w for w in self._simulation.workers if w.era == worker.era]
        begun = [w.rounds._in_flight.get(key) or w.rounds._kept.get(key) for w in alike]
        begun_with = set(round_.workers).union(*(each.workers for each in begun if each))
        here = [w for w in alike if not w.is_gone]
        if begun_with <= {w.rank for w in here if not scheduler.is_alive or scheduler.has_present(w.name)}:
            raise Violation(f"{worker.name!r}: {reason}; but {sorted(begun_with)} are all there")

    def _is_heard(self, worker: Worker) -> bool:
        """True if the worker has the state, and nothing prevents it from being a member."""
        simulation, now = self._simulation, self._simulation.network.now
        scheduler, lease = simulation.scheduler, simulation.cluster.lease_seconds
        heard = scheduler.heard.get(worker.name, scheduler.started)
        return not worker.is_gone and worker.training.has_state and now <= heard + lease

    def _excuse(self, worker: Worker, reason: str) -> str | None:
        """The rule that allows an error; None if no fault explains the error."""
        simulation = self._simulation
        if simulation.script.scenario == "steady":
            return None
        # If it returns after its lease, the scheduler takes it for the first worker that torchrun restarted.
        excused = ("its lease", "as lost", "restarted the workers")
        if worker.was_silent and any(part in reason for part in excused):
            return "was silent itself"
        if simulation.script.scenario == "continue":
            return self._excuse_of_going_on(worker, reason)
        if (
            simulation.script.scenario == "fail"
            and worker.view is None
            and worker.number >= len(simulation.supervisor.current)
        ):
            return "a pod was started again, and not admitted"
        if simulation.script.scenario == "restart" and worker.generation < simulation.supervisor.generation:
            return "torchrun has started others"
        peers = [other for other in simulation.workers if other.generation == worker.generation]
        if "restarted the workers" in reason and any(other.is_gone for other in peers):
            return "another was lost, and torchrun is about to start others"
        self._check_time(reason)
        named = set(re.findall(r"worker \d+ \(host ([\w-]+), pid (\d+)\)", reason))
        if any(other.is_gone and (other.host, str(other.pid)) in named for other in simulation.workers):
            return "a worker was lost, and is named"
        ranks = [int(rank) for rank in re.findall(r"\d+", "".join(re.findall(r"\(rank ([\d, ]+)\)", reason)))]
        gone = {w.rank for w in simulation.workers if w.is_gone}
        if "rendezvous" in reason and ranks and gone.issuperset(ranks):
            return "a worker did not come, and is named"
        was_away = any(fault.kind.endswith(" scheduler") for fault in simulation.script.faults)
        has_recovered = was_away or simulation.script.left_over
        if worker.view is None and "has not admitted" in reason and gone and has_recovered:
            # A worker counts the rendezvous from its own start, a scheduler from its recovery, or without the
            # time in which it was stalled.
            return "a worker did not come to the rendezvous of a scheduler that was away"
        if "the scheduler is lost" in reason and not simulation.scheduler.is_alive:
            return "the job had failed, and nobody said so"
        return None

    def _excuse_of_going_on(self, worker: Worker, reason: str) -> str | None:
        if self._may_be_silenced and ("its lease" in reason or "as lost" in reason):
            return "was silent itself"
        if worker.view is None:
            return self._excuse_of_joining(worker, reason)
        if self._is_without_quorum(reason):
            return "the quorum was lost"
        if "another job of this name has begun" in reason and self._was_without_quorum(worker, reason):
            return "the quorum was lost, and others begin another job"
        if "were lost within one round" in reason or "servers have changed" in reason:
            return "a round was lost with a worker and a server"
        if "the sum with its push dropped" in reason:
            return "a round was lost with a worker and its outcome"
        others = [other for other in self._simulation.workers if other.view and other is not worker]
        if not any(self._is_heard(other) for other in others):
            return "the state was lost"
        return None

    def _excuse_of_joining(self, worker: Worker, reason: str) -> str | None:
        """The rule that allows that a worker is not admitted."""
        simulation, script = self._simulation, self._simulation.script
        others = [other for other in simulation.workers if other is not worker]
        goes_on = any(other.is_alive and self._is_heard(other) for other in others)
        if self._is_passed_over(worker):
            return None
        if any(failure in reason for failure in self._failures):
            return "the job had failed"
        if "the cluster is complete" in reason:
            holders = [other for other in others if self._may_hold_a_rank(other, worker.began)]
            return "the job had all its workers" if len(holders) >= script.workers else None
        if taken := re.search(r"is taken by worker \d+ \(host ([\w-]+), pid (\d+)\)", reason):
            named = [other for other in others if (other.host, str(other.pid)) == taken.groups()]
            is_taken = any(self._may_hold_a_rank(other, worker.began) for other in named)
            return "another had its rank" if is_taken else None
        if "job has ended" in reason:
            have_left = any(other.ended and other.view for other in others)
            return "the job had ended" if have_left and not goes_on else None
        if "has not admitted" in reason or "the scheduler is lost" in reason:
            is_at_end = any(other.training.step == script.steps for other in others)
            if is_at_end or not goes_on or simulation.scheduler.is_over or not simulation.scheduler.is_alive:
                return "no step has ended any more"
            return "no step has ended in its time" if script.bytes_per_second else None
        return None

    def _is_passed_over(self, worker: Worker) -> bool:
        """True if members have ended steps without admitting a worker of which they had been told."""
        simulation, script = self._simulation, self._simulation.script
        delaying = ("stall scheduler", "crash scheduler", "stall worker", "cut", "lose")
        ends = [fault.at + fault.seconds for fault in script.faults if fault.kind in delaying]
        known = simulation.scheduler.known.get(worker.name, math.inf)
        since = max(known, *ends, 0.0) + simulation.cluster.lease_seconds / 4 + 2 * script.slow_seconds
        members = (other.training for other in simulation.workers if other.view is not None)
        return any(sum(at > since for at in training.commits) > 1 for training in members)

    def _may_hold_a_rank(self, worker: Worker, since: float) -> bool:
        """True if the scheduler may have taken the worker for a member then or later.

        Its lease is longer by the time in which the scheduler was stalled.
        """
        simulation, scheduler = self._simulation, self._simulation.scheduler
        stalls = [fault.seconds for fault in simulation.script.faults if fault.kind == "stall scheduler"]
        heard = scheduler.heard.get(worker.name, scheduler.started)
        if worker.ended == "crashed":  # it may have registered while the scheduler recovered
            heard = max(heard, worker.gone_at)
        until = heard + simulation.cluster.lease_seconds + TICK_SECONDS + sum(stalls)
        return worker.is_alive or since <= until

    def _check_time(self, reason: str) -> None:
        """A lost worker must be noticed within its lease, and all told at once; other faults may delay it."""
        simulation = self._simulation
        cluster, now = simulation.cluster, simulation.network.now
        gone = [worker.gone_at for worker in simulation.workers if worker.is_gone]
        seconds = 2 * cluster.lease_seconds + RECOVERY_GRACE_SECONDS
        if "is lost" not in reason or "the scheduler" in reason:
            seconds += cluster.rendezvous_seconds
        since = max(simulation.quiet_from, min(gone)) if gone else simulation.quiet_from
        if now > since + seconds:
            raise Violation(f"told after {now - since:.1f} s: {reason}")
