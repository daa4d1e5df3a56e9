"""Simulation of one job under a script of faults, with checks of its invariants."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import msgspec

from zenps.config.settings import ClusterConfig
from zenps.wire.scheduler_messages import Heartbeat, Leave, Refused, Register, WhoAreYou

from .faults import Faults, Moment
from .judge import Judge
from .network import Network
from .nodes import SCHEDULER, Operator, Parts, Scheduler, Violation
from .promises import Promises
from .script import Script
from .servers import LeftOver, Server
from .supervisor import Supervisor
from .workers import Worker

FINISH_SECONDS = 1500.0
"""A lost push is repeated after 60 s, then after 120 more, …: this is enough for a few repetitions."""
STEP_BYTES = 8192.0
"""What a link carries in a step, pushed under some rings."""
SETTLE_SECONDS = 90.0  # more than a worker waits before it repeats a push that was lost
SHORT_LEASE_SECONDS = 5.0
"""In elastic jobs: a worker that is lost comes back before the job is over."""


class Outcome(msgspec.Struct):
    """The counts of one run."""

    rounds: int
    interleaving: str
    virtual_seconds: float
    messages: Counter[str]
    faults: Counter[str]
    errors: Counter[str]
    resharded: int
    recalled: int
    admissions: int
    generations: int
    worker_crashes: int


class Simulation:
    """A job from its first process to its last.

    Args:
        script: the faults.
        parts: the classes under test.
    """

    def __init__(self, script: Script, parts: Parts | None = None) -> None:
        self.script = script
        self.parts = parts or Parts()
        self.rng = random.Random(script.seed)
        self.cluster = ClusterConfig(workers=script.workers, servers=script.servers)
        if script.scenario == "continue":
            changed = {"on_worker_loss": "continue", "lease_seconds": SHORT_LEASE_SECONDS}
            self.cluster = msgspec.structs.replace(self.cluster, **changed)
        self.network = Network(
            self.rng, script.slow_seconds, script.duplicates, script.bytes_per_second, self._must_arrive
        )
        queues = script.steps * STEP_BYTES / script.bytes_per_second if script.bytes_per_second else 0.0
        # A round that no answer ends is pushed again after twice as long each time.
        self.finish_seconds = FINISH_SECONDS + 8 * queues
        self.settle_seconds = SETTLE_SECONDS + queues / script.steps
        self.promises = Promises(self)
        self.judge = Judge(self)
        self.quiet_from = max((fault.at + fault.seconds for fault in script.faults), default=0.0)
        self._counts: Counter[str] = Counter()
        self.servers: list[Server] = []
        self.incarnations = itertools.count(1)
        self.scheduler = Scheduler(self)
        if script.left_over:
            self.servers.append(LeftOver(self))
        for _ in range(script.servers):
            self.start_server()
        self.workers: list[Worker] = []
        """All processes, also those that have ended."""
        self._faults = Faults(self, self._counts)
        self.supervisor = Supervisor(self)
        self.operator = Operator(self)
        self._watch()

    def run(self) -> Outcome:
        """Runs the job to its end.

        Raises:
            Violation: a promise was broken.
        """
        until = self.quiet_from + self.finish_seconds
        while not self.is_over():
            if self.network.now > until or not self.network.step():
                raise Violation(f"not over by {until:g} s: {self._unfinished()}")
        self._check_end()
        return Outcome(
            len(self.promises.ended),
            self.network.interleaving,
            self.network.now,
            self.network.counts,
            self._counts,
            self.judge.errors,
            sum(worker.resharded for worker in self.workers),
            sum(worker.recalled for worker in self.workers),
            sum(era.admitted > 0 for era in self.promises.eras),
            self.supervisor.generation,
            sum(worker.ended == "crashed" for worker in self.workers),
        )

    # ── what processes ask ──────────────────────────────────────────────────────────────────────

    def may_leave(self, worker: bytes) -> bool:
        """True if a scheduler that knows the worker is there: else its leave would look like a loss."""
        return self.scheduler.is_alive and bool(self.scheduler.membership.name_of(worker))

    def on_moment(self, moment: Moment, worker: Worker) -> None:
        """A worker is at a moment at which a fault may kill it."""
        self._faults.on_moment(moment, worker)

    def on_error(self, worker: Worker, reason: str) -> None:
        """A worker ends with an error."""
        self.judge.on_error(worker, reason)

    def is_over(self) -> bool:
        """True if all nodes have ended."""
        is_anybody_alive = self.scheduler.is_alive or any(server.is_alive for server in self.servers)
        return not is_anybody_alive and not self.scheduler.is_restarting and self.supervisor.is_over

    def start_server(self) -> None:
        """Starts another server process."""
        self.servers.append(Server(self, len(self.servers)))

    def start_scheduler(self) -> None:
        """Starts another scheduler process at the same address."""
        self.scheduler = Scheduler(self)

    # ── what must hold ──────────────────────────────────────────────────────────────────────────

    def check_settled(self) -> None:
        """After a while without faults, no node holds any rounds."""
        for worker in self.workers:
            held = [*worker.rounds._kept, *worker.rounds._in_flight]
            is_member = worker.is_alive and self.scheduler.has_present(worker.name)
            if is_member and held and worker.is_idle():
                raise Violation(f"{worker.name!r} still holds {held}")
        for server in self.servers:
            if server.is_alive and server.rounds.open_rounds:
                raise Violation(f"{server.name!r} still waits for {list(server.rounds._open)}")

    def _check_end(self) -> None:
        for server in self.servers:
            server.check()
        workers = self.supervisor.current
        is_steady = self.script.scenario == "steady"
        missing = {key: count for key, count in self.promises.ended.items() if count != len(workers)}
        if is_steady and missing:
            raise Violation(f"rounds ended at so many workers: {missing}, expected {len(workers)}")
        may_fail = any(worker.is_gone for worker in self.workers) and not self.supervisor.restarts
        if not may_fail and not all(worker.ended == "done" for worker in workers):
            raise Violation(f"nobody has come to the end: {self._unfinished()}")

    def _unfinished(self) -> str:
        scheduler = self.scheduler.membership
        lines = [f"scheduler: {scheduler.state}, epoch {scheduler.epoch}"]
        for worker in self.supervisor.current:
            view = worker.view.epoch if worker.view else 0
            flight = [(*key, r.state, sorted(r.unanswered)) for key, r in worker.rounds._in_flight.items()]
            stands = worker.ended or f"step {worker.training.step}, barrier {worker.entered}"
            if worker.waits_at_barrier:
                stands += " where it waits"
            lines.append(f"{worker.name!r}, {worker.rank}: {stands}, epoch {view}, in flight {flight}")
        for server in self.servers:
            if server.is_alive:
                view = server.view.epoch if server.view else 0
                lines.append(f"{server.name!r}: epoch {view}, open {list(server.rounds._open)}")
        return "\n".join(lines)

    def _must_arrive(self, sender: bytes, receiver: bytes, message: msgspec.Struct) -> bool:
        """True for messages that keep a worker's lease from expiring, and for messages that are sent once.

        Also for refusals of a node: no later message of the scheduler overtakes them on their connection.
        """
        match message:
            case Leave() | Refused(kind="usage"):
                return True
            case Heartbeat() | Register() | WhoAreYou() if self.script.scenario != "continue":
                peer = receiver if sender == SCHEDULER else sender
                if not peer.startswith(b"worker"):
                    return False
                heard = self.scheduler.heard.get(peer, self.scheduler.started)
                return self.network.now > heard + 0.3 * self.cluster.lease_seconds
        return False

    def _watch(self) -> None:
        """Starts a server if there is none, or if the job cannot begin without another."""
        now = self.network.now
        awake = [s for s in self.servers if s.is_alive and s.stalled_until <= now and not s.is_drained]
        # If all that knew the job have died, another begins.
        is_known = any(node.view and node.is_alive for node in (*self.workers, *self.servers))
        has_begun = is_known or self.scheduler.membership.epoch
        is_needed = not self.scheduler.is_over and not self.supervisor.is_over
        if len(awake) < (1 if has_begun else self.script.servers) and is_needed:
            self.start_server()
        if not self.is_over():
            self.network.at(self.network.now + 5.0, self._watch)
