"""What a node tells a scheduler about itself: at first, and whenever one that does not know it asks."""

from __future__ import annotations

import msgspec

from .messages import Register, View


class Registration:
    """A node's side of the scheduler's return; no socket.

    Attributes:
        view: the newest that the node has; None before the first.
        barriers: how many barriers it has passed.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self.view: View | None = None
        self.barriers = 0

    def follow(self, view: View) -> None:
        """A view has come, perhaps not for the first time, nor in order."""
        if self.view is None or view.epoch > self.view.epoch:
            self.view = view

    def again(self) -> Register:
        """The registration with what a new scheduler has to learn."""
        if self.view is None:
            return self._register
        return msgspec.structs.replace(
            self._register, rank=self.view.rank, barriers=self.barriers, view=self.view
        )
