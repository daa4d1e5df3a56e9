"""What became of the job and its nodes lately, for people. No socket, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from zenps.wire.messages import Change

from ..members import Node
from ..states import State

KEPT: Final = 32

LOOK_SECONDS: Final = 0.25
"""How often to look. What changes twice in between, as while servers confirm a view, is of no interest."""

FEW: Final = 3
"""Nodes of which the same has become at once are named up to here, and counted beyond."""


class Changes:
    """Compares the cluster with how it was before."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str, str, int]] = deque(maxlen=KEPT)
        self._job: tuple[State, int] = ("gathering", 0)
        self._nodes: dict[bytes, tuple[Node, str]] = {}
        self._next_look = -math.inf

    def look(self, members: Iterable[Node], state: State, epoch: int, now: float) -> None:
        """Keeps what is new. A node that has no rank yet is not."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        before = self._nodes
        self._nodes = {node.peer: (node, node.state) for node in members if node.rank >= 0}
        changed = [node for node, was in self._nodes.values() if before.get(node.peer) != (node, was)]
        # Members forget whom another replaces, or torchrun restarts.
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

    def lately(self, now: float) -> tuple[Change, ...]:
        """The latest, newest first."""
        return tuple(
            Change(round(now - then, 3), who, state, epoch)
            for then, who, state, epoch in reversed(self._kept)
        )

    def _keep(self, nodes: list[Node], role: str, became: str, epoch: int, now: float) -> None:
        whom = [str(node.member) for node in sorted(nodes, key=lambda node: node.rank)]
        for who in whom if len(whom) <= FEW else [f"{len(whom)} {role}s"]:
            self._kept.append((now, who, became, epoch))
