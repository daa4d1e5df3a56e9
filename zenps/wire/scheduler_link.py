"""Connection of a node to the scheduler: registers, then renews the lease by heartbeats."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator

import msgspec
import zmq

from zenps.config.settings import ClusterConfig
from zenps.config.sources import restarts_from_environment
from zenps.errors import DeadlineError, MismatchError, PeerLostError, ProtocolError, UsageError, ZenPSError
from zenps.keys import Keys
from zenps.observe import log
from zenps.observe.clock import ClockFilter, now_ns
from zenps.termination import TERMINATION

from .addresses import why_unreachable
from .curve import Handshakes
from .fields import Late, Load, Role
from .frames import MAX_ENVELOPE_BYTES, SAME_VERSION, Decoder, encode
from .identity import new_identity
from .registration import Registration
from .scheduler_messages import (
    FromScheduler,
    Heartbeat,
    HeartbeatReply,
    Leave,
    Refused,
    Register,
    SharedView,
    Stop,
    ToScheduler,
    View,
    WhoAreYou,
)
from .sockets import Socket, connect, open_dealer
from .views import decode_view

logger = logging.getLogger("zenps.link")

# A node is lost after one lease without a heartbeat. With four in that time, three may be late.
BEATS_PER_LEASE = 4

# A node waits longer than the scheduler, whose error names the missing nodes.
MARGIN_SECONDS = 5.0

_REFUSALS: dict[str, type[ZenPSError]] = {
    "mismatch": MismatchError,
    "deadline": DeadlineError,
    "usage": UsageError,
    "lost": PeerLostError,
}


class SchedulerLink:
    """The connection to the scheduler, over one DEALER. Used by one thread at a time.

    Args:
        ctx: where the socket is opened.
        cluster: names the scheduler, the job, and the lease.
        role: the node's role; it becomes part of the routing identity.
        keys: the node's, or None.
    """

    def __init__(
        self, ctx: zmq.Context[Socket], cluster: ClusterConfig, role: Role, keys: Keys | None = None
    ) -> None:
        self.ctx = ctx
        self._cluster = cluster
        self._scheduler = cluster.scheduler.removeprefix("tcp://")
        identity = new_identity(role)
        self.socket = open_dealer(ctx, identity, MAX_ENVELOPE_BYTES, keys)
        self._handshakes = Handshakes(self.socket)
        connect(self.socket, self._scheduler)
        self._keys = keys
        self.identity = identity
        self._decoder: Decoder[FromScheduler] = Decoder(cluster.job, FromScheduler)
        self._next_beat = 0.0
        self._heard = self._next_check = time.monotonic()
        self._is_missed = False
        self._other_version = ""
        self.clock = ClockFilter()
        """Estimates from heartbeats how far the scheduler's clock is ahead."""
        self.registration: Registration
        """Set by :meth:`join`."""

    def join(self, register: Register, *, has_left: bool = False) -> View:
        """Registers and waits for the first view; sends heartbeats meanwhile.

        Args:
            register: of this node.
            has_left: True if this process has left a job of this scheduler before. Then the scheduler is
                awaited for a lease only: it has most likely ended with that job.

        Raises:
            DeadlineError: some nodes did not come in time (the error names them), or the scheduler is silent.
            MismatchError: a shared setting, or the protocol's version, differs from the scheduler's.
            UsageError: the rank is taken, the cluster is already complete, or its job has ended.
            PeerLostError: a node was lost before all nodes had the first view.
            ConfigError: the scheduler does not list this node's key, or only one of the two has keys.
        """
        try:
            return self._await_view(register, has_left)
        except (KeyboardInterrupt, SystemExit):
            # Another process may take the rank at once, and not only when this lease has run out.
            self.leave()
            self._handshakes.close()
            self.socket.close()
            raise
        finally:
            self._handshakes.close()

    def _await_view(self, register: Register, has_left: bool) -> View:
        self.registration = Registration(register)
        self.send(register)
        began = time.monotonic()
        timeout_seconds = self._cluster.rendezvous_seconds + MARGIN_SECONDS
        is_joining = is_silence_logged = False
        while True:
            TERMINATION.check()
            # A scheduler that answers reports itself when the time is over. That may be much later, because
            # workers may join again.
            since = began if is_joining else max(began, self._heard)
            left_seconds = since + timeout_seconds - (now := time.monotonic())
            if left_seconds <= 0:
                break
            if self.is_beat_due(now):
                self.beat(now, epoch=0, load={})
            is_silent = self._heard <= began and now > began + self._cluster.lease_seconds
            if is_silent and has_left:
                raise UsageError(
                    f"no answer of the scheduler at {self._scheduler} in {self._cluster.lease_seconds:g} s: "
                    "this process has left its job before, and a job ends when all its workers have left; "
                    "set cluster.rejoin_seconds for the scheduler, start another cluster before "
                    "zenps.init(), or call zenps.shutdown() only at the end"
                )
            if is_silent and not is_silence_logged:
                is_silence_logged = True
                logger.warning("%s", self._silence(self._cluster.lease_seconds))
            self._handshakes.wait(min(left_seconds, self.seconds_to_beat(now)))
            self._handshakes.raise_for(self._keys, self._scheduler)
            for message in self.receive():
                if (view := self._view_in(message)) is not None:
                    return view
                if isinstance(message, HeartbeatReply):
                    is_joining = message.joining > 0
            if self._other_version and self._heard <= began:
                who = f"the scheduler at {self._scheduler}"
                raise MismatchError(f"{who} has another version of the protocol: {self._other_version}")
        if is_joining:
            self.leave()
            raise DeadlineError(
                f"the job has not admitted this worker within {self._cluster.rendezvous_seconds:g} s: its "
                "workers must call zenps.TrainingState.commit() after each step"
            )
        raise DeadlineError(self._silence(self._cluster.rendezvous_seconds))

    def _view_in(self, message: FromScheduler) -> View | None:
        """Returns the first view if this message is one; raises if there will be none."""
        match message:
            case View():
                return message
            case Refused(kind=kind, reason=reason):
                raise _REFUSALS[kind](reason)
            case Stop():
                self.leave()
                raise UsageError(
                    "this job has ended: its workers had left before this server came, and no others have "
                    "joined; start a scheduler for the next job, and this server again"
                )
        return None

    def _silence(self, seconds: float) -> str:
        reason = why_unreachable(self._scheduler)
        advice = (
            "check that it runs, that cluster.scheduler is right here and on its host (no loopback address, "
            "if nodes are on several hosts), and that firewalls let its port through"
            if reason
            else f"check that a scheduler of job {self._cluster.job!r} listens there; {SAME_VERSION}"
        )
        found = f"no answer from the scheduler at {self._scheduler} within {seconds:g} s"
        return f"{found} ({reason or 'but connections are accepted'}): {advice}{self._handshakes.hint}"

    def send(self, message: ToScheduler) -> None:
        """Queues a message; ZeroMQ delivers it when the scheduler can be reached.

        Raises:
            PeerLostError: the scheduler has refused the connection.
            ConfigError: the same while this node joins, with the reason.
        """
        try:
            self.socket.send(encode(self._cluster.job, message))
        except zmq.Again:
            self._handshakes.raise_for(self._keys, self._scheduler)
            raise PeerLostError(
                f"the scheduler at {self._scheduler} no longer admits this node; see its log and keys"
            ) from None

    def receive(self) -> Iterator[FromScheduler]:
        """The messages that have arrived. A message that the caller does not take stays for the next call.

        A message that cannot be decoded is dropped and logged once. If the scheduler does not know this node,
        the node registers again.
        """
        while self.socket.poll(0):
            envelope, *frames = [memoryview(frame) for frame in self.socket.recv_multipart()]
            try:
                message = self._decoder.decode(envelope, frames)
                if isinstance(message, SharedView):
                    message = decode_view(message, frames)
            except ProtocolError as error:
                log.once(logger, self._scheduler, "dropped a message of the scheduler: %s", error)
                if error.reason == "version":
                    self._other_version = error.detail
                continue
            if self.registration.is_of_another(message):
                log.once(logger, "another", "dropped a message of another scheduler at %s", self._scheduler)
                continue
            self._heard = time.monotonic()
            match message:
                case WhoAreYou(incarnation=incarnation):
                    if (register := self.registration.answer(incarnation)) is not None:
                        self.clock.reset()
                        self.send(register)
                    continue
                case HeartbeatReply(heartbeat_ns=sent_ns, clock_ns=there_ns):
                    self.clock.add(sent_ns, there_ns, now_ns())
                case View():
                    self.registration.follow(message)
            yield message

    def check(self, now: float) -> None:
        """Checks that the scheduler still answers heartbeats. Call it as often as heartbeats are due.

        The scheduler may end and be restarted while rounds go on. But without it no lost node is noticed.

        Raises:
            PeerLostError: it has been silent for ``cluster.rendezvous_seconds``, at least a lease.
        """
        # Who was stopped itself could not hear the scheduler, and what came meanwhile may not be read yet.
        stopped_seconds = max(now - self._next_check, 0.0)
        self._heard = min(self._heard + stopped_seconds, now)
        lease = self._cluster.lease_seconds
        self._next_check = now + lease / BEATS_PER_LEASE
        silent = now - self._heard
        most = max(lease, self._cluster.rendezvous_seconds)
        who = f"the scheduler at {self._scheduler}"
        if silent > most:
            raise PeerLostError(
                f"{who} is lost: silent for {silent:.1f} s, expected at most {most:g} s "
                "(cluster.rendezvous_seconds); see its log"
            )
        if (is_missed := silent > lease) != self._is_missed:
            self._is_missed = is_missed
            if is_missed:
                logger.warning("%s has been silent for a lease; it has %.0f s to return", who, most - silent)
            else:
                logger.warning("%s has returned", who)

    def is_beat_due(self, now: float) -> bool:
        """True if it is time for a heartbeat; ``now`` is :func:`time.monotonic`."""
        return now >= self._next_beat

    def beat(
        self,
        now: float,
        epoch: int,
        load: Load,
        late: Late | None = None,
        watermark: int = 0,
        wait: tuple[str, float] = ("", 0.0),
    ) -> None:
        """Sends a heartbeat at once, for example after a new view.

        ``wait`` is what this node waits for, and for how long.
        """
        self._next_beat = now + self._cluster.lease_seconds / BEATS_PER_LEASE
        self.registration.on_beat()
        incarnation = self.registration.incarnation
        self.send(Heartbeat(epoch, load, late or {}, watermark, now_ns(), *wait, incarnation))

    def seconds_to_beat(self, now: float) -> float:
        """How long a poll may last until the next heartbeat is due."""
        return max(self._next_beat - now, 0.0)

    def leave(self) -> None:
        """Tells the scheduler that this node leaves; the socket's linger lets the message arrive.

        Does nothing once the socket is closed.
        """
        if self.socket.closed:
            return
        with contextlib.suppress(PeerLostError):  # the scheduler has refused this node before
            self.send(Leave())


def new_register(
    role: Role, rank: int | None, address: str, metrics: str, settings: dict[str, str | int | float]
) -> Register:
    """The registration of this process. A worker's also has torchrun's count of restarts."""
    wanted = -1 if rank is None else rank
    register = Register(role, wanted, socket.gethostname(), os.getpid(), address, metrics, settings)
    if role == "server":
        return register
    generation, restarts = restarts_from_environment()
    return msgspec.structs.replace(register, generation=generation, restarts=restarts)
