"""One run of the chaos test: a cluster trains while scheduled faults are applied to it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.chaos.job import give_way, steps_of
from tests.chaos.nodes import SERVERS, Nodes, Server
from tests.chaos.schedule import Act, Done, Event
from tests.integration.cluster import Process

SLACK_STEPS = 30
"""Steps that workers may run ahead of the next event: a replacement server has to join in time."""

LAST_STEPS = 10
"""Steps that workers take only once the scheduler is there: they could not leave the job without it."""

LOOK_SECONDS = 0.1
RUN_SECONDS = 240.0

CODES: Final[dict[Act, tuple[int, ...]]] = {"drain": (0,), "SIGTERM": (143,), "SIGSTOP, SIGCONT": (0, 1)}
"""A server's exit codes. One that was stopped for longer than its lease is told that it was lost, and exits
with 1, unless the scheduler was away and did not notice."""


@dataclass
class Run:
    """Starts a cluster, trains, and applies the events; call only :meth:`play`.

    Args:
        directory: a new one for logs and notes.
        steps: how many each worker takes.
        lease_seconds: ``cluster.lease_seconds`` of all nodes.
        events: the faults; none in an undisturbed run.
        dice: for draws during the run: victims and durations.
        apart: the scheduler is killed while nothing else happens, no event comes until it is back, and the
            job has no barriers, which need it.
    """

    directory: Path
    steps: int
    lease_seconds: float
    events: Sequence[Event]
    dice: random.Random
    apart: bool

    done: list[Done] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """The result of each worker, by rank."""

    def play(self) -> None:
        """Plays the run; what went wrong is in ``faults``."""
        self._nodes = Nodes(self.directory, self.lease_seconds)
        self._coming = deque(self.events)
        self._due_at: float | None = None
        """The time of the first coming event; None if its step is still to come."""
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._away: Done | None = None
        """The scheduler's kill, until it is back."""
        give_way(self.directory, self._gate())
        try:
            self._nodes.start_scheduler()
            for _ in range(SERVERS):
                self._nodes.start_server()
            self._nodes.start_workers(self.steps, barriers=not self.apart)
            self._disturb()
            unjoined = [f"{server.process.name} has not joined" for server in self._nodes.unjoined()]
            if not self.faults:
                self._collect()
            self.faults += unjoined
            if not self.faults:
                self._await_ends()
        finally:
            self._nodes.kill()

    # ── events ──────────────────────────────────────────────────────────────────────────────────

    def _disturb(self) -> None:
        until = time.monotonic() + RUN_SECONDS
        look_at = 0.0
        while all(worker.alive for worker in self._nodes.workers) and not self.faults:
            now = time.monotonic()
            if now > until:
                self.faults.append(f"not over after {RUN_SECONDS:g} s")
            due = [action for at, action in self._later if at <= now]
            self._later = [(at, action) for at, action in self._later if at > now]
            for action in due:
                action()
            if now > look_at:
                self._look(now)
                look_at = now + LOOK_SECONDS
            if self._coming:
                self._advance(time.monotonic())
            elif not (self._later or self._away or self._nodes.unjoined()):
                give_way(self.directory, self.steps)
            time.sleep(0.004)

    def _advance(self, now: float) -> None:
        event = self._coming[0]
        if self._due_at is None:
            if len(steps_of(self.directory, 0)) >= event.step and self._possible(event):
                # The gate opens first, so that workers are in the middle of a step.
                give_way(self.directory, self._gate(1))
                self._due_at = now + event.delay_seconds
        elif now >= self._due_at and self._possible(event):
            self._coming.popleft()
            self._due_at = None
            self._act(event)

    def _possible(self, event: Event) -> bool:
        if self.apart and self._away:
            return False
        if event.act == "join":
            return True
        if event.act == "scheduler":
            return not self._away and not (self.apart and self._is_disturbed())
        # Members only leave by events, so the scheduler need not be asked, and may be away.
        return len(self._nodes.unharmed()) >= 2

    def _act(self, event: Event) -> None:
        done = Done(event.act, event.step, time.monotonic())
        self.done.append(done)
        if event.act == "join":
            self._note(f"step {event.step}: {self._nodes.start_server().process.name} shall join")
        elif event.act == "scheduler":
            self._note(f"step {event.step}: SIGKILL of {self._nodes.scheduler.name}")
            self._nodes.scheduler.kill()
            self._away = done
            self._after(self.dice.uniform(0, 2 * self.lease_seconds), self._nodes.start_scheduler)
        else:
            victim = self.dice.choice(self._nodes.unharmed())
            victim.harm = done
            self._note(f"step {event.step}: {event.act} of {victim.process.name}, rank {victim.rank}")
            self._harm(victim, event.act)
            self._after(self.dice.uniform(0, self.lease_seconds), self._replace)

    def _harm(self, victim: Server, act: Act) -> None:
        pid = victim.process.pid
        if act == "drain":
            self._drain(victim)
        elif act in ("SIGKILL", "SIGTERM"):
            os.kill(pid, signal.Signals[act])
        else:
            os.kill(pid, signal.SIGSTOP)
            second = signal.Signals[act.partition(", ")[2]]
            stopped_seconds = self.dice.uniform(1.5, 3) * self.lease_seconds
            self._after(stopped_seconds, lambda: os.kill(pid, second))

    def _drain(self, victim: Server) -> None:
        drain = self._nodes.start_drain(victim.rank)

        def look_after(process: Process = drain) -> None:
            if process.alive:
                self._after(LOOK_SECONDS, look_after)
            elif process.wait() != 0 and victim.process.alive:
                # The scheduler may have been killed meanwhile, or those who had to take the slots.
                self._note(f"{process.name} ended with {process.wait()}: {process.log.strip()}")
                self._after(self.lease_seconds, lambda: self._drain(victim))

        self._after(LOOK_SECONDS, look_after)

    def _replace(self) -> None:
        """Starts a server in place of one that is gone, unless another has joined instead."""
        if sum(server.harm is None for server in self._nodes.servers) < SERVERS:
            self._nodes.start_server()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    def _gate(self, passed: int = 0) -> int:
        """How far the workers may go, once the first ``passed`` events are due."""
        ahead = list(self._coming)[passed:]
        return min(self.steps - LAST_STEPS, ahead[0].step + SLACK_STEPS if ahead else self.steps)

    # ── what the cluster looks like ─────────────────────────────────────────────────────────────

    def _look(self, now: float) -> None:
        self._look_at_ends(now)
        status = self._nodes.status()
        if status is None or status.state != "running":
            return
        if self._away:
            self._away.until = now
            self._away = None
            self._note("the scheduler is back")
        ranks = {
            node.pid: node.rank
            for node in status.nodes
            if node.role == "server" and node.state == "present" and node.slots
        }
        for server in self._nodes.servers:
            server.rank = ranks.get(server.process.pid, server.rank)

    def _look_at_ends(self, now: float) -> None:
        training = len(steps_of(self.directory, 0)) < self.steps
        for server in self._nodes.servers:
            if server.process.alive:
                continue
            if server.harm is None and training:
                self.faults.append(f"{server.process.name} ended by itself with {server.process.wait()}")
            elif server.harm and not server.harm.until and server.harm.act in ("drain", "SIGTERM"):
                server.harm.until = now

    def _is_disturbed(self) -> bool:
        """True while the effects of an event last."""
        ending = any(server.harm and server.process.alive for server in self._nodes.servers)
        return ending or bool(self._later) or len(self._nodes.unharmed()) < SERVERS

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    def _collect(self) -> None:
        for worker in self._nodes.workers:
            if (code := worker.wait()) != 0:
                self.faults.append(f"{worker.name} ended with {code}: {worker.log.strip()[-500:]}")
                continue
            digest, loss, shared = worker.result()
            self.digests.append(digest)
            if not 0 < loss < 1:
                self.faults.append(f"{worker.name} ended with loss {loss}")
            if shared < self.steps * 64 * 1024:
                self.faults.append(f"{worker.name} and servers read only {shared:.0f} bytes in shared memory")
        if self._coming:
            self.faults.append(f"the workers ended before {list(self._coming)}")

    def _await_ends(self) -> None:
        expected: list[tuple[Process, tuple[int, ...]]] = [(self._nodes.scheduler, (0,))]
        expected += [(server.process, (0,)) for server in self._nodes.unharmed()]
        for server in self._nodes.servers:
            if server.harm and server.harm.act in CODES:
                expected.append((server.process, CODES[server.harm.act]))
        for process, codes in expected:
            if (code := process.wait()) not in codes:
                self.faults.append(f"{process.name} ended with {code}, expected {codes}")

    def _note(self, text: str) -> None:
        with (self.directory / "events.log").open("a") as log:
            log.write(f"{time.monotonic():.3f} {text}\n")
