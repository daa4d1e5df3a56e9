"""What the cluster looks like, and how an operator changes it."""

from __future__ import annotations

import msgspec

from zenps.errors import UsageError
from zenps.keys import Keys
from zenps.settings import ClusterConfig
from zenps.wire.messages import Drain, DrainReply, Status, StatusRequest
from zenps.wire.visitor import ask

__all__ = ["drain", "fetch", "to_json"]


def fetch(cluster: ClusterConfig, timeout_seconds: float, keys: Keys | None = None) -> Status:
    """The cluster as the scheduler at ``cluster.scheduler`` sees it now; any key of the job may ask.

    Errors are those of :func:`~zenps.wire.visitor.ask`.
    """
    return ask(cluster, StatusRequest(), Status, timeout_seconds, keys)


def drain(cluster: ClusterConfig, rank: int, timeout_seconds: float, keys: Keys | None = None) -> None:
    """Has the server ``rank`` hand its slots to the others, and end. With keys, only the operator's may.

    Raises:
        UsageError: there is no such server, it is the only one, or the job is not running.
        ConfigError, DeadlineError: as :func:`~zenps.wire.visitor.ask`.
    """
    reply = ask(cluster, Drain(rank), DrainReply, timeout_seconds, keys)
    if reply.error:
        raise UsageError(reply.error)


def to_json(status: Status) -> str:
    """``status`` as one JSON object; its ``nodes`` have role, rank, host, pid, address, epoch, load, …

    A counter that is no finite number is null, as JSON knows no other.
    """
    tree = msgspec.structs.asdict(status)
    tree["nodes"] = [msgspec.structs.asdict(node) for node in status.nodes]
    return msgspec.json.format(msgspec.json.encode(tree).decode())
