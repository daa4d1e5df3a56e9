"""Choice of a scheme for one tensor, by predicted cost. Pure.

The choice follows from what all ranks know alike once a round has ended: how many rows all of them together
have pushed, and how many different ones these are. So ranks make the same choice without telling one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from zenps.schemes import costs, traffic
from zenps.schemes.base import Scheme
from zenps.schemes.traffic import Links

MARGIN: Final = 1.1
"""By how much another scheme has to win: the formulas know no CPU time, and are not much better than that."""

ROUNDS: Final = 4
"""How many rounds one after the other it has to win: a batch of another kind is no reason to change."""

WEIGHT: Final = 0.25
"""Of the newest round in the means, which so are about as steady as those of the last seven."""

NEGOTIATION_MESSAGES: Final = 3
"""Those that a round among workers waits for beside its own: to a server, back, and from rank 0."""


class Table(NamedTuple):
    """The shape of a sparse tensor: its rows, their elements, and the bytes of one of these."""

    rows: int
    columns: int
    item_bytes: int


class Change(NamedTuple):
    """A tensor takes another scheme from its next round on, with the seconds predicted for both."""

    before: Scheme
    after: Scheme
    before_seconds: float
    after_seconds: float


class Choice:
    """Of one tensor. Ranks that note the same rounds make the same choices.

    Args:
        links: the cluster's; the same on all ranks.
        candidates: the schemes to choose from, the one to begin with first.

    Attributes:
        scheme: of the next round.
        pushed: the rows of a rank in the mean of the latest rounds.
        union: those of all ranks.
    """

    def __init__(self, links: Links, candidates: Sequence[Scheme]) -> None:
        self._links = links
        self._candidates = candidates
        self._table: Table | None = None
        self._rounds = 0
        """For so many one after the other, another scheme would have been faster."""
        self.scheme = candidates[0]
        self.pushed = self.union = 0.0

    def note(self, table: Table, pushed: int, union: int) -> Change | None:
        """A round has ended.

        Args:
            table: what was summed.
            pushed: the rows that all ranks together have pushed.
            union: how many different ones. 0 says nothing: no rank had any, or the round has failed.
        """
        if not union:
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
        tensor = traffic.Tensor(
            rows=table.rows,
            columns=table.columns,
            item_bytes=table.item_bytes,
            density=min(self.pushed / table.rows, 1.0),
            # None of the candidates sends the union of some ranks.
            unions=(min(self.union / table.rows, 1.0),) * (links.workers - 1).bit_length(),
            imbalance=traffic.expected_imbalance(links.parts, self.pushed),
        )
        cost = costs.predict(scheme.name, tensor, links)
        messages = NEGOTIATION_MESSAGES if scheme.engine == "peers" else 0
        return cost.seconds + messages * links.latency_seconds
