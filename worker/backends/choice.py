"""Choice of a scheme for one tensor, by predicted cost. Pure.

The choice follows from two numbers that all ranks know when a round has ended: the rows that all ranks
together have pushed, and how many distinct rows these are. So ranks make the same choice without messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zenps.schemes import costs
from zenps.schemes.base import Scheme
from zenps.schemes.traffic import Links, Tensor

MARGIN: Final = 1.1
"""How much faster another scheme must be: the formulas ignore CPU time and are not much more exact."""

ROUNDS: Final = 4
"""In how many consecutive rounds it must be faster: one unusual batch is no reason to change."""

WEIGHT: Final = 0.25
"""Weight of the newest round in the moving means; they are about as steady as means of the last seven."""

NEGOTIATION_MESSAGES: Final = 3
"""Messages of the negotiation before a round among workers: to a server, back, and from rank 0."""


class Table(NamedTuple):
    """The shape of a sparse tensor: rows, elements of a row, bytes of an element."""

    rows: int
    columns: int
    item_bytes: int


class Change(NamedTuple):
    """A tensor changes its scheme from its next round on; with the seconds predicted for both schemes."""

    before: Scheme
    after: Scheme
    before_seconds: float
    after_seconds: float


class Choice:
    """The choice for one tensor. Ranks that note the same rounds make the same choices.

    Args:
        links: the cluster's; the same on all ranks.
        candidates: the schemes to choose from; the first round takes the first one.

    Attributes:
        scheme: of the next round.
        pushed: moving mean of the rows that one rank pushes.
        union: moving mean of the distinct rows that all ranks together push.
    """

    def __init__(self, links: Links, candidates: Sequence[Scheme]) -> None:
        self._links = links
        self._candidates = candidates
        self.reset()

    def reset(self) -> None:
        """Begins anew, because a round has failed here: other ranks may have noted it.

        If they differ in their scheme from now on, their next round fails on all, and all begin anew.
        """
        self._table: Table | None = None
        self._rounds = 0
        """Consecutive rounds in which another scheme would have been faster."""
        self.scheme = self._candidates[0]
        self.pushed = self.union = 0.0

    def note(self, table: Table, pushed: int, union: int) -> Change | None:
        """Notes a round that has ended with a result.

        Args:
            table: the shape of the tensor.
            pushed: rows that all ranks together have pushed.
            union: distinct rows among these. 0 is ignored: no rank had any rows. So are rows of no columns.
        """
        if not union or not table.columns:
            return None
        if table != self._table:
            self._table, self.pushed, self.union = table, pushed / self._links.workers, float(union)
        else:
            self.pushed += WEIGHT * (pushed / self._links.workers - self.pushed)
            self.union += WEIGHT * (union - self.union)
        seconds = {scheme.name: self._seconds(scheme, table) for scheme in self._candidates}
        fastest = min(self._candidates, key=lambda scheme: seconds[scheme.name])
        if seconds[self.scheme.name] <= MARGIN * seconds[fastest.name]:
            self._rounds = 0
            return None
        self._rounds += 1
        if self._rounds < ROUNDS:
            return None
        before, self.scheme, self._rounds = self.scheme, fastest, 0
        return Change(before, fastest, seconds[before.name], seconds[fastest.name])

    def _seconds(self, scheme: Scheme, table: Table) -> float:
        links = self._links
        tensor = Tensor(
            rows=table.rows,
            columns=table.columns,
            item_bytes=table.item_bytes,
            density=min(self.pushed / table.rows, 1.0),
            # No candidate sends a partial union (that of some ranks only).
            unions=(min(self.union / table.rows, 1.0),) * (links.workers - 1).bit_length(),
        )
        cost = costs.predict(scheme.name, tensor.permuted(links), links)
        messages = NEGOTIATION_MESSAGES if scheme.engine == "peers" else 0
        return cost.seconds + messages * links.latency_seconds
