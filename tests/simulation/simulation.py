"""One run: a job under a script of faults, and what must hold at every moment of it."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import msgspec

from zenps.server.rounds import ROUND_BYTES
from zenps.settings import ClusterConfig
from zenps.wire.messages import Heartbeat, Leave, Register, WhoAreYou

from .network import Frame, Network
from .nodes import SCHEDULER, UNITS, Operator, Parts, Scheduler, Server, Violation
from .script import Fault, Script
from .workers import TENSORS, Worker

__all__ = ["Outcome", "Simulation"]

FINISH_SECONDS = 1500.0
"""A push that was lost is repeated after 60 s, then after 120 more, …: a few of that must do."""
SETTLE_SECONDS = 60.0
MOST_SERVERS = 5
STALLED_WORKER_SECONDS = 3.0
"""A worker that is silent for a lease is lost, and with it the job."""
LOSS = 0.2
TENSOR_NAMES = [f"t{number}" for number in range(TENSORS)]


class Outcome(msgspec.Struct):
    """What happened."""

    rounds: int
    interleaving: str
    virtual_seconds: float
    messages: Counter[str]
    faults: Counter[str]
    begun_again: int
    recalled: int


class Simulation:
    """A job from its first process to its last.

    Args:
        script: what happens to it.
        parts: what it consists of.
    """

    settle_seconds = SETTLE_SECONDS

    def __init__(self, script: Script, parts: Parts | None = None) -> None:
        self.script = script
        self.parts = parts or Parts()
        self.rng = random.Random(script.seed)
        self.cluster = ClusterConfig(workers=script.workers, servers=script.servers)
        self.network = Network(self.rng, script.slow_seconds, script.duplicates, self._must_arrive)
        self.largest_round_bytes = ROUND_BYTES + script.workers * Frame(dict.fromkeys(range(UNITS))).nbytes
        self.ended: Counter[tuple[str, int]] = Counter()
        """How many workers have the answer of a round."""
        self.quiet_from = max((fault.at + fault.seconds for fault in script.faults), default=0.0)
        self._faults: Counter[str] = Counter()
        self._stalled: dict[bytes, float] = {}
        self._servers: list[Server] = []
        self.scheduler = Scheduler(self)
        for _ in range(script.servers):
            self._start_server()
        self.workers = [Worker(self, rank) for rank in range(script.workers)]
        self._operator = Operator(self)
        for fault in script.faults:
            self.network.at(fault.at, partial(self._befall, fault))
        self._watch()

    def run(self) -> Outcome:
        """Runs the job to its end.

        Raises:
            Violation: a promise was broken.
        """
        until = self.quiet_from + FINISH_SECONDS
        while not self._is_over():
            if self.network.now > until or not self.network.step():
                raise Violation(f"not over by {until:g} s: {self._unfinished()}")
        self._check_end()
        exchanges = [worker.exchange for worker in self.workers]
        return Outcome(
            len(self.ended),
            self.network.interleaving,
            self.network.now,
            self.network.counts,
            self._faults,
            sum(exchange.begun_again for exchange in exchanges),
            sum(exchange.recalled for exchange in exchanges),
        )

    # ── what workers ask ────────────────────────────────────────────────────────────────────────

    def value(self, rank: int, tensor: str, step: int, unit: int) -> int:
        """What a rank pushes: no two are the same."""
        return ((rank * TENSORS + TENSOR_NAMES.index(tensor)) * 1000 + step) * UNITS + unit

    def chunks(self, tensor: str, step: int) -> int:
        """Into how many a server's range is cut; as in reality, it changes from step to step."""
        return 1 + (TENSOR_NAMES.index(tensor) + step // 2) % 2

    def may_leave(self, worker: bytes) -> bool:
        """A leave that nobody hears is the loss of a worker: leaves wait for a scheduler that knows them."""
        return self.scheduler.is_alive and bool(self.scheduler.membership.name_of(worker))

    # ── what must hold ──────────────────────────────────────────────────────────────────────────

    def check_answer(self, tensor: str, step: int, values: dict[int, object]) -> None:
        """Any answer, of any server, under any ring, is the only one there is."""
        for unit, given in values.items():
            expected = tuple([self.value(rank, tensor, step, unit) for rank in range(self.script.workers)])
            if given != expected:
                raise Violation(f"{tensor} {step}, unit {unit}: {given}, expected {expected}")

    def check_barrier(self, sequence: int) -> None:
        """Nobody passes a barrier that somebody has not come to."""
        absent = [worker.rank for worker in self.workers if worker.entered < sequence]
        if absent:
            raise Violation(f"barrier {sequence} was passed without ranks {absent}")

    def check_settled(self) -> None:
        """After a while in which nothing bad happened, nobody holds anything."""
        for worker in self.workers:
            held = [*worker.exchange._kept, *worker.exchange._in_flight]
            if held and not worker._awaited:
                raise Violation(f"worker {worker.rank} still holds {held}")
        for server in self._servers:
            if server.is_alive and server.rounds.open_rounds:
                raise Violation(f"{server.name!r} still waits for {list(server.rounds._open)}")

    def on_error(self, worker: Worker, reason: str) -> None:
        """No script holds anything that a worker should notice."""
        raise Violation(f"worker {worker.rank} was told: {reason}")

    def _is_over(self) -> bool:
        if self.scheduler.is_alive or not all(worker.is_done or worker.error for worker in self.workers):
            return False
        return not any(server.is_alive for server in self._servers)

    def _unfinished(self) -> str:
        scheduler = self.scheduler.membership
        lines = [f"scheduler: {scheduler.state}, epoch {scheduler.epoch}"]
        for worker in self.workers:
            view = worker.view.epoch if worker.view else 0
            flight = [(*key, r.state, sorted(r.unanswered)) for key, r in worker.exchange._in_flight.items()]
            done = "done" if worker.is_done else f"barrier {worker.entered} {worker.waits_at_barrier}"
            lines.append(f"worker {worker.rank}: {done}, epoch {view}, in flight {flight}")
        for server in self._servers:
            if server.is_alive:
                view = server.view.epoch if server.view else 0
                lines.append(f"{server.name!r}: epoch {view}, open {list(server.rounds._open)}")
        return "\n".join(lines)

    def _check_end(self) -> None:
        for server in self._servers:
            server.check()
        missing = {key: count for key, count in self.ended.items() if count != self.script.workers}
        if missing:
            raise Violation(f"rounds ended at so many workers: {missing}, expected {self.script.workers}")

    def _must_arrive(self, sender: bytes, receiver: bytes, message: msgspec.Struct) -> bool:
        """What a worker's lease hangs on, once it is in danger; and what is said only once."""
        match message:
            case Leave():
                return True
            case Heartbeat() | Register() | WhoAreYou():
                peer = receiver if sender == SCHEDULER else sender
                if not peer.startswith(b"worker"):
                    return False
                heard = self.scheduler.heard.get(peer, self.scheduler.started)
                return self.network.now > heard + 0.3 * self.cluster.lease_seconds
        return False

    # ── faults ──────────────────────────────────────────────────────────────────────────────────

    def _start_server(self) -> None:
        self._servers.append(Server(self, len(self._servers)))

    def _watch(self) -> None:
        """Whoever runs servers starts one where there is none, or where the job cannot begin."""
        now = self.network.now
        awake = [s for s in self._servers if s.is_alive and s.stalled_until <= now and not s.is_drained]
        needed = 1 if any(worker.view for worker in self.workers) else self.script.servers
        if len(awake) < needed and not all(worker.is_done for worker in self.workers):
            self._start_server()
        if not self._is_over():
            self.network.at(self.network.now + 5.0, self._watch)

    def _befall(self, fault: Fault) -> None:
        role = fault.kind.rpartition(" ")[2]
        if role == "server" and fault.kind != "start server":
            befallen = self._befall_server(fault)
        elif role == "scheduler":
            befallen = self._befall_scheduler(fault)
        else:
            befallen = self._befall_others(fault)
        self._faults[fault.kind] += befallen

    def _befall_server(self, fault: Fault) -> bool:
        alive = [server for server in self._servers if server.is_alive]
        if not alive:
            return False
        server = alive[fault.target % len(alive)]
        match fault.kind:
            case "crash server":
                server.is_alive = False
            case "stop server":
                server.end("told to")
            case "stall server":
                server.stalled_until = max(server.stalled_until, self.network.now + fault.seconds)
            case "drain server":
                if server.view is None:
                    return False
                server.is_drained = True
                self._operator.drain(server.view.rank)
        return True

    def _befall_scheduler(self, fault: Fault) -> bool:
        until = self.network.now + fault.seconds
        if not self.scheduler.is_alive or self.network.now < self.scheduler.stalled_until:
            return False
        if fault.kind == "stall scheduler":
            self.scheduler.stalled_until = until
            return True
        if not self._may_scheduler_crash():
            return False
        self.scheduler.is_alive = False
        self.network.at(until, self._restart_scheduler)
        return True

    def _restart_scheduler(self) -> None:
        self.scheduler = Scheduler(self)

    def _may_scheduler_crash(self) -> bool:
        """Only it knows who has left, until a server knows too; and who passed a barrier, until they say."""
        left = sum(worker.is_done for worker in self.workers)
        if not left:
            return True
        known = self.scheduler.membership.state == "running" and (
            self.scheduler.membership.live("worker") == len(self.workers) - left
        )
        return known and left < len(self.workers) and not any(w.waits_at_barrier for w in self.workers)

    def _befall_others(self, fault: Fault) -> bool:
        now = self.network.now
        match fault.kind:
            case "start server":
                if sum(server.is_alive for server in self._servers) >= MOST_SERVERS:
                    return False
                self._start_server()
            case "stall worker":
                worker = self.workers[fault.target % len(self.workers)]
                if not worker.is_alive or now < self._stalled.get(worker.name, 0.0):
                    return False
                worker.stalled_until = now + min(fault.seconds, STALLED_WORKER_SECONDS)
                self._stalled[worker.name] = now + self.cluster.lease_seconds
            case "lose":
                self.network.lose(LOSS, now + min(fault.seconds, 5.0))
            case "cut":
                names = [
                    SCHEDULER,
                    *(w.name for w in self.workers),
                    *(s.name for s in self._servers if s.is_alive),
                ]
                one, other = fault.target % len(names), fault.target // len(names) % len(names)
                if one == other:
                    return False
                self.network.cut(names[one], names[other], now + fault.seconds)
        return True
