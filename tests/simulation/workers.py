"""Simulated worker: :class:`WorkerRounds` in a process without sockets."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zenps.errors import MismatchError
from zenps.wire.fields import LAST_BARRIER
from zenps.wire.messages import Push, Wanted
from zenps.wire.scheduler_messages import Admit, Barrier, BarrierReply, HeartbeatReply, Leave, Register, View
from zenps.wire.scheduler_messages import Member as ViewMember
from zenps.wire.tensors import cut_fragments
from zenps.worker.rounds.states import (
    Action,
    Deliver,
    Fail,
    Outgoing,
    Reshard,
    Round,
    SendGiveUp,
    SendPush,
)

from .network import OVERWRITTEN, Frame, Frames, Lent
from .nodes import SCHEDULER, TICK_SECONDS, Member, Violation
from .promises import Answer, Contribution, Era, Values
from .resharding import Resharding
from .servers import UNITS, owners_of_units
from .training import ODD, TENSORS, Program, Training

if TYPE_CHECKING:
    from .simulation import Simulation

COMPACTION_SECONDS = 0.05
JOIN_PATIENCE_SECONDS = 5.0
RESTART_SECONDS = 2.0

Learn = Callable[[str, Answer], None]
End = Literal["done", "left", "failed", "crashed"]


class _Awaited(NamedTuple):
    """A round whose answer the training waits for: the values received so far, and who learns them."""

    answer: Answer
    learn: Learn


class Worker(Member):
    """A simulated worker process.

    Attributes:
        number: of the process, among all that have ever run.
        job: among those of the name, the one that it is a member of; 0 before its first view.
        rank: the one that it wants, then the one that it has; -1 for any.
        ended: how it ended; None while it runs.
        error: the error that ended it.
        was_silent: True if it was stalled for so long that it may be taken for lost.
        gone_at: when it ended, or was stalled for so long.
        restarts_after: how long after its end another process takes its place.
        joining: the number of workers that wait for admission, as the scheduler reported last.
        entered: the last barrier that it has reached.
        resharded: how often a round in flight was resharded for a new ring.
        recalled: how often a round that had ended was pushed again, for another rank.
    """

    def __init__(
        self, simulation: Simulation, number: int, rank: int, generation: int = 0, restarts: int = 0
    ) -> None:
        self.number = number
        # torchrun would run in each pod, and count restarts for it alone; the supervisor counts them for all.
        self.is_pod = simulation.script.pods and simulation.script.scenario != "restart"
        self.host, self.pid = (f"pod-{rank}", 1) if self.is_pod else ("host", 1000 + number)
        self.job = 0
        self.rank = rank
        self.generation = generation
        self.ended: End | None = None
        self.error = ""
        self.was_silent = False
        self.gone_at = math.inf
        self.restarts_after = RESTART_SECONDS
        self.joining = 0
        self.entered = self.resharded = self.recalled = 0
        self.waits_at_barrier = False
        self.is_joining = False
        self.began = simulation.network.now
        self.rounds = simulation.parts.worker_rounds(math.inf)
        self._rng = random.Random(simulation.rng.random())
        self._awaited: dict[tuple[str, int], _Awaited] = {}
        self._resharding = Resharding(self, simulation.script.reshard_seconds, self._rng)
        self._steps: Counter[str] = Counter()
        """The rounds of each tensor, since the last admission."""
        self._admitted = 0
        self._asks: Admit | None = None
        """What it says at the end of a step, until it gets its way."""
        self._servers: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._owners: list[int] = []
        register = Register(
            "worker", rank, self.host, self.pid, "", "", {}, generation=generation, restarts=restarts
        )
        super().__init__(simulation, f"worker-{number}".encode(), register)
        self.training = Training(self, self._rng)
        self._program = self.training.run()
        self._is_ready: Callable[[], bool] = lambda: self.view is not None
        self.every(TICK_SECONDS, self._tick)

    # ── the process ─────────────────────────────────────────────────────────────────────────────

    @property
    def watermark(self) -> int:
        return self.rounds.watermark

    @property
    def era(self) -> Era:
        """Within what it counts its steps."""
        return Era(self.job, self.generation, self.view.admitted if self.view else 0)

    @property
    def is_gone(self) -> bool:
        """True if other nodes may take it for lost."""
        return self.was_silent or self.ended in ("left", "failed", "crashed")

    def is_called(self, member: ViewMember) -> bool:
        """True if a member has its name. That of a pod is that of each process that it has had."""
        return (member.host, member.pid) == (self.host, self.pid)

    def beat(self) -> None:
        super().beat()
        rendezvous = self.simulation.cluster.rendezvous_seconds
        if self.view is None and self.now > self.began + rendezvous + JOIN_PATIENCE_SECONDS:
            self.end("the job has not admitted this worker")
        if self.waits_at_barrier:
            self.send(SCHEDULER, Barrier(self.entered, self._admitted))
        if self._asks is not None:
            self.send(SCHEDULER, self._asks)

    def end(self, reason: str) -> None:
        """An error that its script does not handle."""
        if self.is_alive:
            self.error = reason
            self.simulation.on_error(self, reason)
            self.leave("failed")

    def leave(self, how: End) -> None:
        """Says good-bye and ends."""
        self.send(SCHEDULER, Leave())
        self._end(how)

    def crash(self) -> None:
        """Ends without a word."""
        self._end("crashed")

    def _end(self, how: End) -> None:
        self.ended, self.is_alive = how, False
        self.gone_at = min(self.gone_at, self.now)

    def receive(self, sender: bytes, message: Any, frames: Frames) -> None:
        if sender != SCHEDULER:
            if sender in self._ranks:  # else its connection was closed
                self._on_reply(self._ranks[sender], message, frames)
        else:
            if self.registration.is_of_another(message):
                return
            self.on_scheduler(message)
            match message:
                case BarrierReply(sequence=sequence, error=error) if message.admitted == self._admitted:
                    self._on_barrier(sequence, error)
                case HeartbeatReply(watermark=watermark, joining=joining):
                    self.joining = joining
                    self.rounds.on_watermark(watermark)
        self._go_on()

    def _on_reply(self, server: int, message: Any, frames: Any) -> None:
        kept = self.rounds.kept
        actions = self.rounds.on_reply(server, message, frames, self.now)
        if isinstance(message, Wanted):  # which ends no round
            self.recalled += kept - self.rounds.kept
        self.execute(actions)

    def on_view(self, view: View) -> None:
        if not self._owners:
            self.rank, self.is_joining = view.rank, view.admitted > 0
            self.job = self.simulation.promises.job_of(self)
        if view.admitted > self._admitted:
            self._admitted = view.admitted
            self._asks = None
            self._steps.clear()
            self.entered = self.registration.barriers = self.joining = 0
            self.execute(self.rounds.reset())
        self._owners = owners_of_units(view)
        self._servers = {server.rank: server.address.encode() for server in view.servers}
        self._ranks = {address: rank for rank, address in self._servers.items()}
        ranks = frozenset(worker.rank for worker in view.workers)
        actions = self.rounds.on_view(view.ring_epoch, view.servers, ranks)
        self.resharded += sum(isinstance(action, Reshard) for action in actions)
        self.execute(actions)
        self.simulation.on_moment("view", self)

    def _tick(self) -> None:
        behind = {rank for rank, name in self._servers.items() if self.network.queued(self.name, name)}
        self.execute(self.rounds.on_tick(self.now, behind))
        kept = [tensor for tensor, _ in self.rounds._kept]
        if len(kept) != len(set(kept)):
            raise Violation(f"{self.name!r} keeps {sorted(self.rounds._kept)}; expected one of each tensor")
        self._go_on()

    def _go_on(self) -> None:
        while self.is_alive and self._is_ready():
            following = next(self._program, None)
            if following is None:
                return
            self._is_ready = following

    # ── rounds ──────────────────────────────────────────────────────────────────────────────────

    def is_idle(self) -> bool:
        """True if it waits for no answer."""
        return not self._awaited

    def push(self, tensor: str, payload: object, learn: Learn) -> Program:
        """Begins a round, and has its answer learned when it comes."""
        # A name is in flight at most once.
        yield lambda: not any(name == tensor for name, _ in self._awaited)
        step = self._steps[tensor]
        self._steps[tensor] += 1
        said = Contribution(self.number, self.rank, self.era, tensor, step, payload)
        values = self.simulation.promises.contribute(said)
        assert self.view is not None
        outgoing = self.shard(tensor, step, values, again=False)
        round_ = Round(tensor, step, self.view.ring_epoch, outgoing, values)
        # The ring may change before it is submitted.
        yield self.sleep(COMPACTION_SECONDS * self._rng.random())
        self._awaited[tensor, step] = _Awaited({}, learn)
        self.execute(self.rounds.submit(round_, self.now))

    def shard(self, tensor: str, step: int, values: Values, *, again: bool) -> list[Outgoing]:
        """As many chunks for each server as the step makes it, and each chunk's units."""
        assert self.view is not None
        odd = self.rank % 2 if tensor.startswith(ODD) else 0
        chunks = _chunks(tensor, step) + odd
        outgoing = []
        for server in self._servers:
            own = [unit for unit in range(UNITS) if self._owners[unit] == server]
            for chunk in range(chunks):
                units = own[len(own) * chunk // chunks : len(own) * (chunk + 1) // chunks]
                cuts = cut_fragments(0, len(units), self.simulation.script.message_units)
                for fragment, (begin, end) in enumerate(cuts):
                    push = Push(
                        ring_epoch=self.view.ring_epoch,
                        rank=self.rank,
                        tensor=tensor,
                        step=step,
                        chunk=chunk,
                        chunks=chunks,
                        kind="sparse",
                        dtype="float32",
                        shape=(UNITS + odd,),
                        span=len(units),
                        columns=1,
                        rows=end - begin,
                        codec="coo",
                        average=False,
                        again=again,
                        fragment=fragment,
                        fragments=len(cuts),
                    )
                    frames: Any = [Frame({unit: values[unit] for unit in units[begin:end]})]
                    outgoing.append(Outgoing(server, push, frames))
        return outgoing

    def execute(self, actions: Sequence[Action]) -> None:
        """Does what its rounds ask for."""
        for action in actions:
            if not self.is_alive:
                return
            match action:
                case SendPush(outgoing=out):
                    self._push(out)
                case SendGiveUp(server=server, message=message):
                    self.send(self._servers[server], message)
                case Reshard(round=round_):
                    # Until that is done, it is given no answer.
                    if (awaited := self._awaited.get((round_.tensor, round_.step))) is not None:
                        awaited.answer.clear()
                    self._resharding.begin(round_)
                case Deliver(round=round_, frames=frames, last=last, others=others):
                    self._on_answer(round_, [*frames, *chain(*(rest for _, rest in others))], last)
                case Fail(round=round_, error=MismatchError()) if round_.tensor.startswith(ODD):
                    del self._awaited[round_.tensor, round_.step]  # its script catches the error
                case Fail(round=round_, error=error):
                    self.simulation.judge.on_failed_round(self, round_, str(error))
                    # A process that ends does so in the midst of things.
                    self._resharding.finish()
                    self.end(f"{round_.tensor} {round_.step}: {error}")

    def _push(self, out: Outgoing) -> None:
        self.simulation.on_moment("push", self)
        push = out.push
        if self.view is None or push.ring_epoch != self.view.ring_epoch:
            raise Violation(f"{self.name!r} pushes under a ring that is not that of {self.view}: {push}")
        if (push.tensor, push.step) not in self.rounds._in_flight:
            raise Violation(f"{self.name!r} pushes what is not in flight: {push}")
        pushed: Any = out.frames
        self.send(self._servers[out.server], push, [Lent(frame) for frame in pushed])

    def _on_answer(self, round_: Round, frames: Sequence[Any], last: bool) -> None:
        key = round_.tensor, round_.step
        if key not in self._awaited:
            raise Violation(f"{self.name!r} was given an answer to {key}, which it does not wait for")
        answer, learn = self._awaited[key]
        for frame in frames:
            if twice := answer.keys() & frame.values.keys():
                raise Violation(f"{self.name!r} was given units {sorted(twice)} of {key} twice")
            if any(OVERWRITTEN in parts for parts in frame.values.values()):
                raise Violation(f"{self.name!r} was given what another had overwritten before it was summed")
            answer.update(frame.values)
        if last:
            if len(answer) != UNITS:
                raise Violation(f"{self.name!r} was given only {sorted(answer)} of {key}")
            self.simulation.promises.check_answer(*key, answer, self)
            self.simulation.promises.ended[self.era, *key] += 1
            del self._awaited[key]
            learn(round_.tensor, answer)

    # ── what its training waits for ─────────────────────────────────────────────────────────────

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something once the time has passed, if it lives then; not while it is stalled."""

        def wake() -> None:
            if self.is_alive and self.now < self.stalled_until:
                self.network.at(self.stalled_until, wake)
            elif self.is_alive:
                action()

        self.network.at(self.now + seconds, wake)

    def sleep(self, seconds: float) -> Callable[[], bool]:
        """Says when the time has passed."""
        until = self.now + seconds
        self.after(seconds, self._go_on)
        return lambda: self.now >= until

    def barrier(self) -> Program:
        """Waits for all others."""
        self.await_barrier(self.entered + 1)
        yield lambda: not self.waits_at_barrier

    def await_barrier(self, sequence: int) -> None:
        """Comes to a barrier, and waits there."""
        self.entered, self.waits_at_barrier = sequence, True
        self.send(SCHEDULER, Barrier(sequence, self._admitted))
        self.simulation.on_moment("barrier", self)

    def _on_barrier(self, sequence: int, error: str) -> None:
        if not (self.is_alive and self.waits_at_barrier) or sequence != self.entered:
            return
        self.waits_at_barrier = False
        if sequence == LAST_BARRIER:  # others may have left already
            return
        if error:
            self.end(error)
            return
        self.simulation.promises.check_barrier(self, sequence)
        self.registration.barriers = sequence

    def admit(self) -> Program:
        """Admits the joining workers, and numbers steps from 0 again."""
        assert self.view is not None
        self._asks = Admit(self.view.admitted)
        self.send(SCHEDULER, self._asks)
        self.simulation.on_moment("admission", self)
        yield lambda: self._asks is None


def _chunks(tensor: str, step: int) -> int:
    """The number of chunks of a server's range; as in reality, it changes from step to step."""
    tensors = [f"t{number}" for number in range(TENSORS)]
    return 1 + (tensors.index(tensor) + step // 2) % 2 if tensor in tensors else 1
