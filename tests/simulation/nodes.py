"""A scheduler and its servers: the pure parts with what their processes do around them, and no socket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from zenps.errors import ProtocolError
from zenps.scheduler.membership import Membership, Send
from zenps.server.rounds import Aggregate, Held, Reply, Rounds
from zenps.wire.messages import (
    Drain,
    DrainReply,
    Heartbeat,
    Leave,
    Push,
    Refused,
    Register,
    Result,
    Stop,
    View,
    WhoAreYou,
)
from zenps.wire.registration import Registration
from zenps.worker.exchange import Exchange

from .network import Frame

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["SCHEDULER", "UNITS", "Member", "Node", "Operator", "Parts", "Scheduler", "Server", "Violation"]

SCHEDULER = b"scheduler"
OPERATOR = b"operator"
TICK_SECONDS = 0.5
UNITS = 8
"""The rows of every tensor; a ring gives each to a server."""


class Violation(AssertionError):
    """The protocol has broken a promise."""


class Parts(msgspec.Struct, frozen=True):
    """What is simulated; a test puts one with a mistake in its place."""

    membership: type[Membership] = Membership
    rounds: type[Rounds] = Rounds
    exchange: type[Exchange] = Exchange
    registration: type[Registration] = Registration


class Node:
    """One process."""

    def __init__(self, simulation: Simulation, name: bytes) -> None:
        self.simulation = simulation
        self.network = simulation.network
        self.name = name
        self.is_alive = True
        self.is_replaced = False
        self.stalled_until = 0.0
        self.network.add(self)

    @property
    def now(self) -> float:
        return self.network.now

    def send(self, receiver: bytes, message: msgspec.Struct, frames: Sequence[Frame] = ()) -> None:
        self.network.send(self, receiver, message, frames)

    def receive(self, sender: bytes, message: Any, frames: Sequence[Frame]) -> None:
        raise NotImplementedError

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something as long as the process lives; not while it is stalled."""

        def fire() -> None:
            if not self.is_alive:
                return
            if self.now < self.stalled_until:
                # One that wakes up reads first what has come meanwhile.
                self.network.at(self.stalled_until + 1e-6, fire)
                return
            action()
            self.network.at(self.now + seconds, fire)

        # Not all at once.
        self.network.at(self.now + seconds * self.simulation.rng.random(), fire)


class Scheduler(Node):
    """A process around :class:`Membership`, from nothing."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, SCHEDULER)
        self.started = self.now
        self.membership = simulation.parts.membership("job", simulation.cluster, {}, self.now)
        self.heard: dict[bytes, float] = {}
        """When a member that it knows was last heard."""
        self.every(TICK_SECONDS, self._tick)

    def receive(self, sender: bytes, message: Any, frames: Sequence[Frame]) -> None:
        self._execute(self.membership.on_message(sender, message, self.now))
        if self.membership.name_of(sender):
            self.heard[sender] = self.now

    def _tick(self) -> None:
        self._execute(self.membership.on_tick(self.now))
        if self.membership.state == "stopped":
            self.is_alive = False

    def _execute(self, sends: Sequence[Send]) -> None:
        for send in sends:
            self.send(send.peer, send.message)


class Member(Node):
    """A worker or server: it registers, beats, and registers again when it is asked to."""

    def __init__(self, simulation: Simulation, name: bytes, register: Register) -> None:
        super().__init__(simulation, name)
        self.registration = simulation.parts.registration(register)
        self.view: View | None = None
        self._heard = self.now
        self.send(SCHEDULER, register)
        self.every(simulation.cluster.lease_seconds / 4, self.beat)

    @property
    def wave(self) -> int:
        return 0

    def beat(self) -> None:
        if self.now - self._heard > self.simulation.cluster.rendezvous_seconds:
            self.end("the scheduler is lost")
            return
        self.send(SCHEDULER, Heartbeat(self.view.epoch if self.view else 0, {}, {}, self.wave))

    def end(self, reason: str) -> None:
        """It was told to, or cannot go on."""
        raise NotImplementedError

    def on_view(self, view: View) -> None:
        """A view that is newer than those before."""
        raise NotImplementedError

    def on_scheduler(self, message: msgspec.Struct) -> None:
        self._heard = self.now
        match message:
            case WhoAreYou():
                self.send(SCHEDULER, self.registration.again())
            case View():
                self.registration.follow(message)
                if self.view is None or message.epoch > self.view.epoch:
                    self.view = message
                    self.on_view(message)
                self.beat()
            case Refused(reason=reason):
                self.end(reason)


class Server(Member):
    """A process around :class:`Rounds`."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        address = f"server-{number}"
        self.rounds = simulation.parts.rounds(simulation.script.budget_bytes, math.inf)
        self.is_drained = False
        """Whether an operator has asked for that."""
        self._peers: dict[int, bytes] = {}
        super().__init__(
            simulation, address.encode(), Register("server", -1, "host", number, address, "", {})
        )
        self.every(TICK_SECONDS, self._tick)

    def end(self, reason: str) -> None:
        if self.view is not None:
            self.send(SCHEDULER, Leave())
        self.is_alive = False

    def on_view(self, view: View) -> None:
        self._peers = {worker.rank: worker.identity for worker in view.workers}
        departed = {rank: f"rank {rank} left the job" for rank in view.left}
        self._execute(self.rounds.on_view(view.ring, self._peers, departed, self.now))

    def receive(self, sender: bytes, message: Any, frames: Sequence[Frame]) -> None:
        match message:
            case Push():
                self._on_push(sender, message, frames)
            case Stop():
                self.end("stopped")
            case _:
                self.on_scheduler(message)

    def _on_push(self, sender: bytes, push: Push, frames: Sequence[Frame]) -> None:
        if self._peers.get(push.rank) != sender:
            return
        assert self.view is not None
        if push.epoch > self.view.ring:
            raise Violation(f"{self.name!r} of ring {self.view.ring} got {push}")
        (frame,) = frames
        try:
            actions = self.rounds.on_push(Held(sender, push, frame, frame.nbytes), self.now)
        except ProtocolError:  # of an older ring
            self.network.counts["pushes of an older ring"] += 1
            return
        self._execute(actions)

    def _tick(self) -> None:
        self._execute(self.rounds.on_tick(self.now))
        self.check()

    def check(self) -> None:
        """What it holds is what it counts, and within bounds."""
        held = [*self.rounds._open.values(), *self.rounds._ended.values()]
        size = sum(round_.size_bytes for round_ in held)
        if size != self.rounds.held_bytes:
            raise Violation(f"{self.name!r} holds {size} bytes, and counts {self.rounds.held_bytes}")
        most = max(self.simulation.script.budget_bytes, self.simulation.largest_round_bytes)
        if size > most + sum(round_.size_bytes for round_ in held if round_.is_again):
            raise Violation(f"{self.name!r} holds {size} bytes; expected at most {most}")

    def _execute(self, actions: Sequence[Aggregate | Reply]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case Aggregate() as round_:
                    todo += self._aggregate(round_)
                case Reply(peers=peers, message=message, frames=frames):
                    for peer in peers:
                        self.send(peer, message, frames)  # type: ignore[arg-type]

    def _aggregate(self, round_: Aggregate) -> Sequence[Aggregate | Reply]:
        payloads: list[Any] = [held.payload for held in round_.pushes]
        values: dict[int, object] = {
            unit: tuple([payload.values[unit] for payload in payloads]) for unit in payloads[0].values
        }
        key = round_.key
        self.simulation.check_answer(key.tensor, key.step, values)
        push = round_.pushes[0].push
        result = Result(push.epoch, key.tensor, key.step, key.chunk, len(values), "none")
        frames: Any = [Frame(values)]
        return self.rounds.finish(key, result, frames, self.now)


class Operator(Node):
    """Somebody who wants a server drained, and asks until there is an answer."""

    PATIENCE_SECONDS = 60.0

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, OPERATOR)
        self._wanted: dict[int, float] = {}
        self.every(2.0, self._ask)

    def drain(self, rank: int) -> None:
        self._wanted[rank] = self.now

    def receive(self, sender: bytes, message: Any, frames: Sequence[Frame]) -> None:
        if isinstance(message, DrainReply):
            self._wanted.clear()

    def _ask(self) -> None:
        for rank, since in list(self._wanted.items()):
            if self.now > since + self.PATIENCE_SECONDS:
                del self._wanted[rank]
            else:
                self.send(SCHEDULER, Drain(rank))


def owners_of_units(view: View) -> list[int]:
    """Which server owns each of a tensor's units: those at every 512th slot."""
    owners = np.frombuffer(view.owners, dtype="<u2")
    return [int(rank) for rank in owners[:: len(owners) // UNITS]]
