"""Simulated processes, without sockets: their base classes, the scheduler, and an operator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from zenps.scheduler.membership.actions import Send
from zenps.scheduler.membership.tracker import Membership
from zenps.server.rounds.tracker import ServerRounds
from zenps.wire.registration import Registration
from zenps.wire.scheduler_messages import (
    Drain,
    DrainReply,
    FromScheduler,
    Heartbeat,
    Refused,
    Register,
    View,
    WhoAreYou,
)
from zenps.worker.rounds.tracker import WorkerRounds

from .network import Frames

if TYPE_CHECKING:
    from .simulation import Simulation

SCHEDULER = b"scheduler"
OPERATOR = b"operator"
TICK_SECONDS = 0.5


class Violation(AssertionError):
    """The protocol has broken a guarantee."""


class Parts(msgspec.Struct, frozen=True):
    """The classes under test; a test replaces one by a faulty subclass."""

    membership: type[Membership] = Membership
    rounds: type[ServerRounds] = ServerRounds
    worker_rounds: type[WorkerRounds] = WorkerRounds
    registration: type[Registration] = Registration


class Node(ABC):
    """A simulated process."""

    def __init__(self, simulation: Simulation, name: bytes) -> None:
        self.simulation = simulation
        self.network = simulation.network
        self.name = name
        self.is_alive = True
        self.is_replaced = False
        self.loses_all = False
        """True if messages in flight are lost with it, as when its machine dies."""
        self.stalled_until = 0.0
        self.network.add(self)

    @property
    def now(self) -> float:
        return self.network.now

    def send(self, receiver: bytes, message: msgspec.Struct, frames: Frames = ()) -> None:
        self.network.send(self, receiver, message, frames)

    @abstractmethod
    def receive(self, sender: bytes, message: Any, frames: Frames) -> None:
        """Handles a message."""

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs ``action`` periodically while the process lives, but not while it is stalled."""

        def fire() -> None:
            if not self.is_alive:
                return
            if self.now < self.stalled_until:
                # A process that wakes up first reads the messages that came meanwhile.
                self.network.at(self.stalled_until + 1e-6, fire)
                return
            action()
            self.network.at(self.now + seconds, fire)

        # A random first time, so that processes do not act all at once.
        self.network.at(self.now + seconds * self.simulation.rng.random(), fire)


class Scheduler(Node):
    """A scheduler: a process around :class:`Membership`, which starts without any state."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, SCHEDULER)
        self.started = self.now
        self.is_restarting = False
        """True if this process has died, and another is to follow."""
        self.membership = simulation.parts.membership(
            "job", simulation.cluster, {}, self.now, incarnation=next(simulation.incarnations)
        )
        self.heard: dict[bytes, float] = {}
        """When a known member was last heard."""
        self.known: dict[bytes, float] = {}
        """When a member became known."""
        self._failed_at = math.inf
        self._next_tick = self.now + TICK_SECONDS
        self.every(TICK_SECONDS, self._tick)

    def receive(self, sender: bytes, message: Any, frames: Frames) -> None:
        before = self.membership.state
        if self.now > self._next_tick:
            self.membership.on_late(self.now - self._next_tick, self.now)
            self._next_tick = self.now
        self._execute(self.membership.on_message(sender, message, self.now))
        self._check_quorum(before)
        if self.membership.name_of(sender):
            self.heard[sender] = self.now
            self.known.setdefault(sender, self.now)

    @property
    def is_over(self) -> bool:
        """True if the job has ended, well or not."""
        return self.membership.state in ("stopped", "failed")

    def has_present(self, name: bytes) -> bool:
        """True if a worker is a member, as far as this process knows."""
        return any(node.peer == name for node in self.membership._job.members.present("worker"))

    def _tick(self) -> None:
        before = self.membership.state
        self._execute(self.membership.on_tick(self.now, max(self.now - self._next_tick, 0.0)))
        self._next_tick = self.now + TICK_SECONDS
        self._check_quorum(before)
        # After a failure, nodes that register in the meantime are told why.
        ends_at = self._failed_at + self.simulation.cluster.lease_seconds
        if self.membership.state == "stopped" or self.now > ends_at:
            self.is_alive = False

    def _check_quorum(self, before: str) -> None:
        """It continues a job only with most of its workers: another scheduler may have the others."""
        newest = self.membership._job.recovery.newest
        if before != "recovering" or self.membership.state not in ("confirming", "running") or not newest:
            return
        expected = {worker.rank for worker in newest.workers} - {*newest.left}
        here = {node.rank for node in self.membership._job.members.present("worker")} & expected
        # One that has left is at no other scheduler, though another may have its rank here already.
        left = [each for each in self.simulation.workers if each.ended == "left"]
        here |= {worker.rank for worker in newest.workers if any(each.is_called(worker) for each in left)}
        if self.simulation.script.scenario == "continue" and 2 * len(here) < len(expected):
            raise Violation(f"a scheduler continues with workers {here} of {expected}")

    def _execute(self, sends: Sequence[Send]) -> None:
        if self.membership.state == "failed" and self._failed_at == math.inf:
            self._failed_at = self.now
            self.simulation.judge.on_failed(self.membership.failure)
        for send in sends:
            self.send(send.peer, send.message)


class Member(Node):
    """A worker or server: it registers, sends heartbeats, and registers again when it is asked to."""

    def __init__(
        self, simulation: Simulation, name: bytes, register: Register, view: View | None = None
    ) -> None:
        super().__init__(simulation, name)
        self.registration = simulation.parts.registration(register)
        self.view = view
        if view is not None:
            self.registration.follow(view)
        self._heard = self.now
        self.send(SCHEDULER, self.registration.again())
        self.every(simulation.cluster.lease_seconds / 4, self.beat)

    @property
    def watermark(self) -> int:
        return 0

    def beat(self) -> None:
        if self.now - self._heard > self.simulation.cluster.rendezvous_seconds:
            self.end("the scheduler is lost")
            return
        self.registration.on_beat()
        epoch, incarnation = self.view.epoch if self.view else 0, self.registration.incarnation
        self.send(SCHEDULER, Heartbeat(epoch, {}, {}, self.watermark, incarnation=incarnation))

    @abstractmethod
    def end(self, reason: str) -> None:
        """Ends the process, because it was told to or cannot continue."""

    @abstractmethod
    def on_view(self, view: View) -> None:
        """Handles a view that is newer than those before."""

    def on_scheduler(self, message: FromScheduler) -> None:
        if self.registration.is_of_another(message):
            return
        self._heard = self.now
        match message:
            case WhoAreYou(incarnation=incarnation):
                if (register := self.registration.answer(incarnation)) is not None:
                    self.send(SCHEDULER, register)
            case View():
                self.registration.follow(message)
                if self.view is None or message.epoch > self.view.epoch:
                    self.view = message
                    self.on_view(message)
                self.beat()
            case Refused(reason=reason):
                self.end(reason)


class Operator(Node):
    """An operator who drains servers, and asks until there is an answer."""

    PATIENCE_SECONDS = 60.0

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, OPERATOR)
        self._wanted: dict[int, float] = {}
        self.every(2.0, self._ask)

    def drain(self, rank: int) -> None:
        self._wanted[rank] = self.now

    def receive(self, sender: bytes, message: Any, frames: Frames) -> None:
        if isinstance(message, DrainReply):
            self._wanted.clear()

    def _ask(self) -> None:
        for rank, since in list(self._wanted.items()):
            if self.now > since + self.PATIENCE_SECONDS:
                del self._wanted[rank]
            else:
                self.send(SCHEDULER, Drain(rank))
