"""Registration of a node at a scheduler: the first one, and again after the scheduler was restarted."""

from __future__ import annotations

import msgspec

from .scheduler_messages import FromScheduler, Register, View, WhoAreYou


class Registration:
    """A node's registration, with all that a restarted scheduler must learn from it. It has no socket.

    Attributes:
        view: the newest view that the node has; None before the first.
        barriers: how many barriers the node has passed.
        incarnation: of the scheduler that the node follows: the last one that has asked it to register, or
            else the one that has made its first view. 0 before that.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self.view: View | None = None
        self.barriers = self.incarnation = 0
        self._is_due = True
        """False if there was no heartbeat since this node has registered last."""

    def is_of_another(self, message: FromScheduler) -> bool:
        """Returns whether a message comes from a scheduler that this node does not follow.

        Two schedulers may run, each with a part of the nodes, and a connection may lead to one and then to
        the other.
        """
        if isinstance(message, WhoAreYou):  # the node begins to follow its sender
            return False
        sender: int = getattr(message, "incarnation", 0)
        return bool(sender and self.incarnation) and sender != self.incarnation

    def follow(self, view: View) -> None:
        """Takes a view. Views may come twice, and in any order."""
        self.incarnation = self.incarnation or view.incarnation
        if self.view is None or view.epoch > self.view.epoch:
            self.view = view

    def on_beat(self) -> None:
        """A heartbeat is sent. If the registration before it is lost, its answer asks for another."""
        self._is_due = True

    def answer(self, incarnation: int = 0) -> Register | None:
        """The answer to ``register?``; None if this scheduler has had it since the last heartbeat.

        After an outage each heartbeat that was queued in it is answered by ``register?``, and a registration
        has a whole view.
        """
        if incarnation in (0, self.incarnation) and not self._is_due:
            return None
        self._is_due = False
        return self.again(incarnation)

    def again(self, incarnation: int = 0) -> Register:
        """The registration for a scheduler that does not know this node. The node follows it from now on."""
        self.incarnation = incarnation or self.incarnation
        if self.view is None:
            return self._register
        return msgspec.structs.replace(
            self._register, rank=self.view.rank, barriers=self.barriers, view=self.view
        )
