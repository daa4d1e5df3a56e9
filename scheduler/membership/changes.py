"""Change log of the job and its nodes, for the status page. No socket, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from zenps.wire.scheduler_messages import Change

from .members import Node
from .states import JobState

KEPT: Final = 32
"""Older changes are dropped."""

INTERVAL_SECONDS: Final = 0.25
"""How often states are compared. Shorter states, such as confirming, may be missed."""

FEW: Final = 3
"""If more nodes than this change to the same state at once, they are counted and not named."""


class Changes:
    """The latest changes of the states of the job and its nodes, found by comparison."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str, str, int]] = deque(maxlen=KEPT)
        self._job: tuple[JobState, int] = ("gathering", 0)
        self._nodes: dict[bytes, tuple[Node, str]] = {}
        self._next_update = -math.inf

    def update(self, members: Iterable[Node], state: JobState, epoch: int, now: float) -> None:
        """Records what has changed. Nodes without a rank are left out."""
        if now < self._next_update:
            return
        self._next_update = now + INTERVAL_SECONDS
        before = self._nodes
        self._nodes = {node.peer: (node, node.state) for node in members if node.rank >= 0}
        changed = [node for node, was in self._nodes.values() if before.get(node.peer) != (node, was)]
        # Members forget nodes that another node replaces, or that torchrun restarts.
        gone = [
            node
            for peer, (node, was) in before.items()
            if peer not in self._nodes and was not in ("left", "lost")
        ]
        for role in ("server", "worker"):
            self._keep([node for node in gone if node.role == role], role, "left", epoch, now)
            for became in ("waiting", "present", "leaving", "left", "lost"):
                nodes = [node for node in changed if (node.role, node.state) == (role, became)]
                self._keep(nodes, role, became, epoch, now)
        if (state, epoch) != self._job:
            self._job = (state, epoch)
            self._kept.append((now, "job", state, epoch))

    def newest_first(self, now: float) -> tuple[Change, ...]:
        """Returns the recorded changes."""
        return tuple(
            Change(round(now - then, 3), who, state, epoch)
            for then, who, state, epoch in reversed(self._kept)
        )

    def _keep(self, nodes: list[Node], role: str, became: str, epoch: int, now: float) -> None:
        whom = [str(node.member) for node in sorted(nodes, key=lambda node: node.rank)]
        for who in whom if len(whom) <= FEW else [f"{len(whom)} {role}s"]:
            self._kept.append((now, who, became, epoch))
