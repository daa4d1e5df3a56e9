"""Sparse reducer: the union of all ranks' rows, each row summed in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zenps.codecs.base import Positions
from zenps.codecs.registry import BY_SPAN, CODECS, choose
from zenps.errors import ProtocolError
from zenps.wire.fields import MAX_RESULT_FRAGMENTS
from zenps.wire.messages import Failure, Push, Result
from zenps.wire.tensors import DTYPES, POSITION_BYTES, RECEIVE_BUFFER_BYTES, cut_fragments

from .base import AllreduceOutcome, Answer, FailedRound, Payload, Reducer
from .values import dequantize, divisor_of, positions_and_values, pushed_rows, quantize, row_values_bytes


class SparsePayload(Payload, frozen=True):
    """Positions ``[rows]`` int64, decoded, and values as they were received."""

    positions: Positions
    values: memoryview

    @property
    def row_bytes(self) -> int:
        return POSITION_BYTES + row_values_bytes(self.push)


class SparseReducer(Reducer[SparsePayload]):
    """Sums sparse rows. Each rank pushes values ``[rows, columns]`` at sorted positions of the chunk."""

    def check_size(self, push: Push) -> None:
        """Refuses a push with more rows than a message takes, and a codec that would take memory for more.

        The span may be any: all memory is in proportion to the rows that ranks push.

        Raises:
            ProtocolError: no worker with the same ``cluster.max_message_bytes`` makes such a push.
        """
        row_bytes = push.columns * DTYPES[push.dtype].itemsize + self.position_bytes
        if push.rows * row_bytes > self._max_message_bytes:
            most = f"expected {self._max_message_bytes} bytes at most"
            raise ProtocolError("payload", f"a push of {push.rows} rows of {row_bytes} bytes, {most}")
        most_span = self._max_message_bytes // POSITION_BYTES
        if push.answer in BY_SPAN and push.span > most_span:
            reason = f"an answer by {push.answer} in a span of {push.span}, expected {most_span} at most"
            raise ProtocolError("payload", reason)
        if push.codec in BY_SPAN and push.span > max(most_span, 32 * push.rows):
            reason = f"{push.rows} rows by {push.codec} in a span of {push.span}"
            raise ProtocolError("payload", f"{reason}, expected {most_span} at most")
        if push.fragment >= push.fragments:
            raise ProtocolError("payload", f"fragment {push.fragment} of {push.fragments}")

    def read(self, push: Push, frames: Sequence[memoryview]) -> SparsePayload:
        encoded, values = positions_and_values(push, frames)
        if push.codec == "none":
            raise ProtocolError("payload", "a sparse chunk needs a codec for its positions")
        if push.codec == "dense" and push.rows and not push.columns:
            # The positions would take memory although no bytes were sent for them.
            raise ProtocolError("payload", "rows without values as dense, expected coo")
        positions = CODECS[push.codec].decode(encoded, push.rows, push.span)
        size_bytes = positions.nbytes + values.nbytes + RECEIVE_BUFFER_BYTES
        return SparsePayload(push, size_bytes, positions, values)

    def reduce(self, payloads: Sequence[SparsePayload]) -> AllreduceOutcome | FailedRound:
        push = payloads[0].push
        pushed = [
            (torch.from_numpy(payload.positions), dequantize(payload.values, payload.push, self._pool))
            for payload in payloads
        ]
        union, sums = self._kernels.aggregate(pushed, divisor_of(payloads))
        positions, values = union.numpy(), self._memory.share(quantize(sums, push, self._pool))
        row_bytes = values.nbytes // max(len(union), 1)
        max_rows = self._max_message_bytes // (row_bytes + POSITION_BYTES)
        # Half a message, as for pushes: the rest is for bitmaps and the envelope.
        cuts = cut_fragments(0, len(union), max(max_rows // 2, 1), MAX_RESULT_FRAGMENTS)
        if -(-len(union) // len(cuts)) > max_rows:
            return FailedRound(_too_large(push, len(union), max_rows))
        about = push.ring_epoch, push.tensor, push.step, push.chunk
        answers = []
        for fragment, (begin, end) in enumerate(cuts):
            inside = positions[begin:end]
            codec = choose(push.answer, end - begin, push.span, row_bytes, inside)
            count = 0 if fragment else pushed_rows(payloads)
            result = Result(*about, end - begin, codec.name, count, fragment=fragment, fragments=len(cuts))
            encoded = codec.encode(inside, push.span)
            part = values if len(cuts) == 1 else values[begin * row_bytes : end * row_bytes]
            answers.append(Answer(result, (encoded.data, part)))
        return AllreduceOutcome(answers, len(union))


def _too_large(push: Push, rows: int, max_rows: int) -> Failure:
    """The failure of a round whose sum does not fit into the most messages that a chunk may take."""
    reason = (
        f"tensor {push.tensor!r}, step {push.step}: a sum of {rows} rows on one server, in one chunk: "
        f"expected at most {MAX_RESULT_FRAGMENTS} messages of {max_rows} rows; raise "
        "cluster.max_message_bytes on all nodes, add servers, or push fewer rows at first"
    )
    return Failure(push.ring_epoch, push.tensor, push.step, push.chunk, "size", reason)
