"""Which scheme a tensor takes next, where ``sync.scheme`` is ``auto``. Pure.

It follows from what all ranks know alike once a round has ended: how many rows all of them together have
pushed, and how many different ones these are. So they come to the same choice, and need not tell one another.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from zenps.schemes import costs, traffic
from zenps.schemes.registry import AUTO, SCHEMES, SchemeName
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

    before: SchemeName
    after: SchemeName
    before_seconds: float
    after_seconds: float


class Choice:
    """Of one tensor. Ranks that note the same rounds make the same choices.

    Args:
        links: the cluster's; the same on all ranks.

    Attributes:
        scheme: of the next round.
        pushed: the rows of a rank in the mean of the latest rounds.
        union: those of all ranks.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._table: Table | None = None
        self._rounds = 0
        """For so many one after the other, another scheme would have been faster."""
        self.scheme: SchemeName = AUTO[0]
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
        seconds = {name: self._seconds(name, table) for name in AUTO}
        fastest = min(AUTO, key=lambda name: seconds[name])
        if seconds[self.scheme] <= MARGIN * seconds[fastest]:
            self._rounds = 0
            return None
        self._rounds += 1
        if self._rounds < ROUNDS:
            return None
        before, self.scheme, self._rounds = self.scheme, fastest, 0
        return Change(before, fastest, seconds[before], seconds[fastest])

    def _seconds(self, scheme: SchemeName, table: Table) -> float:
        links = self._links
        tensor = traffic.Tensor(
            rows=table.rows,
            columns=table.columns,
            item_bytes=table.item_bytes,
            density=min(self.pushed / table.rows, 1.0),
            # Of the schemes of AUTO, none sends the union of some ranks.
            unions=(min(self.union / table.rows, 1.0),) * (links.workers - 1).bit_length(),
            imbalance=traffic.expected_imbalance(links.parts, self.pushed),
        )
        cost = costs.predict(scheme, tensor, links)
        messages = NEGOTIATION_MESSAGES if SCHEMES[scheme].exchange == "peers" else 0
        return cost.seconds + messages * links.latency_seconds
