"""Registration: which nodes may join a job, or return to it."""

from __future__ import annotations

from typing import Final

from zenps.config.shared import differing_settings
from zenps.errors import listing
from zenps.partition.ring import SLOTS
from zenps.wire.scheduler_messages import Refused, Register

from . import generations
from .job import Job
from .members import ALIVE, Members, is_on_loopback

Settings = dict[str, str | int | float]

# Other settings limit these, so their values may differ although all nodes were given the same one.
LIMITED = {"sync.chunk_bytes": " (cluster.server_budget_bytes and cluster.workers limit it)"}

_REJOIN: Final = "start another, or set cluster.rejoin_seconds for the scheduler if workers join again"
_ENDED: Final = f"this job has ended, because all its workers have left; {_REJOIN}"
_ENDS: Final = f"a worker has left this job, which ends when all its workers have left; {_REJOIN}"


def is_for_recovery(message: Register, job: Job) -> bool:
    """True if the job recovers, or must begin to, because this node has a view and the scheduler has none."""
    begins = message.view is not None and job.views.epoch == 0 and not job.has_replaced
    return begins or job.state == "recovering"


def refusal(message: Register, job: Job) -> Refused | None:
    """Returns why a node can neither join the job nor return to it; None if it may do one of them."""
    if job.state == "failed":
        return Refused("lost", f"the job has failed: {job.failure}")
    is_over = job.state == "draining" and not job.is_open_again and message.role == "worker"
    if job.state == "stopped" or is_over:
        return Refused("usage", _ENDED)
    if message.view is not None and not job.views.is_genuine(message.view):
        reason = "no scheduler of this job has made the view that it registers with; start it again"
        return Refused("lost", reason)
    # The newest view says which workers are members, whatever their agents have counted.
    if not is_for_recovery(message, job) and generations.is_stale(message, job):
        why = f": {job.restart_reason}" if job.restart_reason else ""
        return Refused("lost", f"torchrun has restarted the workers{why}")
    return None


def unfit(message: Register, job: Job, settings: Settings) -> Refused | None:
    """Returns why a node cannot join the job, whichever nodes it has by then; None if it fits.

    The first worker of a generation ends the one before, so it must fit.
    """
    if message.view is not None:
        return Refused("lost", "the scheduler counts this node as lost; start it again")
    workers = job.cluster.workers
    if message.role == "worker" and message.rank >= workers:
        reason = f"worker rank {message.rank}: expected 0 to {workers - 1} (cluster.workers)"
        return Refused("usage", reason)
    if reason := _unreachable(message, job.members):
        return Refused("usage", reason)
    if message.role == "server":
        settings = {"cluster.workers": workers} | settings
        settings = {key: settings[key] for key in message.settings.keys() & settings.keys()}
    if differing := _differing(message.settings, settings):
        return Refused("mismatch", f"not the scheduler's settings: {differing}; give all nodes the same")
    return None


def without_place(message: Register, job: Job) -> Refused | None:
    """Returns why the job has no place for a node that fits; None if it has one.

    Servers may join at any time, and there may be more than ``cluster.servers``, but not more than slots.
    Workers may join a running job if it is elastic and has lost some.
    """
    role, rank = message.role, message.rank
    if reason := _closed_to_workers(job) if role == "worker" else _closed_to_servers(job):
        return Refused("usage", reason)
    if rank >= 0 and (node := job.members.holder(role, rank)) is not None:
        return Refused("usage", f"rank {rank} is taken by {node.member}; give each {role} its own")
    return None


def _closed_to_workers(job: Job) -> str:
    cluster = job.cluster
    takes_replacements = cluster.is_elastic and job.state in ("confirming", "running")
    is_open = job.state == "gathering" or takes_replacements
    is_complete = job.members.count("worker", *ALIVE) >= cluster.workers
    if is_open and not is_complete:
        return ""
    if not (is_open or is_complete or cluster.rejoin_seconds):
        return _ENDS
    advice = "raise cluster.workers, or wait until this job has ended"
    if takes_replacements:
        advice = (
            "if one of them was lost, start this one again when its lease has run out "
            f"(cluster.lease_seconds = {cluster.lease_seconds:g})"
        )
    return f"the cluster is complete with {cluster.workers} worker(s) and {job.state}; {advice}"


def _closed_to_servers(job: Job) -> str:
    if job.state == "draining" and not job.is_open_again:
        return _ENDS
    if job.members.count("server", *ALIVE) >= SLOTS:
        return f"there are {SLOTS} servers, one for each slot; no more have anything to do"
    return ""


def mistaken(message: Register, settings: Settings) -> str:
    """Returns why this scheduler cannot continue the job of a worker that returns; empty if it can."""
    if differing := _differing(settings, message.settings):
        return (
            f"the worker on host {message.host} with pid {message.pid} returns with a view of an "
            f"earlier scheduler and other settings: {differing}; start the scheduler with the settings of "
            "that job, or end that job"
        )
    return ""


def _differing(here: Settings, there: Settings) -> str:
    """Says which settings differ, and by what; of a peer's, which may be any, as much as fits a message."""
    differing = [
        f"{key:.60} is {here.get(key)!r:.260} here and {there.get(key)!r:.260} there{LIMITED.get(key, '')}"
        for key in differing_settings(here, there)
    ]
    return listing(differing, "; ")


def _unreachable(message: Register, members: Members) -> str:
    """Names a server on loopback and a worker on another host; "" if there is no such pair."""
    if message.role == "server":
        servers = [message] if is_on_loopback(message.address) else []
        workers = [node.register for node in members.alive() if node.role == "worker"] if servers else []
    else:
        servers, workers = [node.register for node in members.on_loopback()], [message]
    for server in servers:
        for worker in workers:
            if worker.host != server.host:
                return (
                    f"the server on {server.host} is at {server.address}, where the worker on {worker.host} "
                    f"cannot reach it: set cluster.scheduler on {server.host} to the scheduler's address on "
                    "the network, or cluster.host to its own"
                )
    return ""
