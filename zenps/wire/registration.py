"""Registration of a node at a scheduler: the first one, and again after the scheduler was restarted."""

from __future__ import annotations

import msgspec

from .messages import Register, View


class Registration:
    """A node's registration, with what a restarted scheduler has to learn from it. Has no socket.

    Attributes:
        view: the newest view that the node has; None before the first.
        barriers: how many barriers the node has passed.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self.view: View | None = None
        self.barriers = 0

    def follow(self, view: View) -> None:
        """Takes a view. Views may come twice, and in any order."""
        if self.view is None or view.epoch > self.view.epoch:
            self.view = view

    def again(self) -> Register:
        """The registration for a scheduler that does not know this node."""
        if self.view is None:
            return self._register
        return msgspec.structs.replace(
            self._register, rank=self.view.rank, barriers=self.barriers, view=self.view
        )
