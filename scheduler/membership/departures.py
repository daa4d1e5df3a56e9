"""Departures: what follows when a node leaves the job, or is lost because its lease has expired."""

from __future__ import annotations

from zenps.errors import GONE_ADVICE
from zenps.wire.scheduler_messages import Departed, Refused

from .actions import Send, to_all
from .job import Job
from .members import Node


def on_leave(job: Job, node: Node, now: float) -> list[Send]:
    """A node leaves on its own."""
    if job.state == "gathering" or node.state == "waiting":
        job.members.forget(node)
        return _keep_last_server(job)
    was_leaving = node.state == "leaving"
    job.members.set_state(node, "left")
    job.stragglers.forget(node.peer)
    if job.state == "draining":
        job.end_if_drained()
        return _keep_last_server(job)
    if was_leaving or job.state in ("failed", "recovering"):
        return []
    sends = to_all(job.members.alive(), Departed(node.member, False, f"{node.member} left the job"))
    if node.role == "server":
        return sends + job.begin_epoch("members changed", now)
    if job.state == "confirming" and job.views.epoch == 1:
        return sends + job.lose_worker(f"{node.member} left before the job began", now)
    if job.can_shrink():
        return sends + job.remove_worker(node, now)
    sends += job.barriers.fail(f"{node.member} left before it; {GONE_ADVICE}")
    if not job.members.present("worker"):
        return sends + job.drain_servers(now)
    return sends + job.tell_leave("a worker left", now)


def on_lost(job: Job, node: Node, now: float, why: str = "", *, has_ended: bool = False) -> list[Send]:
    """A node has been silent for longer than its lease, or is lost for another reason ``why``.

    Unless ``has_ended``, its process may still run, and be registered at another scheduler.
    """
    if job.state == "gathering" or node.state == "waiting":
        job.members.forget(node)
        return _keep_last_server(job)
    was_leaving = node.state == "leaving"
    job.members.set_state(node, "lost")
    job.stragglers.forget(node.peer)
    node.may_be_elsewhere = not has_ended
    silent, lease = now - node.last_heard, job.cluster.lease_seconds
    reason = f"{node.member} is lost: {why or f'silent for {silent:.1f} s, its lease is {lease:g} s'}"
    if node.role == "worker":
        if (step := node.load.get("step")) is not None:
            reason += f"; the last step that it reported was {step:.0f}"
        reason += f"; {GONE_ADVICE}"
    # The service logs and counts what is sent: if nobody is left, it goes to the lost node.
    sends = to_all(job.members.alive() or [node], Departed(node.member, True, reason))
    if job.state == "draining":
        job.end_if_drained()
        # A server that has come since then has no rank yet.
        return (sends if node.rank >= 0 else []) + _keep_last_server(job)
    if was_leaving or job.state in ("failed", "recovering"):
        return sends
    if failure := job.fail_without_quorum(reason):
        return sends + failure
    if node.role == "server":
        return sends + job.begin_epoch("members changed", now)
    if job.can_shrink() and not job.may_restart():
        return sends + job.remove_worker(node, now)
    return sends + job.lose_worker(reason, now)


def reply_to_departed(job: Job, node: Node) -> list[Send]:
    """Tells a node why it is not a member any more, unless it has left."""
    if job.state == "failed":
        return [Send(node.peer, Refused("lost", f"the job has failed: {job.failure}"))]
    if node.state == "lost":
        lease = job.cluster.lease_seconds
        reason = f"{node.member} was silent for more than its lease of {lease:g} s; start it again"
        return [Send(node.peer, Refused("lost", reason))]
    return []


def _keep_last_server(job: Job) -> list[Send]:
    """If all other servers are gone, the next workers need the servers that are being drained."""
    return [] if job.members.present("server") else job.drains.cancel()
