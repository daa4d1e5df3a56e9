"""Synchronisation scheme interface: the facts that the declaration of a scheme states.

Each module of :mod:`zenps.schemes.builtin` declares one scheme. Settings are checked against it in processes
without NumPy and torch, so this module imports neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import Struct

from zenps.codecs.base import CodecName

from . import refusals
from .refusals import Combination

if TYPE_CHECKING:
    from zenps.errors import ConfigError

    from .traffic import Cost, Links, Tensor

Engine = Literal["servers", "blocks", "peers", "auto"]
"""The mechanism that runs a scheme.

servers: workers push chunks to servers, which sum them, and pull the sums. blocks: the same, but only
blocks that are not zero travel, phase by phase. peers: workers send to each other. auto: each sparse tensor
takes one of the scheme's candidates.
"""

Keys = Literal["rows", "elements", "none"]
"""What the positions of a sparse tensor count; none: it travels dense."""

PullCodec = CodecName | Literal["auto"]
"""The codec of the positions in a pulled sum; auto: chosen for each chunk by size."""

PeerAlgorithm = Literal["allgather", "recursive doubling", "sparcml"]
"""How workers sum a sparse tensor without servers; sparcml: by the cheapest of SparCML's algorithms."""


class WireForm(Struct, frozen=True, kw_only=True):
    """The form in which tensors travel. The defaults follow the settings.

    Attributes:
        keys: what the positions of a sparse tensor count.
        partition: the strategy that deals positions to servers; "": the one of ``sync.partition``.
        contiguous: True if each server owns one contiguous range of positions instead of ring slots.
        push_codec: of pushed positions; "": the one of ``sync.codec``.
        pull_codec: of pulled positions.
        chunked: True if tensors travel in chunks of ``sync.chunk_bytes``, so that a server sums one chunk
            while the next one travels.
        prioritized: True if pushes that wait for the network are sent by priority instead of by age.
        peer_algorithm: how workers sum a sparse tensor without servers; "": they never do.
    """

    keys: Keys = "rows"
    partition: str = ""
    contiguous: bool = False
    push_codec: CodecName | Literal[""] = ""
    pull_codec: PullCodec = "auto"
    chunked: bool = True
    prioritized: bool = False
    peer_algorithm: PeerAlgorithm | Literal[""] = ""


class Scheme(ABC):
    """A scheme over servers, unless ``engine`` says otherwise.

    Attributes:
        name: the value of ``sync.scheme``. Its module has the same name, with ``_`` for ``-``.
        engine: the mechanism that runs it.
        wire: the form in which tensors travel.
        spends: the reason why it takes bytes or time, which ``zenps plan`` prints for the second-best scheme.
        candidates: the schemes among which each sparse tensor chooses; empty for a scheme that does not
            choose.
        order: its place in listings, smallest first; equal ones are listed by name.
    """

    name: ClassVar[str]
    engine: ClassVar[Engine] = "servers"
    wire: ClassVar[WireForm] = WireForm()
    spends: ClassVar[str] = ""
    candidates: ClassVar[tuple[Scheme, ...]] = ()
    order: ClassVar[int] = 100

    def refuse(self, settings: Combination) -> ConfigError | None:
        """The error for the first setting that this scheme cannot be combined with; None if there is none."""
        return None

    def fallback(self, settings: Combination) -> tuple[Scheme, ConfigError] | None:
        """The scheme that runs instead under ``settings``, and why; None if this one runs itself."""
        return None

    @abstractmethod
    def cost(self, tensor: Tensor, links: Links) -> Cost:
        """What the sparse ``tensor`` costs. Each override's docstring states its formula. The letters are n
        workers; d, the density of one worker's rows; D, the density of the union of all workers; M, the bytes
        of the whole tensor; and f = (n - 1) ÷ n, the share that leaves a worker whose host also runs a
        server.
        """

    def dense_cost(self, tensor: Tensor, links: Links) -> Cost:
        """What a dense tensor costs: 2·f·M (BytePS, OSDI '20), in even ranges and in chunks."""
        size, skew = tensor.dense_bytes, links.slot_imbalance
        return links.served(size, size, skew, skew, streams=True)

    def step_rounds(self, rounds: Sequence[int]) -> int:
        """Message rounds of a step whose tensors take ``rounds``. Servers handle tensors concurrently."""
        return max(rounds, default=0)


class PeerScheme(Scheme):
    """A scheme whose workers send to each other, over connections of a torch.distributed group."""

    engine = "peers"

    def refuse(self, settings: Combination) -> ConfigError | None:
        return (
            refusals.values_unchanged(self.name, settings)
            or refusals.one_level(self.name, settings)
            or refusals.every_worker(self.name, settings)
            or refusals.no_keys(self.name, settings)
        )

    def dense_cost(self, tensor: Tensor, links: Links) -> Cost:
        """2·f·M in 2·(n - 1) rounds: a ring allreduce (Patarasuk and Yuan, 2009)."""
        once = (links.workers - 1) / links.workers * tensor.dense_bytes
        return links.cost(push=once, pull=once, serial=2 * once, rounds=2 * (links.workers - 1))

    def step_rounds(self, rounds: Sequence[int]) -> int:
        """Collective operations run one after another."""
        return sum(rounds)
