"""A worker and its training: :class:`Exchange` with what a process does around it, and no socket."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from zenps.wire.messages import Barrier, BarrierReply, HeartbeatReply, Leave, Push, Register, View
from zenps.worker.round import Action, Deliver, Fail, Outgoing, Round, SendPush

from .network import Frame
from .nodes import SCHEDULER, TICK_SECONDS, UNITS, Member, Violation, owners_of_units

if TYPE_CHECKING:
    from .simulation import Simulation

__all__ = ["TENSORS", "Worker"]

TENSORS = 3
BARRIER_EVERY = 5
COMPACTION_SECONDS = 0.05

Program = Generator[Callable[[], bool], None, None]


class Worker(Member):
    """One rank.

    Attributes:
        is_done: it has trained, and left.
        error: why it could not.
        entered: the last barrier that it has come to.
    """

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.rank = rank
        self.is_done = False
        self.error = ""
        self.entered = 0
        self.waits_at_barrier = False
        self.exchange = simulation.parts.exchange(math.inf, self._recut)
        self._rng = random.Random(simulation.rng.random())
        self._awaited: dict[tuple[str, int], dict[int, object]] = {}
        """The answers so far, of rounds that have not ended."""
        self._servers: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._owners: list[int] = []
        self._program = self._train()
        self._is_ready: Callable[[], bool] = lambda: self.view is not None
        super().__init__(
            simulation, f"worker-{rank}".encode(), Register("worker", rank, "host", 1000 + rank, "", "", {})
        )
        self.every(TICK_SECONDS, self._tick)

    # ── the process ─────────────────────────────────────────────────────────────────────────────

    @property
    def wave(self) -> int:
        return self.exchange.wave

    def beat(self) -> None:
        super().beat()
        if self.waits_at_barrier:
            self.send(SCHEDULER, Barrier(self.entered))

    def end(self, reason: str) -> None:
        self.error = reason
        self.is_alive = False
        self.simulation.on_error(self, reason)

    def receive(self, sender: bytes, message: Any, frames: Sequence[Frame]) -> None:
        if sender != SCHEDULER:
            if sender in self._ranks:  # else its connection was closed
                server: Any = self._ranks[sender]
                self._execute(self.exchange.on_reply(server, message, frames, self.now))  # type: ignore[arg-type]
        else:
            self.on_scheduler(message)
            match message:
                case BarrierReply(sequence=sequence, error=error):
                    self._on_barrier(sequence, error)
                case HeartbeatReply(wave=wave):
                    self.exchange.on_wave(wave)
        self._go_on()

    def on_view(self, view: View) -> None:
        self._owners = owners_of_units(view)
        self._servers = {server.rank: server.address.encode() for server in view.servers}
        self._ranks = {address: rank for rank, address in self._servers.items()}
        self._execute(self.exchange.on_view(view.ring, view.servers, self.now))

    def _on_barrier(self, sequence: int, error: str) -> None:
        if not self.waits_at_barrier or sequence != self.entered:
            return
        if error:
            self.end(error)
            return
        self.simulation.check_barrier(sequence)
        self.registration.barriers = sequence
        self.waits_at_barrier = False

    def _tick(self) -> None:
        self._execute(self.exchange.on_tick(self.now))
        kept = [tensor for tensor, _ in self.exchange._kept]
        if len(kept) != len(set(kept)):
            raise Violation(f"{self.name!r} keeps {sorted(self.exchange._kept)}; expected one of each tensor")
        self._go_on()

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────

    def _cut(self, tensor: str, step: int, values: dict[int, object], again: bool) -> list[Outgoing]:
        """As many chunks for each server as the step makes it, and each chunk's units."""
        assert self.view is not None
        chunks = self.simulation.chunks(tensor, step)
        outgoing = []
        for server in self._servers:
            own = [unit for unit in range(UNITS) if self._owners[unit] == server]
            for chunk in range(chunks):
                units = own[len(own) * chunk // chunks : len(own) * (chunk + 1) // chunks]
                push = Push(
                    epoch=self.view.ring,
                    rank=self.rank,
                    tensor=tensor,
                    step=step,
                    chunk=chunk,
                    chunks=chunks,
                    kind="sparse",
                    dtype="float32",
                    shape=(UNITS,),
                    span=len(units),
                    columns=1,
                    rows=len(units),
                    codec="coo",
                    average=False,
                    again=again,
                )
                frames: Any = [Frame({unit: values[unit] for unit in units})]
                outgoing.append(Outgoing(server, push, frames))
        return outgoing

    def _recut(self, round_: Round) -> list[Outgoing]:
        key = round_.tensor, round_.step
        if key in self._awaited:
            self._awaited[key] = {}
        values: Any = round_.sent
        return self._cut(*key, values, again=True)

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendPush(outgoing=out):
                    self.send(self._servers[out.server], out.push, out.frames)  # type: ignore[arg-type]
                case Deliver(round=round_, frames=frames, last=last):
                    self._on_answer(round_, frames, last)
                case Fail(round=round_, error=error):
                    self.simulation.on_error(self, f"{round_.tensor} {round_.step}: {error}")
                    self._awaited.pop((round_.tensor, round_.step), None)

    def _on_answer(self, round_: Round, frames: Sequence[Any], last: bool) -> None:
        key = round_.tensor, round_.step
        if key not in self._awaited:
            raise Violation(f"{self.name!r} was given an answer to {key}, which it does not wait for")
        answer = self._awaited[key]
        for frame in frames:
            if twice := answer.keys() & frame.values.keys():
                raise Violation(f"{self.name!r} was given units {sorted(twice)} of {key} twice")
            answer.update(frame.values)
        if last:
            if len(answer) != UNITS:
                raise Violation(f"{self.name!r} was given only {sorted(answer)} of {key}")
            self.simulation.check_answer(*key, answer)
            self.simulation.ended[key] += 1
            del self._awaited[key]

    # ── the program ─────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        while self.is_alive and self._is_ready():
            following = next(self._program, None)
            if following is None:
                return
            self._is_ready = following

    def _sleep(self, seconds: float) -> Callable[[], bool]:
        until = self.now + seconds

        def wake() -> None:
            if self.is_alive and self.now < self.stalled_until:
                self.network.at(self.stalled_until, wake)
            elif self.is_alive:
                self._go_on()

        self.network.at(until, wake)
        return lambda: self.now >= until

    def _train(self) -> Program:
        script = self.simulation.script
        steps = [0] * TENSORS
        for step in range(script.steps):
            # Not every tensor in every step: then nothing but waves settles its last round.
            tensors = [number for number in range(TENSORS) if step % (1 + 2 * number) == 0]
            self._rng.shuffle(tensors)
            for number in tensors:
                yield from self._push(f"t{number}", steps[number])
                steps[number] += 1
            if not script.runs_ahead:
                yield lambda: not self._awaited
            if step % BARRIER_EVERY == BARRIER_EVERY - 1:
                yield from self._barrier()
        yield lambda: not self._awaited
        if script.settles:
            yield lambda: self.now > self.simulation.quiet_from
            yield self._sleep(self.simulation.settle_seconds)
            self.simulation.check_settled()
        yield from self._barrier()
        yield lambda: self.simulation.may_leave(self.name)
        self.send(SCHEDULER, Leave())
        self.is_done, self.is_alive = True, False

    def _push(self, tensor: str, step: int) -> Program:
        # A name is in flight at most once.
        yield lambda: not any(name == tensor for name, _ in self._awaited)
        values: dict[int, object] = {
            unit: self.simulation.value(self.rank, tensor, step, unit) for unit in range(UNITS)
        }
        assert self.view is not None
        round_ = Round(tensor, step, self.view.ring, self._cut(tensor, step, values, again=False), values)
        # The ring may change before it is submitted.
        yield self._sleep(COMPACTION_SECONDS * self._rng.random())
        self._awaited[tensor, step] = {}
        self._execute(self.exchange.submit(round_, self.now))

    def _barrier(self) -> Program:
        self.entered += 1
        self.waits_at_barrier = True
        self.send(SCHEDULER, Barrier(self.entered))
        yield lambda: not self.waits_at_barrier
