"""A server: :class:`ServerRounds` with what a process does around it, and no socket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from zenps.errors import ProtocolError
from zenps.server.reducers.base import Answer, Outcome
from zenps.server.rounds.admission import ROUND_BYTES
from zenps.server.rounds.states import Action, HeldPush, Reduce, Reply
from zenps.wire.identity import public_identity
from zenps.wire.messages import GiveUp, Push, Result
from zenps.wire.scheduler_messages import Leave, Member, Register, Stop, View
from zenps.wire.tensors import cut_fragments

from .network import OVERWRITTEN, Frame, Frames
from .nodes import SCHEDULER, TICK_SECONDS, Violation
from .nodes import Member as MemberNode

if TYPE_CHECKING:
    from .simulation import Simulation

UNITS = 8
"""The rows of every tensor; a ring gives each to a server."""
GONE = b"gone"
"""The peer of a worker whose identity no node knows any more: it receives and pushes nothing."""
NUMBER_LEFT_OVER = 900
"""That of no other server."""


class SimulatedOutcome(Outcome):
    """The same units for every rank, in fragments of ``message_units``."""

    def __init__(self, result: Result, values: dict[int, Any], message_units: int) -> None:
        self.size_bytes = Frame(values).nbytes
        cuts = cut_fragments(0, len(values), message_units)
        units = list(values)
        self._answers = []
        for fragment, (begin, end) in enumerate(cuts):
            frame: Any = Frame({unit: values[unit] for unit in units[begin:end]})
            message = structs.replace(result, rows=end - begin, fragment=fragment, fragments=len(cuts))
            self._answers.append(Answer(message, [frame]))

    def reply(self, rank: int) -> Sequence[Answer]:
        return self._answers


class Server(MemberNode):
    """A process around :class:`ServerRounds`."""

    def __init__(self, simulation: Simulation, number: int, view: View | None = None) -> None:
        address = f"server-{number}"
        self.rounds = simulation.parts.rounds(simulation.script.budget_bytes, math.inf)
        self.is_drained = False
        """Whether an operator has asked for that."""
        self._peers: dict[int, bytes] = {}
        self._largest_round_bytes = (
            ROUND_BYTES + simulation.script.workers * Frame(dict.fromkeys(range(UNITS))).nbytes
        )
        super().__init__(
            simulation, address.encode(), Register("server", -1, "host", number, address, "", {}), view
        )
        self.every(TICK_SECONDS, self._tick)

    def end(self, reason: str) -> None:
        if self.view is not None:
            self.send(SCHEDULER, Leave())
        self.is_alive = False

    def on_view(self, view: View) -> None:
        # A restarted scheduler does not know the identity of a worker that had left, and makes one up.
        names = {worker.identity: GONE for worker in view.workers if worker.rank in view.left}
        names |= {public_identity(worker.name): worker.name for worker in self.simulation.workers}
        self._peers = {worker.rank: names[worker.identity] for worker in view.workers}
        departed = {
            worker.rank: f"{worker} left the job" for worker in view.workers if worker.rank in view.left
        }
        self._execute(self.rounds.on_view(view.ring_epoch, self._peers, departed, self.now))

    def receive(self, sender: bytes, message: Any, frames: Frames) -> None:
        match message:
            case Push():
                self._on_push(sender, message, frames)
            case GiveUp():
                self._on_give_up(sender, message)
            case Stop():
                self.end("stopped")
            case _:
                self.on_scheduler(message)

    def _on_push(self, sender: bytes, push: Push, frames: Frames) -> None:
        if self._peers.get(push.rank) != sender:
            return
        assert self.view is not None
        if push.ring_epoch > self.view.ring_epoch:
            raise Violation(f"{self.name!r} of ring {self.view.ring_epoch} got {push}")
        (frame,) = frames
        try:
            actions = self.rounds.on_push(HeldPush(sender, push, frame, frame.nbytes), self.now)
        except ProtocolError:  # of an older ring
            self.network.counts["pushes of an older ring"] += 1
            return
        self._execute(actions)

    def _on_give_up(self, sender: bytes, message: GiveUp) -> None:
        for rank, peer in self._peers.items():
            if peer == sender:
                self._execute(self.rounds.on_give_up(rank, message, self.now))

    def _tick(self) -> None:
        self._execute(self.rounds.on_tick(self.now))
        self.check()

    def check(self) -> None:
        """What it holds is what it counts, and within bounds."""
        held = [*self.rounds._open.values(), *self.rounds._history]
        size = sum(round_.size_bytes for round_ in held)
        counted = self.rounds._admission.open_bytes + self.rounds._history.kept_bytes
        if size != counted:
            raise Violation(f"{self.name!r} holds {size} bytes, and counts {counted}")
        # One round opens beside those that have room and that nobody has pushed yet.
        most = max(self.simulation.script.budget_bytes, self._largest_round_bytes) + self._largest_round_bytes
        if size > most + sum(round_.size_bytes for round_ in held if round_.is_recovery):
            raise Violation(f"{self.name!r} holds {size} bytes; expected at most {most}")
        # Recovery rounds have as much again, and beyond that one for each rank.
        most += self.simulation.script.budget_bytes
        most += self.simulation.script.workers * self._largest_round_bytes
        if size > most:
            raise Violation(f"{self.name!r} holds {size} bytes; expected at most {most} in recovery")

    def _execute(self, actions: Sequence[Action]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case Reduce() as round_:
                    todo += self._reduce(round_)
                case Reply(peers=peers, message=message, frames=frames):
                    for peer in peers:
                        self.send(peer, message, frames)  # type: ignore[arg-type]

    def _reduce(self, round_: Reduce) -> Sequence[Action]:
        pushed: dict[int, dict[int, object]] = {}
        for held in round_.pushes:
            payload: Any = held.payload
            own = pushed.setdefault(held.push.rank, {})
            if own.keys() & payload.values.keys():
                raise Violation(f"{self.name!r} sums a fragment of {held.push} twice")
            own |= payload.values
        parts = list(pushed.values())
        key, units = round_.key, parts[0].keys()
        if any(part.keys() != units for part in parts):
            raise Violation(f"{self.name!r} sums what is not of the same chunk of {key}")
        values: dict[int, tuple[object, ...]] = {
            unit: tuple([part[unit] for part in parts]) for unit in units
        }
        if any(OVERWRITTEN in parts for parts in values.values()):
            self.network.counts["sums of what was overwritten"] += 1  # of which nobody may be given any
        else:
            self.simulation.promises.check_answer(key.tensor, key.step, values)
        push = round_.pushes[0].push
        result = Result(push.ring_epoch, key.tensor, key.step, key.chunk, len(values), "none")
        outcome = SimulatedOutcome(result, dict(values), self.simulation.script.message_units)
        return [*self.rounds.replies(key, outcome), *self.rounds.finish(key, outcome, self.now)]


class LeftOver(Server):
    """A server of a dead job of the same name, which waits for its scheduler. It is nobody's replacement."""

    def __init__(self, simulation: Simulation) -> None:
        workers = (Member("worker", 0, "host", 1, "", "", b"worker-of-the-dead-job"),)
        own = Member("server", 0, "host", NUMBER_LEFT_OVER, f"server-{NUMBER_LEFT_OVER}", "")
        view = View(7, 0, workers, (own,), bytes(8192), ring_epoch=7)
        super().__init__(simulation, NUMBER_LEFT_OVER, view)
        self.is_drained = True


def owners_of_units(view: View) -> list[int]:
    """Which server owns each of a tensor's units: those at every 512th slot."""
    owners = np.frombuffer(view.owners, dtype="<u2")
    return [int(rank) for rank in owners[:: len(owners) // UNITS]]
