"""Fuzz targets: all decoders of received bytes, as functions of frames that may only raise ProtocolError."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack
import msgspec
import numpy as np
import torch

from tests.server.reducers.reduction import REDUCERS
from zenps.buffers import BufferPool
from zenps.codecs.registry import CODECS
from zenps.codecs.values import VALUE_CODECS
from zenps.config.settings import ClusterConfig, Config, SyncConfig
from zenps.kernels.base import ACCUMULATE
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.factory import make_kernels
from zenps.kernels.native import magnitudes
from zenps.scheduler.membership.tracker import Membership
from zenps.schemes.registry import scheme_of
from zenps.server.rounds.states import HeldPush, Reduce
from zenps.server.rounds.tracker import ServerRounds
from zenps.wire.blocks import decode_blocks, encode_blocks
from zenps.wire.frames import PROTOCOL_VERSION, Decoder, checksum_of, encode
from zenps.wire.messages import (
    Busy,
    Failure,
    FromServer,
    GiveUp,
    Here,
    Push,
    Resend,
    Result,
    Resume,
    ToServer,
    Wanted,
)
from zenps.wire.scheduler_messages import (
    Barrier,
    BarrierReply,
    Change,
    Departed,
    Drain,
    FromScheduler,
    Heartbeat,
    Leave,
    Member,
    NodeStatus,
    Refused,
    Register,
    SharedView,
    Status,
    StatusRequest,
    Stop,
    ToScheduler,
    View,
    WhoAreYou,
)
from zenps.wire.views import ViewEncoder, decode_view
from zenps.worker.collectives.plain_data import unpack_object
from zenps.worker.core.request import Options, Request
from zenps.worker.core.residuals import Residuals
from zenps.worker.core.transfer import Answer, Sharding, Transfer
from zenps.worker.encode.blocks import BlockTransfer
from zenps.worker.encode.planner import Planner
from zenps.worker.encode.sharder import Sharder
from zenps.worker.encode.streams import Plan
from zenps.worker.rounds.states import Deliver, Outgoing, Round
from zenps.worker.rounds.tracker import WorkerRounds

Frames = list[bytes]
JOB = "job"
SPAN, COLUMNS = 500, 4
MAX_MESSAGE_BYTES = 1 << 16
# Rounds and nodes that earlier inputs have left behind are forgotten after so many inputs.
FRESH_AFTER = 1000

_NODE_DECODER: Decoder[FromScheduler] = Decoder(JOB, FromScheduler)
MEMBER = Member("worker", 0, "host", 1, "", "", b"peer")
PUSH = Push(1, 0, "table", 0, 0, 1, "sparse", "float32", (SPAN, COLUMNS), SPAN, COLUMNS, 3, "coo", True)


class Scheduler:
    """A scheduler that gathers two workers and a server."""

    def __init__(self) -> None:
        self._decoder: Decoder[ToScheduler] = Decoder(JOB, ToScheduler)
        self._membership = Membership(JOB, ClusterConfig(workers=2), {"seed": 1}, 0.0)
        self._now = 0.0

    def __call__(self, frames: Frames) -> None:
        message = self._decoder.decode(frames[0])
        self._now += 1e-3
        for send in self._membership.on_message(b"peer%d" % (len(frames[0]) % 4), message, self._now):
            encode(JOB, send.message)
        self._membership.on_tick(self._now)


class Server:
    """A server with one worker, whose pushes complete their rounds, and one that they wait for."""

    def __init__(self) -> None:
        self._decoder: Decoder[ToServer] = Decoder(JOB, ToServer)
        self._rounds = {ranks: ServerRounds(1 << 20, 30.0) for ranks in (1, 2)}
        for ranks, rounds in self._rounds.items():
            rounds.on_view(1, dict.fromkeys(range(ranks), b"peer"), {}, 0.0)

    def __call__(self, frames: Frames) -> None:
        rest = [memoryview(bytearray(frame)) for frame in frames[1:]]
        push = self._decoder.decode(frames[0], rest)
        if isinstance(push, Here):
            return
        if isinstance(push, GiveUp):
            for rounds in self._rounds.values():
                rounds.on_give_up(0, push, 0.0)
            return
        reducer = REDUCERS[push.kind]
        reducer.check_size(push)
        payload = reducer.read(push, rest)
        held = HeldPush(b"peer", push, payload, payload.size_bytes, payload.row_bytes)
        for rounds in self._rounds.values():
            for action in rounds.on_push(held, 0.0):
                if isinstance(action, Reduce):
                    outcome = reducer.reduce([held.payload for held in action.pushes])
                    rounds.replies(action.key, outcome)
                    rounds.finish(action.key, outcome, 0.0)


class Worker:
    """A worker that has a sparse tensor, a large dense and a small one in flight; and each as a gradient."""

    def __init__(self) -> None:
        config = Config(
            cluster=ClusterConfig(max_message_bytes=MAX_MESSAGE_BYTES),
            sync=SyncConfig(granule=1, values="bfloat16"),
        )
        self._decoder: Decoder[FromServer] = Decoder(JOB, FromServer)
        scheme = scheme_of("zenps")
        planner = Planner(config, scheme, Sharder(config, scheme.wire, VIEW))
        indices, values = torch.arange(3).unsqueeze(0), torch.ones(3, COLUMNS)
        table = torch.sparse_coo_tensor(indices, values, (SPAN, COLUMNS), check_invariants=True)
        tensors = {"table": table, "vector": torch.ones(20_000), "small": torch.ones(100)}
        gradient = Options(purpose="gradient", residuals=Residuals())
        requests = [Request(tensor, name) for name, tensor in tensors.items()]
        requests += [Request(tensor, f"{name}16", gradient) for name, tensor in tensors.items()]
        self._begin: dict[str, Callable[[], Transfer]] = {
            request.name: partial(planner.begin, request, 0) for request in requests
        }
        self._begin["blocks"] = partial(_begin_blocks, torch.arange(40.0))
        self._begin_all()

    def _begin_all(self) -> None:
        self._rounds = WorkerRounds(30.0)
        self._rounds.on_view(1, [Member("server", 0, "host", 1, "", "")])
        self._transfers = {name: self._submit(name) for name in self._begin}

    def _submit(self, name: str) -> Transfer:
        transfer = self._begin[name]()
        (encoded,) = transfer.begin()
        pushes = [
            Outgoing(0, msgspec.structs.replace(PUSH, tensor=name, chunk=chunk.chunk), chunk.frames)
            for chunk in encoded.chunks
        ]
        self._rounds.submit(Round(name, 0, 1, pushes), 0.0)
        return transfer

    def __call__(self, frames: Frames) -> None:
        rest = [memoryview(bytearray(frame)) for frame in frames[1:]]
        message = self._decoder.decode(frames[0], rest)
        actions = self._rounds.on_reply(0, message, rest, 0.0)
        ended = any(not isinstance(action, Deliver) or action.last for action in actions)
        try:
            for action in actions:
                if isinstance(action, Deliver):
                    transfer = self._transfers[message.tensor]
                    transfer.on_answer(Answer(action.server, action.result, action.frames, action.others))
                    if action.last:
                        transfer.finish()
        finally:
            if ended and self._rounds.kept:
                self._begin_all()


def _begin_blocks(tensor: torch.Tensor) -> BlockTransfer:
    """One stream of five columns."""
    sharding = Sharding(None, 1, home=0, ring_epoch=1)
    return BlockTransfer(tensor, Plan(COLUMNS, 10, 1, 5), [sharding], BufferPool(1 << 20))


def _blocks(frames: Frames) -> None:
    """The first frame is rows and span, as for a codec."""
    rows, span = struct.unpack("<QQ", frames[0][:16].ljust(16, b"\0"))
    data = memoryview(frames[1] if len(frames) > 1 else b"")
    decode_blocks(data, rows % (1 << 62), span % (1 << 62))


def _codec(name: str, frames: Frames) -> None:
    """The first frame is rows and span, which an envelope would bound."""
    rows, span = struct.unpack("<QQ", frames[0][:16].ljust(16, b"\0"))
    data = memoryview(frames[1] if len(frames) > 1 else b"")
    CODECS[name].decode(data, rows % (1 << 62), span % (1 << 62))


def _values(form: str, frames: Frames) -> None:
    """The first frame is rows and columns, which an envelope and the size of a message would bound."""
    rows, columns = struct.unpack("<QQ", frames[0][:16].ljust(16, b"\0"))
    data = memoryview(frames[1] if len(frames) > 1 else b"")
    VALUE_CODECS[form].decode(data, torch.empty(rows % 1000, columns % 100))  # type: ignore[index]


class Kernels:
    """The kernels that sum rows, beside torch's. The first frame is dtype and columns, others are keys."""

    def __init__(self) -> None:
        pool = BufferPool(0)
        self._kernels, self._torch = make_kernels(pool, threads=2), CpuKernels(pool)

    def __call__(self, frames: Frames) -> None:
        number, columns = frames[0][:2].ljust(2, b"\0")
        dtype = list(ACCUMULATE)[number % len(ACCUMULATE)]
        parts = []
        for frame in frames[1:] or [b""]:
            keys = torch.from_numpy(np.frombuffer(frame[: len(frame) // 8 * 8], dtype=np.int64).copy())
            parts.append((keys, torch.full((len(keys), columns % 20), 3, dtype=dtype)))
        for sum_rows in (
            lambda kernels: kernels.aggregate(parts, 1),
            lambda kernels: kernels.compact(*parts[0]),
            lambda kernels: kernels.scatter(parts),
        ):
            for got, expected in zip(sum_rows(self._kernels), sum_rows(self._torch), strict=True):
                assert torch.equal(got, expected)


class MagnitudesOfFloats:
    """Selection of elements, beside NumPy's. The first frame is bound and most, the second the elements."""

    def __init__(self) -> None:
        self._numpy = magnitudes.ByNumpy()

    def __call__(self, frames: Frames) -> None:
        bound, most, wide = struct.unpack("<fHB", frames[0][:7].ljust(7, b"\0"))
        bound = abs(bound)
        data = frames[1] if len(frames) > 1 else b""
        dtype: type[np.floating[Any]] = np.float64 if wide % 2 else np.float32
        values = np.frombuffer(data[: len(data) // 8 * 8], dtype)
        assert np.array_equal(magnitudes.find(values, bound), self._numpy.find(values, bound))
        found = magnitudes.find_greatest(values, bound, most)
        assert np.array_equal(found, self._numpy.find_greatest(values, bound, most))
        if not bound > 0:
            return
        edges = bound * 1.05 ** np.arange(-32, 33)
        assert np.array_equal(magnitudes.count(values, edges), self._numpy.count(values, edges))


def _from_scheduler(frames: Frames) -> None:
    envelope, *others = [memoryview(frame) for frame in frames]
    message = _NODE_DECODER.decode(envelope, others)
    if isinstance(message, SharedView):
        decode_view(message, others)


TARGETS: dict[str, Callable[[], Callable[[Frames], None]]] = {
    "scheduler": Scheduler,
    "server": Server,
    "worker": Worker,
    "node": lambda: _from_scheduler,
    "coo": lambda: partial(_codec, "coo"),
    "bitmap": lambda: partial(_codec, "bitmap"),
    "delta": lambda: partial(_codec, "delta"),
    "phase": lambda: _blocks,
    "blocks": lambda: partial(_codec, "blocks"),
    "dense": lambda: partial(_codec, "dense"),
    "float16": lambda: partial(_values, "float16"),
    "bfloat16": lambda: partial(_values, "bfloat16"),
    "int8": lambda: partial(_values, "int8"),
    "kernels": Kernels,
    "magnitudes": MagnitudesOfFloats,
    "object": lambda: lambda frames: unpack_object(frames[0]) and None,
}
"""By name, a function that makes a target."""


def _sealed(message: msgspec.Struct, *frames: bytes) -> Frames:
    return [encode(JOB, message, [memoryview(frame) for frame in frames]), *frames]


def reseal(frames: Sequence[bytes]) -> Frames:
    """The same with a checksum, version and job that are right, as of an attacker who knows them."""
    try:
        _, _, body, *_ = msgspec.msgpack.decode(frames[0], type=list[msgspec.Raw])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return list(frames)
    rest = list(frames[1:])
    raw = bytes(body)
    checksum = checksum_of(raw, [memoryview(frame) for frame in rest]) if rest else None
    return [msgspec.msgpack.encode((PROTOCOL_VERSION, JOB, msgspec.Raw(raw), checksum)), *rest]


def _encoded(codec: str, positions: list[int]) -> bytes:
    return CODECS[codec].encode(np.array(positions), SPAN).tobytes()


def _quantize(form: str, rows: int, columns: int) -> bytes:
    codec = VALUE_CODECS[form]  # type: ignore[index]
    data = torch.empty(codec.size_bytes(rows, columns), dtype=torch.uint8)
    codec.encode(torch.ones(rows, columns), data)
    return data.numpy().tobytes()


_POSITIONS, _ROWS = np.array([1, 7, 300], dtype="<i4").tobytes(), np.ones((3, COLUMNS), dtype="<f4").tobytes()
_DENSE = msgspec.structs.replace(
    PUSH, tensor="small", kind="dense", shape=(100,), span=100, columns=1, rows=100, codec="none"
)
_ELEMENTS = np.ones(100, dtype="<f4").tobytes()
_AHEAD = np.arange(5, 10, dtype=np.uint32)
_PHASE, _BLOCKS = bytes(encode_blocks(np.arange(5), _AHEAD)), np.ones((5, COLUMNS), dtype="<f4").tobytes()
_STREAM = msgspec.structs.replace(
    PUSH, tensor="blocks", kind="blocks", shape=(40,), span=5, rows=5, codec="bitmap"
)

VIEW = View(1, 0, (MEMBER,), (MEMBER,), bytes(8192), 1)
_NODE = NodeStatus("server", 0, "host", 1, "tcp://127.0.0.1:1", "", 1, "present", 4096, 0.1, {"rounds": 1.0})
_STATUS = Status(
    "job",
    "running",
    1,
    10.0,
    {"seed": 1},
    (_NODE,),
    60.0,
    "127.0.0.1:1",
    bytes(8192),
    (Change(1.0, "job", "running", 1),),
)

SEEDS: dict[str, list[Frames]] = {
    "scheduler": [
        _sealed(Register("worker", -1, "host", 1, "", "", {"seed": 1})),
        _sealed(Register("server", -1, "host", 1, "tcp://127.0.0.1:1", "", {})),
        *map(_sealed, (Heartbeat(1, {"rounds": 1.0}), Barrier(1), Leave(), StatusRequest())),
        *map(_sealed, (Drain(0), Register("server", 0, "host", 1, "tcp://127.0.0.1:1", "", {}, view=VIEW))),
    ],
    "node": [
        *map(_sealed, (VIEW, Refused("lost", "gone"), WhoAreYou())),
        [*ViewEncoder(JOB).encode(VIEW)],
        *map(_sealed, (BarrierReply(1, ""), Departed(MEMBER, True, "gone"), Stop(), _STATUS)),
    ],
    "server": [
        _sealed(Here()),
        _sealed(PUSH, _POSITIONS, _ROWS),
        _sealed(msgspec.structs.replace(PUSH, codec="bitmap"), _encoded("bitmap", [1, 7, 300]), _ROWS),
        _sealed(msgspec.structs.replace(PUSH, codec="delta"), _encoded("delta", [1, 7, 300]), _ROWS),
        _sealed(msgspec.structs.replace(PUSH, codec="blocks"), _encoded("blocks", [1, 7, 300]), _ROWS),
        _sealed(msgspec.structs.replace(PUSH, codec="dense", span=3), b"", _ROWS),
        _sealed(msgspec.structs.replace(PUSH, values="int8"), _POSITIONS, _quantize("int8", 3, COLUMNS)),
        _sealed(msgspec.structs.replace(_DENSE, values="float16"), _quantize("float16", 100, 1)),
        _sealed(msgspec.structs.replace(_DENSE, values="int8"), _quantize("int8", 100, 1)),
        _sealed(msgspec.structs.replace(PUSH, rows=0), b"", b""),
        _sealed(_DENSE, _ELEMENTS),
        _sealed(_STREAM, _PHASE, _BLOCKS),
        _sealed(msgspec.structs.replace(_STREAM, rows=0), bytes(encode_blocks(np.arange(0), _AHEAD)), b""),
        _sealed(msgspec.structs.replace(_DENSE, dtype="float16", span=200, rows=200), _ELEMENTS),
    ],
    "worker": [
        _sealed(Result(1, "table", 0, 0, 3, "coo"), _POSITIONS, _ROWS),
        _sealed(Result(1, "table", 0, 0, 3, "bitmap"), _encoded("bitmap", [1, 7, 300]), _ROWS),
        _sealed(Result(1, "table", 0, 0, 3, "delta"), _encoded("delta", [1, 7, 300]), _ROWS),
        _sealed(Result(1, "table", 0, 0, 3, "blocks"), _encoded("blocks", [1, 7, 300]), _ROWS),
        _sealed(Result(1, "table16", 0, 0, 3, "coo"), _POSITIONS, _quantize("bfloat16", 3, COLUMNS)),
        _sealed(Result(1, "small16", 0, 0, 100, "none"), _quantize("bfloat16", 100, 1)),
        _sealed(Result(1, "small", 0, 0, 100, "none"), _ELEMENTS),
        _sealed(Result(1, "vector", 0, 0, 0, "none"), b""),
        _sealed(Result(1, "blocks", 0, 0, 5, "bitmap"), _PHASE, _BLOCKS),
        *map(_sealed, (Failure(1, "table", 0, 0, "lost", "gone"), Busy(1, "table", 0, 0))),
        *map(_sealed, (Resume(1, "table", 0, 0), Resend(1, "small", 0, 0), Wanted(1, "table", 0, 0))),
    ],
    "coo": [[struct.pack("<QQ", 3, SPAN), _POSITIONS]],
    "bitmap": [[struct.pack("<QQ", 3, SPAN), _encoded("bitmap", [1, 7, 300])]],
    "delta": [[struct.pack("<QQ", 3, SPAN), _encoded("delta", [1, 7, 300])]],
    "phase": [[struct.pack("<QQ", 5, 5), _PHASE]],
    "blocks": [[struct.pack("<QQ", 3, SPAN), _encoded("blocks", [1, 7, 300])]],
    "dense": [[struct.pack("<QQ", 3, 5), CODECS["dense"].encode(np.array([1, 2, 4]), 5).tobytes()]],
    "float16": [[struct.pack("<QQ", 3, COLUMNS), _quantize("float16", 3, COLUMNS)]],
    "bfloat16": [[struct.pack("<QQ", 3, COLUMNS), _quantize("bfloat16", 3, COLUMNS)]],
    "int8": [
        [struct.pack("<QQ", 3, COLUMNS), _quantize("int8", 3, COLUMNS)],
        [struct.pack("<QQ", 100, 1), _quantize("int8", 100, 1)],
    ],
    "kernels": [
        [b"\2\3", np.array([1, 7, 300]).tobytes(), np.array([7, 8]).tobytes()],
        [b"\0\1", np.array([5, 2, 5, -1, 2**62, 2**63 - 1, -(2**63)]).tobytes()],
        [b"\5\2", np.arange(0, 2**40, 2**36).tobytes(), b"", np.arange(64).tobytes()],
    ],
    "magnitudes": [
        [struct.pack("<fHB", 0.5, 3, 0), np.linspace(-1, 1, 40, dtype=np.float32).tobytes()],
        [struct.pack("<fHB", 0.0, 100, 1), np.geomspace(1e-300, 1e300, 300).tobytes()],
    ],
    "object": [
        [msgpack.packb(value)] for value in ({"a": [1, 2.5, None, "text", b"bytes"]}, [{1: True}, []], 7)
    ],
}
"""By target, inputs that it accepts."""
