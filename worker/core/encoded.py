"""Sharding of a tensor, and its encoded chunks: what a rank pushes in one round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from msgspec import Struct

from zenps.codecs.base import CodecName, ValueForm
from zenps.partition.layout import Layout
from zenps.wire.blocks import PHASES
from zenps.wire.messages import Kind


class ChunkRange(NamedTuple):
    """One chunk of one server's range: the positions from ``start`` up to ``stop``."""

    server: int
    chunk: int
    start: int
    stop: int

    @property
    def span(self) -> int:
        """How many positions it has."""
        return self.stop - self.start


class Sharding(NamedTuple):
    """How a ring distributes a tensor over servers and chunks.

    Attributes:
        layout: of its rows or elements; None where the tensor goes whole to ``home``.
        chunks: into how many chunks each server's range is cut, the same number on all ranks.
        home: the server whose chunk 0 is pushed even if it is empty. Ranks that disagree about the shape, and
            so about which servers have any of it, find out there.
        ring_epoch: the ring's. A push names it, so that no server takes it for one of another sharding.
        slot: where a stream lies, under any ring.
    """

    layout: Layout | None
    chunks: int
    home: int
    ring_epoch: int = 0
    slot: int = 0

    def ranges(self) -> dict[tuple[int, int], ChunkRange]:
        """What is pushed, by server and chunk. In this order the ranges cover all positions without a gap."""
        assert self.layout is not None
        ranges = {}
        for server, cuts in zip(self.layout.servers, self.layout.cuts(self.chunks), strict=True):
            for chunk, (start, stop) in enumerate(pairwise(cuts)):
                if start < stop or (server, chunk) == (self.home, 0):
                    ranges[server, chunk] = ChunkRange(server, chunk, start, stop)
        return ranges


class EncodedChunk(Struct, frozen=True):
    """One chunk for one server: the variable fields of a push, and its frames."""

    server: int
    chunk: int
    span: int
    rows: int
    codec: CodecName | Literal["none"]
    frames: tuple[memoryview, memoryview]
    """Positions and values."""


class EncodedTensor(Struct, frozen=True):
    """What a rank pushes of one tensor in one round: enough to push it again under another ring.

    It keeps alive the frames and the layout; neither the tensor nor any result.
    """

    kind: Kind
    shape: torch.Size
    """Of the whole tensor."""
    dtype: torch.dtype
    columns: int
    """Elements of a row, or of a block; 1 of a dense tensor."""
    expected_rows: int
    """How many rows were pulled last time, by which a sparse tensor is cut into chunks; else 0."""
    sharding: Sharding
    chunks: Sequence[EncodedChunk]
    values: ValueForm = "same"
    """In which form the values are."""
    row_bytes: int = 0
    """What the values of a row take; of a dense tensor, those of a granule. Not used where it goes whole."""
    phase: int = 0
    """Of a stream."""

    @property
    def stream(self) -> int:
        """Which one it is, of a tensor in streams; else 0."""
        return self.chunks[0].chunk if self.kind == "blocks" else 0

    def round_of(self, name: str, step: int) -> tuple[str, int]:
        """The name and step under which servers know this round of the tensor ``name``."""
        if self.kind != "blocks":
            return name, step
        return f"{name}#{self.stream}", step * PHASES + self.phase
