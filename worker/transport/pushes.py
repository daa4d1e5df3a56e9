"""Push messages of an encoded tensor."""

from __future__ import annotations

from msgspec import structs

from zenps.schemes.base import PullCodec
from zenps.wire.messages import Push
from zenps.wire.tensors import dtype_name

from ..core.encoded import EncodedTensor
from ..core.request import Options
from ..rounds.states import Outgoing
from .server_sockets import ServerSockets


class PushWriter:
    """Writes the pushes of one rank. Every method may be called from any thread.

    Args:
        rank: this worker's.
        pull_codec: by which the positions of sums shall travel.
        servers: where values are put that a server of this host can read.
    """

    def __init__(self, rank: int, pull_codec: PullCodec, servers: ServerSockets) -> None:
        self._rank = rank
        self._pull_codec = pull_codec
        self._servers = servers

    def share(self, encoded: EncodedTensor) -> EncodedTensor:
        """The same, with values in shared memory where servers are on this host."""
        if encoded.sharding.layout is None or not self._servers.share_memory:
            return encoded
        share = self._servers.share
        chunks = [
            structs.replace(chunk, frames=(chunk.frames[0], share(chunk.server, chunk.frames[1])))
            for chunk in encoded.chunks
        ]
        return structs.replace(encoded, chunks=chunks)

    def write(
        self, name: str, step: int, encoded: EncodedTensor, options: Options, *, again: bool = False
    ) -> list[Outgoing]:
        """One push for each chunk.

        Args:
            name, step: of the round.
            again: whether it was pushed under an older ring.
        """
        shape, dtype = tuple(encoded.shape), dtype_name(encoded.dtype)
        sharding = encoded.sharding
        return [
            Outgoing(
                chunk.server,
                Push(
                    ring_epoch=sharding.ring_epoch,
                    rank=self._rank,
                    tensor=name,
                    step=step,
                    chunk=chunk.chunk,
                    chunks=sharding.chunks,
                    kind=encoded.kind,
                    dtype=dtype,
                    shape=shape,
                    span=chunk.span,
                    columns=encoded.columns,
                    rows=chunk.rows,
                    codec=chunk.codec,
                    average=options.average,
                    again=again,
                    answer=self._pull_codec,
                    values=encoded.values,
                    stands_for=options.stands_for,
                ),
                chunk.frames,
                options.priority,
            )
            for chunk in encoded.chunks
        ]
