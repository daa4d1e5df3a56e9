"""Quorum, against split brain: of two schedulers of one job, at most one has a quorum and continues the job.

A network partition may cut a scheduler off from some of its nodes, and another scheduler may be started that
those nodes reach. Each scheduler then takes the other's nodes for lost. If both continued, two halves of the
job would train separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from zenps.wire.scheduler_messages import Member, View

from .members import Members

NO_QUORUM: Final = (
    "too many for the others to continue, because another scheduler may have these; start the job again"
)


def is_quorum(part: Collection[Member], whole: Collection[Member]) -> bool:
    """Returns whether ``part`` is a quorum of the view that has the members ``whole``.

    A quorum has all workers; or more than half of the workers, and a server; or half of the workers, and more
    than half of the servers. So two parts that have no member in common are never both a quorum.
    """
    here, all_ = Counter(each.role for each in part), Counter(each.role for each in whole)
    if 0 < all_["worker"] == here["worker"]:
        return True
    workers = 2 * here["worker"] - all_["worker"]
    least = 1 if workers > 0 else all_["server"] // 2 + 1
    return workers >= 0 and here["server"] >= least


class Quorum:
    """Decides whether this scheduler may continue an elastic job with the members that it has.

    The job asks after each loss (:meth:`may_continue`). A quorum is counted by the members of one view, the
    *base*. Any quorum of the base must know the newest view, so that a scheduler restarted with that quorum
    recovers that view. Therefore a newer view becomes the base only once enough members of the old base have
    it.

    Args:
        members: the table of nodes.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._base: frozenset[Member] = frozenset()
        self._is_ours = True
        """False if an earlier scheduler has made the base: it may still run, and continue the job."""
        self._newest: frozenset[Member] = frozenset()
        self._epoch = 0

    def restore(self, view: View) -> None:
        """Makes the view of an earlier scheduler the base: this scheduler continues from it."""
        self._base = self._newest = frozenset(map(_known, view.members))
        self._epoch, self._is_ours = view.epoch, False

    def on_view(self, epoch: int) -> None:
        """Notes a new view, which names the members that are present now."""
        self._advance()
        self._newest = frozenset(_known(node.member) for node in self._members.present())
        self._epoch = epoch
        self._base = self._base or self._newest

    def may_continue(self) -> bool:
        """Returns whether no other scheduler can continue with the members that are missing here."""
        self._advance()
        return self._suffices(self._here())

    def missing(self) -> list[Member]:
        """Returns the members of the base that may be at another scheduler."""
        return sorted(self._base - self._here(), key=lambda each: (each.role, each.rank))

    def _here(self) -> set[Member]:
        """The nodes that cannot be at another scheduler: those that are here, and those that have ended."""
        return {_known(node.member) for node in self._members if not node.may_be_elsewhere}

    def _advance(self) -> None:
        """Makes the newest view the base if enough members of the base have it."""
        know = {
            _known(node.member)
            for node in self._members
            if node.epoch >= self._epoch or (node.state in ("left", "lost") and not node.may_be_elsewhere)
        }
        if self._newest != self._base and self._suffices(know):
            self._base, self._is_ours = self._newest, True

    def _suffices(self, part: Collection[Member]) -> bool:
        """Returns whether the members ``part`` are enough to continue.

        If another scheduler has made the base, they must be a quorum of it. If this scheduler has made it, it
        is enough that the other members are not a quorum.
        """
        here = self._base.intersection(part)
        if self._is_ours:
            return not is_quorum(self._base - here, self._base)
        return is_quorum(here, self._base)


def _known(member: Member) -> Member:
    """The member without its identity, which the views of workers lack."""
    return Member(member.role, member.rank, member.host, member.pid, member.address, "")
