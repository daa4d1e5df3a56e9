"""Which view is the newest: its epoch, its ring, and how it is shown to a node."""

from __future__ import annotations

import msgspec
import numpy as np

from zenps.partition.ring import rebalance
from zenps.wire.messages import View

from .members import Members, Node


class Views:
    """The views of one job, one after the other.

    Args:
        members: those that a view is of.
        goes_on: whether workers that are present do without one that has left.

    Attributes:
        epoch: of the newest; 0 before the first.
        ring: the epoch since when servers and owners are these.
        admitted: the epoch in which joining workers were let in last; 0 if none ever were.
        owners: ``[4096]`` uint16, the rank of each slot's server; empty before the first view.
    """

    def __init__(self, members: Members, is_elastic: bool) -> None:
        self._members = members
        self._goes_on = is_elastic
        self.epoch = 0
        self.ring = 0
        self.admitted = 0
        self.owners = np.zeros(0, dtype=np.uint16)

    def begin(self, *, same_ring: bool) -> None:
        """Members are others than before. Without a server there is no new ring, either."""
        self.epoch += 1
        servers = self._members.present("server")
        if servers and not same_ring:
            self.ring = self.epoch
            before = self.owners if self.owners.size else None
            self.owners = rebalance(before, [node.rank for node in servers])

    def restore(self, view: View) -> None:
        """Goes on from a view that a scheduler before this one has made."""
        self.epoch, self.ring, self.admitted = view.epoch, view.ring_epoch, view.admitted
        self.owners = np.frombuffer(view.owners, dtype="<u2").astype(np.uint16)

    def show(self, receiver: Node) -> View:
        """The newest view as one node gets it.

        Its workers are all that rounds wait for: one that has left is missed, unless others go on without it.
        """
        states = ("present",) if self._goes_on else ("present", "left")
        nodes = self._members.with_state("worker", *states)
        workers = tuple(node.member for node in nodes)
        if receiver.role == "worker":
            # Whoever knows a routing identity can take its connection over; a worker needs nobody's.
            workers = tuple(msgspec.structs.replace(worker, identity=b"") for worker in workers)
        servers = (node.member for node in self._members.present("server"))
        return View(
            epoch=self.epoch,
            rank=receiver.rank,
            workers=workers,
            servers=tuple(msgspec.structs.replace(server, identity=b"") for server in servers),
            owners=self.owners.astype("<u2").tobytes(),
            ring_epoch=self.ring,
            left=tuple(node.rank for node in nodes if node.state == "left"),
            admitted=self.admitted,
        )
