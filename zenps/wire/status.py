"""Status for programs: throughput, stragglers and JSON, derived from a :class:`Status` message."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from zenps.observe.lateness import stragglers

from .scheduler_messages import NodeStatus, Status

STRAGGLER_SECONDS: Final = 1.0
"""A worker for which others have waited less than this is not a straggler."""


def late_workers(status: Status) -> list[NodeStatus]:
    """Returns the stragglers, the worst first."""
    workers = {node.rank: node for node in status.nodes if node.role == "worker"}
    late = {rank: node.late_seconds for rank, node in workers.items()}
    return [workers[rank] for rank in stragglers(late, len(late), STRAGGLER_SECONDS)]


def throughput(status: Status) -> dict[str, float]:
    """Returns rates per second: ``pushed_bytes`` and ``pulled_bytes``, sums of all servers; ``rounds`` and
    ``steps``, means of all workers that are present.
    """
    servers = [node.rates for node in status.nodes if node.role == "server"]
    workers = [n.rates for n in status.nodes if n.role == "worker" and n.state == "present"]
    return {
        "pushed_bytes": sum(rates.get("received_bytes", 0.0) for rates in servers),
        "pulled_bytes": sum(rates.get("sent_bytes", 0.0) for rates in servers),
        "rounds": sum(rates.get("rounds", 0.0) for rates in workers) / max(len(workers), 1),
        "steps": sum(rates.get("step", 0.0) for rates in workers) / max(len(workers), 1),
    }


def to_tree(status: Status) -> dict[str, Any]:
    """Returns ``status`` as a dictionary, whose ``nodes`` have role, rank, host, pid, address, epoch, load, …

    It also has the :func:`throughput`, and the ranks of :func:`late_workers` as ``stragglers``.
    """
    tree = msgspec.structs.asdict(status)
    tree["nodes"] = [msgspec.structs.asdict(node) for node in status.nodes]
    tree["changes"] = [msgspec.structs.asdict(change) for change in status.changes]
    tree["throughput"] = throughput(status)
    tree["stragglers"] = [node.rank for node in late_workers(status)]
    return tree


def to_json(status: Status) -> str:
    """Returns :func:`to_tree` as JSON. ``owners`` is in base64, and a counter that is not finite is null."""
    return msgspec.json.format(msgspec.json.encode(to_tree(status)).decode())
