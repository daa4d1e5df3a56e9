"""Rendezvous: the nodes that a job waits for before it begins, or before it goes on."""

from __future__ import annotations

from zenps.config.settings import ClusterConfig
from zenps.errors import listing
from zenps.wire.fields import Role

from .members import Members, names
from .states import JobState


def is_complete(members: Members, cluster: ClusterConfig, epoch: int) -> bool:
    """Returns whether the rendezvous has all nodes that it waits for."""
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
