"""Recovery of a restarted scheduler: it learns the state of the job from returning members.

A scheduler keeps nothing on disk. It asks nodes that it does not know to register again. Members register
with their view, and the newest of these views is the job as it was. A node that is left over from a dead job
of the same name registers with that job's view; the job that goes on is the one whose workers return.
"""

from __future__ import annotations

import msgspec

from zenps.wire.fields import Role
from zenps.wire.identity import public_identity
from zenps.wire.scheduler_messages import Member, Register, View

from .members import Members, Node, NodeState

RECOVERY_GRACE_SECONDS = 5.0
"""How much longer than a lease members have to return: ZeroMQ tries to connect every two seconds, and a node
sends four heartbeats in a lease."""


Process = tuple[Role, str, int, str]
"""What tells the process of a node: its role, host, process id and address."""


class Recovery:
    """The nodes that return to a restarted scheduler, and those that wait until the recovery is over.

    Fills the table of nodes again.

    Attributes:
        newest: the newest view of the job whose workers return; None before the first view of any job.
        generation: the newest generation of the workers that torchrun has started and that registered without
            being members; 0 once the job goes on with the workers that have returned.
        waiting: nodes without a view that were not members, by routing identity. They register once the
            recovery is over.
        ended: the host on which the process of a node is reported to have ended last, by role and rank. It
            may be that of a member which has not returned.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self.newest: View | None = None
        self.generation = 0
        self.waiting: dict[bytes, Node] = {}
        self.ended: dict[tuple[Role, int], str] = {}
        self._by_process: dict[Process, list[Member]] = {}
        """The members of the newest view."""
        self._views: dict[int, View] = {}
        """The newest view of each job, by the job's origin."""
        self._others: dict[bytes, Node] = {}
        """Nodes with a view that are not members: they belong to another job, or were lost or drained."""

    def readmit(self, peer: bytes, message: Register, now: float) -> None:
        """Handles the registration of a node: a member of the newest view returns, with its rank there.

        Any other node waits if it has no view. If it has one, it is refused when the recovery is over.
        """
        view = message.view
        if view is None:
            node = Node(peer, message, message.rank, last_heard=now)
            self.waiting[peer] = node
        else:
            brief = msgspec.structs.replace(message, view=without_members(view))
            node = self._others[peer] = Node(peer, brief, message.rank, last_heard=now)
            self._learn(view)
        self._place(node)

    def forget(self, peer: bytes) -> None:
        """Drops a node from those that are not members, because it has left or is a member now."""
        self.waiting.pop(peer, None)
        self._others.pop(peer, None)

    def drop_silent(self, since: float) -> None:
        """Drops nodes that are not members and have not registered since then. Those that are alive register
        again."""
        self.waiting = {peer: node for peer, node in self.waiting.items() if node.last_heard >= since}
        self._others = {peer: node for peer, node in self._others.items() if node.last_heard >= since}
        if len(self._views) > 1:
            views = [node.register.view for node in (*self._members, *self._others.values())]
            origins = {view.origin for view in views if view is not None}
            self._views = {origin: view for origin, view in self._views.items() if origin in origins}

    def has_worker_returned(self) -> bool:
        """True if a worker has returned with a view."""
        workers = (node for node in self._members if (node.role, node.state) == ("worker", "present"))
        return any(worker.register.view is not None for worker in workers)

    def new_nodes(self) -> list[Node]:
        """Returns the nodes without a view, including those taken for members: they may all belong to another
        job."""
        taken = [node for node in self._members.alive() if node.register.view is None]
        return [*taken, *self.waiting.values()]

    def not_members(self) -> list[Node]:
        """Returns the nodes that are not members. When the recovery is over, they join or are refused."""
        return [*self.waiting.values(), *self._others.values()]

    def is_complete(self) -> bool:
        """True if all members of the newest view have returned. Asked at each registration."""
        view, count = self._view, self._members.count
        here = count("worker", "present", "left") + count("server", "present")
        return here >= len(view.workers) - len(view.left) + len(view.servers) and not self.missing()

    def missing(self) -> list[Member]:
        """Returns the members of the newest view that have not returned."""
        nodes = [*self._members.present(), *self._members.with_state("worker", "left")]
        here = {(node.role, node.rank) for node in nodes}
        return [member for member in self._view.members if (member.role, member.rank) not in here]

    def passed_barriers(self) -> int:
        """Returns how many barriers workers have passed since the newest admission."""
        registers = [node.register for node in self._members if node.role == "worker"]
        counts = (r.barriers for r in registers if r.view and r.view.admitted == self._view.admitted)
        return max(counts, default=0)

    def is_ring_changed(self) -> bool:
        """True if the servers are not those of the newest view, or one of them has been started again.

        A server without a view holds nothing of what workers have pushed to the one before it.
        """
        before = {member.rank for member in self._view.servers}
        servers = self._members.present("server")
        return before != {node.rank for node in servers if node.register.view is not None}

    def is_changed(self) -> bool:
        """True if the members are not those of the newest view, or some do not have it."""
        before = {(member.role, member.rank) for member in self._view.members}
        present = self._members.present()
        is_behind = any(node.epoch < self._view.epoch for node in present)
        return is_behind or before != {(node.role, node.rank) for node in present}

    def restore_left(self, now: float) -> None:
        """Adds the workers that had left before: rounds and barriers that wait for them must fail."""
        left = self._view.left
        for m in self._view.workers:
            if m.rank in left:
                self._members.add(_gone(m, self._view, now, "left"))

    def add_lost(self, member: Member, now: float) -> None:
        """Adds a member that has not returned. Unless its process has ended, it may have returned to another
        scheduler."""
        node = _gone(member, self._view, now, "lost")
        node.may_be_elsewhere = self.ended.get((member.role, member.rank)) != member.host
        self._members.add(node)

    @property
    def _view(self) -> View:
        assert self.newest is not None
        return self.newest

    def _place(self, node: Node) -> None:
        """Makes a node that has registered a member if it was one."""
        rank = self._rank_before(node.peer, node.register)
        if rank is None:
            self.generation = max(self.generation, node.register.generation)
        elif not self._members.is_taken(node.role, rank):
            node.rank, node.epoch = rank, self._epoch_of(node.register.view)
            self._members.add(node)
            self.forget(node.peer)

    def _rank_before(self, peer: bytes, message: Register) -> int | None:
        """Returns the node's rank in the newest view, by host and process: its own view may be older.

        Only servers' views have the identities of workers. If the view has one, it must be the same. If it
        has none, a worker must have a view: a new process in a pod has the host name and number of the one
        before it. With keys, a node can have no other rank than the one with which it registers.
        """
        is_server = message.role == "server"
        identities = {public_identity(peer)} if message.view is None else {b"", public_identity(peer)}
        alike = self._by_process.get(_process(message), ())
        ranks = [m.rank for m in alike if is_server or m.identity in identities]
        # Containers on a machine's own network share its host name, and each has a process 1.
        if message.rank < 0:
            return next(iter(ranks), None)
        return message.rank if message.rank in ranks else None

    def _learn(self, view: View) -> None:
        """Follows the newest view: nodes that returned with an older one may not be members any more."""
        known = self._views.get(view.origin)
        if known is None or view.epoch > known.epoch or _is_fuller(view, known):
            self._views[view.origin] = view
        newest = self._likeliest()
        if newest is self.newest:
            return
        self.newest = newest
        self._by_process = {}
        for member in newest.members:
            self._by_process.setdefault(_process(member), []).append(member)
        others = [n for n in self._members if self._rank_before(n.peer, n.register) != n.rank]
        for node in others:
            self._members.forget(node)
            if node.register.view is not None:
                self._others[node.peer] = node
        for node in [*self._others.values()]:  # those without a view are asked to register again
            self._place(node)

    def _likeliest(self) -> View:
        """Returns the newest view of the job whose workers return; if there are several such jobs, of the one
        that misses fewest.

        There are several if a node that is left over from a dead job has not heard of its end.
        """
        if len(self._views) == 1:
            return next(iter(self._views.values()))
        nodes = (*self._members.alive(), *self.not_members())
        registers = [node.register for node in nodes if node.role == "worker"]

        def likelihood(view: View) -> tuple[bool, int, int]:
            # Pods keep their names, and each has a process 1: workers of two jobs may look alike.
            of_the_job = [r for r in registers if r.view is None or r.view.origin == view.origin]
            here = {_process(register) for register in of_the_job}
            are_here = [_process(each) in here for each in view.members if each.role == "worker"]
            return any(are_here), -are_here.count(False), view.epoch

        return max(self._views.values(), key=likelihood)

    def _epoch_of(self, view: View | None) -> int:
        """Returns which epoch a node with this view has applied; 0 without a view.

        Two schedulers may have made different views of one epoch. Nodes with the other scheduler's view count
        as behind, so all nodes get a new view.
        """
        if view is None:
            return 0
        is_another = view.incarnation != self._view.incarnation and view.epoch == self._view.epoch
        return view.epoch - is_another


def _gone(member: Member, view: View, now: float, state: NodeState) -> Node:
    m, brief = member, without_members(view)
    register = Register(m.role, m.rank, m.host, m.pid, m.address, m.metrics, {}, view=brief)
    return Node(str(m).encode(), register, m.rank, last_heard=now, state=state)


def without_members(view: View) -> View:
    """Returns what is kept of each node's view: all members in the views of all nodes take memory of n²."""
    return msgspec.structs.replace(view, workers=(), servers=(), owners=b"", left=())


def _is_fuller(view: View, known: View) -> bool:
    """Returns whether ``view`` has workers' identities, which ``known``, else the same view, lacks."""
    is_same = (view.epoch, view.incarnation) == (known.epoch, known.incarnation)
    has_none = not any(worker.identity for worker in known.workers)
    return is_same and has_none and any(worker.identity for worker in view.workers)


def _process(node: Member | Register) -> Process:
    return node.role, node.host, node.pid, node.address
