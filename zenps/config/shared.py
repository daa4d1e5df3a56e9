"""Shared settings: those that must be equal on all workers, which the scheduler compares when they register.

They decide how tensors are sharded, and what ranks do together.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from .settings import Config
from .sizes import chunk_bytes


def server_settings(config: Config) -> dict[str, str | int | float]:
    """The settings that must be equal on servers, too.

    Servers use them to plan memory for pushes, and to cut results into messages that workers receive.
    """
    return {
        "cluster.max_message_bytes": config.cluster.max_message_bytes,
        "cluster.workers": config.cluster.workers,
        "sync.chunk_bytes": chunk_bytes(config),
    }


def shared_settings(config: Config) -> dict[str, str | int | float]:
    """The settings that must be equal on all workers, by ``section.field``."""
    thinning = {f"sparsifier.{name}": value for name, value in structs.asdict(config.sparsifier).items()}
    # Elsewhere a worker takes the number from its first view.
    needs_workers = config.cluster.is_elastic or config.sync.sparsifier != "none"
    return {
        **({"cluster.workers": config.cluster.workers} if needs_workers else {}),
        "cluster.max_message_bytes": config.cluster.max_message_bytes,
        "cluster.on_worker_loss": config.cluster.on_worker_loss,
        **thinning,
        "sync.bandwidth_mbit": config.sync.bandwidth_mbit,
        "sync.block": config.sync.block,
        "sync.bucket_bytes": config.sync.bucket_bytes,
        "sync.chunk_bytes": chunk_bytes(config),
        # Chunks must fit the messages of a codec whose size follows the range.
        "sync.codec": config.sync.codec,
        "sync.consistency": config.sync.consistency,
        "sync.density": config.sync.density,
        "sync.fusion": config.sync.fusion,
        "sync.granule": config.sync.granule,
        "sync.group": config.sync.group,
        "sync.latency_us": config.sync.latency_us,
        "sync.levels": config.sync.levels,
        "sync.partition": config.sync.partition,
        "sync.scheme": config.sync.scheme,
        "sync.seed": config.sync.seed,
        "sync.sparsifier": config.sync.sparsifier,
        "sync.staleness": config.sync.staleness,
        "sync.values": config.sync.values,
    }


def differing_settings(
    here: Mapping[str, str | int | float], there: Mapping[str, str | int | float]
) -> list[str]:
    """Returns the shared settings in which two nodes differ, by ``section.field``.

    A node has ``cluster.workers`` only if another of its settings needs it. So if one of two has it, that
    setting differs, and is named instead.
    """
    names = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    of_one = names & {"cluster.workers"} & (here.keys() ^ there.keys())
    return sorted(names - of_one or names)
