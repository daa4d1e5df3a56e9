"""Views of the cluster: the epoch, the members and the ring of servers that nodes are told."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import numpy as np

from zenps.partition.ring import rebalance
from zenps.wire.fields import SEAL_BYTES, Role
from zenps.wire.scheduler_messages import View

from .members import Members, Node


class Views:
    """The newest view of one job.

    Args:
        members: the table of nodes.
        is_elastic: True if views do not name workers that have left.
        secret: of the job's schedulers, to seal views; if it is empty, views have no seal.
        incarnation: of this scheduler.

    Attributes:
        epoch: of the newest view; 0 before the first.
        ring_epoch: the epoch in which the ring began.
        admitted: the epoch of the last admission of joining workers; 0 if there was none.
        owners: ``[4096]`` uint16, the rank of each slot's server; empty before the first view.
    """

    def __init__(self, members: Members, is_elastic: bool, secret: bytes, incarnation: int) -> None:
        self._members = members
        self._is_elastic = is_elastic
        self._secret = secret
        self._incarnation = incarnation
        self._restored = 0, 0
        """Epoch and incarnation of the view of an earlier scheduler from which this one continues."""
        self._origin = incarnation
        self.epoch = 0
        self.ring_epoch = 0
        self.admitted = 0
        self.owners = np.zeros(0, dtype=np.uint16)
        self._made: dict[Role, tuple[tuple[int, int], View]] = {}
        """By role, the newest view without the receiver's rank; and the epoch and version that it was made
        from."""

    def begin_epoch(self, *, keeps_ring: bool) -> None:
        """Members have changed: begins an epoch. If there is no server, the ring stays as it is."""
        self.epoch += 1
        servers = self._members.present("server")
        if servers and not keeps_ring:
            self.ring_epoch = self.epoch
            before = self.owners if self.owners.size else None
            self.owners = rebalance(before, [node.rank for node in servers])

    def restore(self, view: View) -> None:
        """Continues from the newest view of an earlier scheduler."""
        self.epoch, self.ring_epoch, self.admitted = view.epoch, view.ring_epoch, view.admitted
        self.owners = np.frombuffer(view.owners, dtype="<u2").astype(np.uint16)
        self._restored = view.epoch, view.incarnation
        self._origin = view.origin

    def is_of_another(self, view: View) -> bool:
        """Returns whether ``view`` is neither this scheduler's nor one that this scheduler continues."""
        if not (self._incarnation and view.incarnation) or view.incarnation == self._incarnation:
            return False
        epoch, incarnation = self._restored
        return view.epoch > epoch or (view.epoch == epoch and view.incarnation != incarnation)

    def view_for(self, receiver: Node) -> View:
        """Returns the newest view as ``receiver`` gets it. Nodes of a role share all but their own rank."""
        made_of = self.epoch, self._members.version
        if self._made.get(receiver.role, ((), None))[0] != made_of:
            self._made[receiver.role] = made_of, self._view_of(receiver.role)
        return msgspec.structs.replace(self._made[receiver.role][1], rank=receiver.rank)

    def _view_of(self, role: Role) -> View:
        """Returns the view for a role. Unless the job is elastic, it also names workers that have left, so
        rounds that wait for them fail.
        """
        states = ("present",) if self._is_elastic else ("present", "left")
        nodes = self._members.with_state("worker", *states)
        workers = tuple(node.member for node in nodes)
        if role == "worker":
            # A worker's routing identities begin with it, and whoever knows one can take over a connection.
            workers = tuple(msgspec.structs.replace(worker, identity=b"") for worker in workers)
        view = View(
            epoch=self.epoch,
            rank=0,
            workers=workers,
            servers=tuple(node.member for node in self._members.present("server")),
            owners=self.owners.astype("<u2").tobytes(),
            ring_epoch=self.ring_epoch,
            left=tuple(node.rank for node in nodes if node.state == "left"),
            admitted=self.admitted,
            incarnation=self._incarnation,
            origin=self._origin,
        )
        return msgspec.structs.replace(view, seal=self._seal_of(view))

    def is_genuine(self, view: View) -> bool:
        """Returns whether a scheduler of this job has made ``view``. Without keys, every view passes."""
        return hmac.compare_digest(view.seal, self._seal_of(view))

    def _seal_of(self, view: View) -> bytes:
        if not self._secret:
            return view.seal
        content = msgspec.msgpack.encode(msgspec.structs.replace(view, rank=0, seal=b""))
        return hashlib.blake2b(content, key=self._secret, digest_size=SEAL_BYTES).digest()
