"""Registration: which nodes may join a job, and which the rendezvous still waits for."""

from __future__ import annotations

from zenps.config.settings import ClusterConfig
from zenps.errors import listing
from zenps.partition.ring import SLOTS
from zenps.wire.fields import Role
from zenps.wire.scheduler_messages import Refused, Register

from .members import ALIVE, Members, is_on_loopback, names
from .states import JobState

Settings = dict[str, str | int | float]

# What a setting is limited by, so that it may differ where all nodes were given the same.
LIMITED = {"sync.chunk_bytes": " (cluster.server_budget_bytes and cluster.workers limit it)"}


def refusal(
    message: Register, state: JobState, members: Members, cluster: ClusterConfig, settings: Settings
) -> Refused | None:
    """Returns why a node cannot join; None if it can.

    Servers may join at any time, and there may be more than ``cluster.servers``, but not more than slots.
    Workers may join a running job if it is elastic and has lost some.
    """
    role, rank = message.role, message.rank
    expected = cluster.workers if role == "worker" else cluster.servers
    may_join = role == "server" or cluster.is_elastic
    is_open = state == "gathering" or (may_join and state in ("confirming", "running"))
    if not is_open or (role == "worker" and members.count(role, *ALIVE) >= expected):
        return Refused(
            "usage",
            f"the cluster is complete with {expected} {role}(s) and {state}; "
            f"raise cluster.{role}s, or wait until this job has ended",
        )
    if role == "server" and members.count(role, *ALIVE) >= SLOTS:
        return Refused("usage", f"there are {SLOTS} servers, one for each slot; no more have anything to do")
    if role == "worker" and rank >= expected:
        return Refused("usage", f"{role} rank {rank}: expected 0 to {expected - 1} (cluster.{role}s)")
    if rank >= 0 and (node := members.holder(role, rank)) is not None:
        return Refused("usage", f"rank {rank} is taken by {node.member}; give each {role} its own")
    if reason := _unreachable(message, members):
        return Refused("usage", reason)
    if role == "server":
        settings = {"cluster.workers": cluster.workers} | settings
        settings = {key: settings[key] for key in message.settings.keys() & settings.keys()}
    if differing := _differing(message.settings, settings):
        return Refused("mismatch", f"not the scheduler's settings: {differing}")
    return None


def mistaken(message: Register, settings: Settings) -> str:
    """Returns why this scheduler cannot go on with the job of a worker that returns; empty if it can."""
    if differing := _differing(settings, message.settings):
        return (
            f"the worker on host {message.host} with pid {message.pid} returns with a view of an "
            f"earlier scheduler and other settings: {differing}; start the scheduler with the settings of "
            "that job, or end that job"
        )
    return ""


def _differing(here: Settings, there: Settings) -> str:
    """Says which settings differ, and by what."""
    return "; ".join(
        f"{key} is {here.get(key)!r} here and {there.get(key)!r} there{LIMITED.get(key, '')}"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    )


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


def is_complete(members: Members, cluster: ClusterConfig, epoch: int) -> bool:
    """Returns whether all nodes are there that the rendezvous waits for."""
    expected = _expectations(cluster, epoch)
    return all(members.count(role, "present") >= count for role, count in expected.items())


def missing_from(members: Members, cluster: ClusterConfig, state: JobState, epoch: int) -> str:
    """Lists the nodes that the rendezvous lacks, or the servers that have not confirmed the newest view."""
    if state == "confirming":
        servers = members.present("server")
        unconfirmed = [node for node in servers if node.epoch < epoch]
        return f"the confirmation of {names(unconfirmed)}" if servers else "another server"
    missing = []
    for role, expected in _expectations(cluster, epoch).items():
        nodes = members.present(role)
        if len(nodes) >= expected:
            continue
        line = f"{expected - len(nodes)} of {expected} {role}(s)"
        claimed = {node.rank for node in nodes if node.rank >= 0}
        if role == "worker" and len(claimed) == len(nodes) > 0:
            absent = sorted(set(range(expected)) - claimed)
            line += f" (rank {listing(absent)})"
        missing.append(line)
    return " and ".join(missing)


def _expectations(cluster: ClusterConfig, epoch: int) -> dict[Role, int]:
    # A job whose workers torchrun has restarted continues with the servers that it has.
    return {"worker": cluster.workers, "server": 1 if epoch else cluster.servers}
