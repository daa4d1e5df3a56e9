"""The schemes: each a preset of what is exchanged, with whom, and in which form.

``zenps`` is ours; the others are the systems that the papers compare with Zen (OSDI '25, §2.3 and §4.1),
on the same tensors and the same links. Known here without torch, as names of settings are.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from msgspec import Struct

from zenps.codecs.base import CodecName

SchemeName = Literal[
    "zenps",
    "zen",
    "sparse-ps",
    "byteps",
    "omnireduce",
    "allreduce",
    "agsparse",
    "sparcml",
    "hierarchical-centralization",
]

SchemeSetting = Literal[SchemeName, "auto"]
"""What ``sync.scheme`` may be; auto: one of :data:`AUTO`, for each tensor the one that suits it."""

Answer = CodecName | Literal["auto"]
"""How the positions of a union travel; auto: as suits the chunk."""


class Scheme(Struct, frozen=True, kw_only=True):
    """What becomes of a tensor. The defaults are those of ``zenps``, which goes by the settings.

    Attributes:
        exchange: with whom a rank exchanges its tensors: servers, which own the sums; or its peers, the other
            workers. The fields after ``keys`` are for servers.
        keys: what a sparse tensor's positions count: its rows; each element of them; or nothing, for it
            travels dense.
        partition: the strategy; "": as ``sync.partition`` says.
        ranges: whether each server owns one contiguous range of positions, not the slots that the ring
            deals it.
        push_codec: of positions that are pushed; "": as ``sync.codec`` says.
        pull_codec: of positions that are pulled.
        streams: whether tensors are cut into chunks of ``sync.chunk_bytes``, so that one is summed while the
            next travels.
        blocks: whether what travels dense leaves out its blocks of zeros, phase by phase.
        has_priorities: whether pushes that wait for the network go by priority, not by age.
    """

    exchange: Literal["servers", "peers"] = "servers"
    keys: Literal["rows", "elements", "none"] = "rows"
    partition: str = ""
    ranges: bool = False
    push_codec: CodecName | Literal[""] = ""
    pull_codec: Answer = "auto"
    streams: bool = True
    blocks: bool = False
    has_priorities: bool = False


SCHEMES: Final[dict[SchemeName, Scheme]] = {
    "zenps": Scheme(),
    # §3: balanced parallelism by element, pushed as COO, pulled as a hash bitmap.
    "zen": Scheme(
        keys="elements", partition="balanced", push_codec="coo", pull_codec="bitmap", streams=False
    ),
    # Parallax and its like: contiguous ranges of rows, whichever of them are hot.
    "sparse-ps": Scheme(partition="parallel", ranges=True, push_codec="coo", pull_codec="coo", streams=False),
    # A parameter server for dense tensors (OSDI '20), to which gradients of the first layers go first.
    "byteps": Scheme(keys="none", partition="parallel", has_priorities=True),
    # Non-zero blocks, found by look-ahead (SIGCOMM '21); streams of them to contiguous ranges.
    "omnireduce": Scheme(keys="none", partition="parallel", ranges=True, blocks=True),
    # What torch.distributed offers for dense tensors.
    "allreduce": Scheme(exchange="peers", keys="none"),
    # What it offers for sparse ones: everybody sends everything to everybody.
    "agsparse": Scheme(exchange="peers"),
    # SC '19: pairs of ranks merge, or each sums a range; streams become dense as they fill.
    "sparcml": Scheme(exchange="peers"),
    # §2.3: pairs of ranks merge, and streams stay sparse.
    "hierarchical-centralization": Scheme(exchange="peers"),
}
assert tuple(SCHEMES) == get_args(SchemeName)

AUTO: Final[tuple[SchemeName, SchemeName]] = ("zenps", "agsparse")
"""What auto chooses from: one over servers, one among workers. Both add in rank order and keep every touched
row, so that a result is the same bit for bit, whichever it came by."""


def over_servers(setting: SchemeSetting) -> Scheme:
    """What becomes of tensors that go over servers."""
    return SCHEMES[AUTO[0] if setting == "auto" else setting]


def among_workers(setting: SchemeSetting) -> SchemeName:
    """The scheme of tensors that go from worker to worker."""
    return AUTO[1] if setting == "auto" else setting
