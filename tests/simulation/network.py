"""Simulated network in virtual time: delays, reorders, duplicates and loses messages, by one seed."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

PROMPT_SECONDS = 0.01
SLOW = 0.05
"""The share of messages that take up to ``slow_seconds``, so that any two may arrive in either order."""


class Frame:
    """A simulated frame: a value for each unit instead of a tensor's bytes."""

    def __init__(self, values: dict[int, object]) -> None:
        self.values = values
        self.nbytes = 64 * len(values)


OVERWRITTEN = -1
"""The content of shared memory that its owner has reused."""


class Lent:
    """A frame in its sender's shared memory; the receiver reads what is there at the time."""

    def __init__(self, frame: Frame) -> None:
        self.nbytes = frame.nbytes
        self._frame = weakref.ref(frame)
        self._units = tuple(frame.values)

    @property
    def values(self) -> dict[int, object]:
        frame = self._frame()
        return dict.fromkeys(self._units, OVERWRITTEN) if frame is None else frame.values


Frames = Sequence[Frame | Lent]


class Party(Protocol):
    """A sender and receiver of messages."""

    name: bytes
    is_alive: bool
    is_replaced: bool
    loses_all: bool
    stalled_until: float

    def receive(self, sender: bytes, message: msgspec.Struct, frames: Frames) -> None: ...


class Network:
    """The network and the clock: a heap of future events.

    Args:
        rng: the only source of randomness.
        slow_seconds: how long a message may take.
        duplicates: the probability that a message arrives twice.
        bytes_per_second: of a slow link, for frames alone; 0: no link is slow. Each way of a connection is
            slow with a probability of one half: then what a peer pushes, or what it is sent, is queued.
        must_arrive: True for a message that may be neither lost nor slow.
    """

    def __init__(
        self,
        rng: random.Random,
        slow_seconds: float,
        duplicates: float,
        bytes_per_second: float,
        must_arrive: Callable[[bytes, bytes, msgspec.Struct], bool],
    ) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._slow_seconds = slow_seconds
        self._duplicates = duplicates
        self._bytes_per_second = bytes_per_second
        self._must_arrive = must_arrive
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._parties: dict[bytes, Party] = {}
        self._cuts: dict[frozenset[bytes], float] = {}
        self._is_slow: dict[tuple[bytes, bytes], bool] = {}
        self._sent_at: dict[tuple[bytes, bytes], float] = {}
        """When a slow link will have sent what is queued for it."""
        self._loss = 0.0
        self._loss_until = 0.0
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def interleaving(self) -> str:
        """A digest of all deliveries, in order."""
        return self._digest.hexdigest()

    def add(self, party: Party) -> None:
        """Makes ``party`` reachable; it replaces the one that had its name."""
        if party.name in self._parties:
            self._parties[party.name].is_replaced = True
        self._parties[party.name] = party

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedules ``action``."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._numbers), action))

    def step(self) -> bool:
        """Runs the next event; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True

    def cut(self, one: bytes, other: bytes, until: float) -> None:
        """Loses all messages between these two until then."""
        self._cuts[frozenset((one, other))] = until

    def lose(self, probability: float, until: float) -> None:
        """Loses any message with this probability until then."""
        self._loss, self._loss_until = probability, until

    def send(self, sender: Party, receiver: bytes, message: msgspec.Struct, frames: Frames) -> None:
        """Delivers a message later, once or twice, or loses it."""
        self.counts["sent"] += 1
        if self._must_arrive(sender.name, receiver, message):
            self._deliver_after(PROMPT_SECONDS, sender, receiver, message, frames)
            return
        if frames and self._bytes_per_second:
            self._send_slowly(sender, receiver, message, frames)
        else:
            self._send(sender, receiver, message, frames)

    def queued(self, sender: bytes, receiver: bytes) -> bool:
        """True while something waits in the sender's queue."""
        return self._sent_at.get((sender, receiver), 0.0) > self.now

    def _send_slowly(self, sender: Party, receiver: bytes, message: msgspec.Struct, frames: Frames) -> None:
        """Sends a message once those before it are sent. The queue is lost with the sender's process."""
        link = sender.name, receiver
        if not self._is_slow.setdefault(link, self._rng.random() < 0.5):
            self._send(sender, receiver, message, frames)
            return
        size_bytes = sum(frame.nbytes for frame in frames)
        sent_at = max(self._sent_at.get(link, 0.0), self.now) + size_bytes / self._bytes_per_second
        self._sent_at[link] = sent_at

        def send() -> None:
            if sender.is_alive:
                self._send(sender, receiver, message, frames)

        self.at(sent_at, send)

    def _send(self, sender: Party, receiver: bytes, message: msgspec.Struct, frames: Frames) -> None:
        is_cut = self._cuts and self.now < self._cuts.get(frozenset((sender.name, receiver)), 0.0)
        if is_cut or (self.now < self._loss_until and self._rng.random() < self._loss):
            self.counts["lost"] += 1
            return
        self._deliver_after(self._delay(), sender, receiver, message, frames)
        if self._rng.random() < self._duplicates:
            self.counts["duplicated"] += 1
            self._deliver_after(self._delay(), sender, receiver, message, frames)

    def _delay(self) -> float:
        slow = self._rng.random() < SLOW
        return self._rng.random() * (self._slow_seconds if slow else PROMPT_SECONDS)

    def _deliver_after(
        self,
        seconds: float,
        sender: Party,
        receiver: bytes,
        message: msgspec.Struct,
        frames: Frames,
    ) -> None:
        def deliver() -> None:
            party = self._parties.get(receiver)
            # Messages of a process arrive before those of its successor at the same address.
            if party is None or not party.is_alive or sender.is_replaced or sender.loses_all:
                self.counts["to nobody"] += 1
            elif self.now < party.stalled_until:
                self.at(party.stalled_until, deliver)
            else:
                self._note(sender.name, receiver, message)
                party.receive(sender.name, message, frames)

        self.at(self.now + seconds, deliver)

    def _note(self, sender: bytes, receiver: bytes, message: msgspec.Struct) -> None:
        self.counts["received"] += 1
        what = [
            getattr(message, field, "") for field in ("ring_epoch", "tensor", "step", "chunk", "sequence")
        ]
        self._digest.update(f"{sender!r}{receiver!r}{type(message).__name__}{what}".encode())
