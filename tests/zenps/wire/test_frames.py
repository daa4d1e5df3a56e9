from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from zenps.errors import ProtocolError
from zenps.wire.frames import MAX_ENVELOPE_BYTES, PROTOCOL_VERSION, CorruptedError, Decoder, encode
from zenps.wire.messages import Busy, FromServer, Push, Result, ToServer
from zenps.wire.scheduler_messages import FromScheduler, Leave, Member, Register, Stop, ToScheduler, View

DIRECTIONS: dict[str, UnionType] = {
    "to scheduler": ToScheduler,
    "from scheduler": FromScheduler,
    "to server": ToServer,
    "from server": FromServer,
}
TYPES = [message for union in DIRECTIONS.values() for message in get_args(union)]

every_type = pytest.mark.parametrize("message_type", TYPES, ids=lambda message_type: message_type.__name__)
every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def accepted_with(message_type: type[msgspec.Struct]) -> Any:
    """The union that a socket which receives this type accepts."""
    return next(union for union in DIRECTIONS.values() if message_type in get_args(union))


def strategy_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All values that the schema allows: what is drawn follows the messages when they change."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: strategy_of(field.type) for field in fields})
        case inspect.UnionType(types=types):
            return st.one_of(*map(strategy_of, types))
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.IntType(ge=least, le=most, lt=limit):
            greatest = most if limit is None else limit - 1
            least, greatest = (-(2**63), 2**64 - 1) if greatest is None else (least, greatest)
            return st.integers(least, greatest)
        case inspect.StrType(min_length=least, max_length=most):
            longest = st.just("é" * most) if most else st.nothing()
            return st.text(st.characters(codec="utf-8"), min_size=least or 0, max_size=20) | longest
        case inspect.BytesType(min_length=int(least)):
            return st.binary(min_size=1, max_size=9).map(lambda some: (some * least)[:least])
        case inspect.BytesType(max_length=int(most)):
            return st.binary(max_size=min(most, 40)) | st.just(b"\xff" * most)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(strategy_of(key), strategy_of(value), max_size=4)
        case inspect.VarTupleType(item_type=item):
            return st.lists(strategy_of(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(strategy_of, items))
    raise AssertionError(f"no strategy for {kind}")


MESSAGES = {message: strategy_of(inspect.type_info(message)) for message in TYPES}
JOBS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)

PUSH = Push(1, 0, "weight", 3, 0, 1, "sparse", "float32", (100, 4), 50, 4, 7, "coo", True)


def refusal(decoder: Decoder[Any], frame: bytes | memoryview, frames: Sequence[memoryview] = ()) -> str:
    with pytest.raises(ProtocolError) as raised:
        decoder.decode(frame, frames)
    assert len(str(raised.value)) < 400
    return raised.value.reason


@every_type
@settings(deadline=None, max_examples=25)
@given(data=st.data(), job=JOBS)
def test_round_trip(message_type: type[msgspec.Struct], data: st.DataObject, job: str) -> None:
    message = data.draw(MESSAGES[message_type])
    accepted = accepted_with(message_type)
    frame = encode(job, message)
    decoded = Decoder(job, accepted).decode(frame)
    assert type(decoded) is message_type
    assert decoded == message
    assert Decoder(job, accepted).decode(memoryview(frame)) == message


@every_type
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_the_envelope_is_plain_messagepack(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    """Another implementation, msgspec's own, reads what we write and writes what we read."""
    message = data.draw(MESSAGES[message_type])
    expected = (PROTOCOL_VERSION, "job", message)
    accepted = accepted_with(message_type)
    theirs = msgspec.msgpack.Decoder(tuple[int, str, accepted])  # type: ignore[valid-type]
    assert theirs.decode(encode("job", message)) == expected
    assert Decoder("job", accepted).decode(msgspec.msgpack.encode(expected)) == message


def test_tags_are_unique_within_a_direction() -> None:
    for union in DIRECTIONS.values():
        tags = [message.__struct_config__.tag for message in get_args(union) or (union,)]
        assert len(set(tags)) == len(tags)


@every_direction
@every_type
def test_a_message_of_another_direction_is_refused(
    direction: str, message_type: type[msgspec.Struct]
) -> None:
    accepted = DIRECTIONS[direction]
    if accepted_with(message_type) is not accepted:
        frame = msgpack.packb([PROTOCOL_VERSION, "job", [message_type.__struct_config__.tag] + [0] * 20])
        assert refusal(Decoder("job", accepted), frame) == "envelope"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@every_direction
@settings(deadline=None, max_examples=150)
@given(frame=st.binary(max_size=80))
def test_any_bytes(direction: str, frame: bytes) -> None:
    assert refusal(Decoder("job", DIRECTIONS[direction]), frame) in ProtocolError.REASONS


@every_direction
@settings(deadline=None, max_examples=100)
@given(body=VALUES)
def test_any_body(direction: str, body: object) -> None:
    frame = msgpack.packb([PROTOCOL_VERSION, "job", body])
    assert refusal(Decoder("job", DIRECTIONS[direction]), frame) == "envelope"


@every_type
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_damaged_message_is_refused_or_is_another_message(
    message_type: type[msgspec.Struct], data: st.DataObject
) -> None:
    accepted = accepted_with(message_type)
    message = data.draw(MESSAGES[message_type])
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    place = data.draw(st.integers(0, len(body) - 1))
    match data.draw(st.sampled_from(["replace", "drop", "flip"])):
        case "replace":
            body[place] = data.draw(VALUES)
        case "drop":
            del body[place:]
    frame = bytearray(msgpack.packb([PROTOCOL_VERSION, "job", body]))
    if data.draw(st.booleans()):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decoded = Decoder("job", accepted).decode(bytes(frame))
    except ProtocolError:
        return
    # It keeps the schema: msgspec's own decoder reads it again.
    theirs = msgspec.msgpack.Decoder(tuple[int, str, accepted])  # type: ignore[valid-type]
    theirs.decode(encode("job", decoded))


def packed(*envelope: object) -> bytes:
    return bytes(msgpack.packb(list(envelope)))


STOP = ["stop"]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "envelope"),
        (b"\xc1", "envelope"),
        (packed(PROTOCOL_VERSION, "job", STOP)[:-1], "envelope"),
        (packed(PROTOCOL_VERSION, "job", STOP) + b"\0", "envelope"),
        (packed(PROTOCOL_VERSION, "job"), "envelope"),
        (packed(), "envelope"),
        (msgpack.packb({"version": 1}), "envelope"),
        (msgpack.packb(1), "envelope"),
        (b"\x93\x02\xa2\xff\xfe\x90", "envelope"),
        (b"\x81\x90\x01", "envelope"),
        (packed(1, "job", STOP), "version"),
        (packed(0, "other", {}), "version"),
        (packed(True, "job", STOP), "version"),
        (packed(1.0, "job", STOP), "version"),
        (packed("1", "job", STOP), "version"),
        (packed(None, "job", STOP), "version"),
        (packed([1], "job", STOP), "version"),
        (packed(PROTOCOL_VERSION, "other", STOP), "job"),
        (packed(PROTOCOL_VERSION, "other", {"garbage": [1, 2]}), "job"),
        (packed(PROTOCOL_VERSION, "JOB", STOP), "job"),
        (packed(PROTOCOL_VERSION, b"job", STOP), "job"),
        (packed(PROTOCOL_VERSION, None, STOP), "job"),
        (packed(PROTOCOL_VERSION, ["job"], STOP), "job"),
        (packed(PROTOCOL_VERSION, "x" * 100_000, STOP), "job"),
        (packed(PROTOCOL_VERSION, "job", None), "envelope"),
        (packed(PROTOCOL_VERSION, "job", []), "envelope"),
        (packed(PROTOCOL_VERSION, "job", "stop"), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["stopp"]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["x" * 100_000]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", [STOP]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", [0]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", {"type": "stop"}), "envelope"),
        (packed(PROTOCOL_VERSION, "job", msgpack.ExtType(5, b"stop")), "envelope"),
        (packed(PROTOCOL_VERSION, "job", msgpack.Timestamp(1)), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", 1]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", -1, ""]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", 1.5, ""]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", True, ""]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", 1, None]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", 1, b""]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", 1, "x" * 20_000]), "envelope"),
        (packed(PROTOCOL_VERSION, "job", ["barrier!", 1 << 62, ""]), "envelope"),
    ],
)
def test_malformed(frame: bytes, reason: str) -> None:
    assert refusal(Decoder("job", FromScheduler), frame) == reason


def test_a_well_formed_message_beside_these() -> None:
    decoder: Decoder[Stop] = Decoder("job", FromScheduler)
    assert decoder.decode(packed(PROTOCOL_VERSION, "job", STOP)) == Stop()


@pytest.mark.parametrize("depth", [100, 900, 990, 1000, 1010, 1020, 1023, 1024, 5000, 500_000])
@pytest.mark.parametrize(("place", "reason"), [(0, "version"), (1, "job"), (2, "envelope")])
def test_deep_nesting(depth: int, place: int, reason: str) -> None:
    deep = b"\x91" * depth + b"\x01"
    envelope = [packed(PROTOCOL_VERSION)[1:], packed("job")[1:], packed(STOP)[1:]]
    envelope[place] = deep
    assert refusal(Decoder("job", FromScheduler), b"\x93" + b"".join(envelope)) in (reason, "envelope")


@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_oversized(wrap: type[bytes] | type[memoryview]) -> None:
    large = Register("worker", 0, "", 1, "", "", {"x" * (MAX_ENVELOPE_BYTES - 60): 1})
    room = "x" * (MAX_ENVELOPE_BYTES - len(encode("job", large)))
    fits, larger = (msgspec.structs.replace(large, host=host) for host in (room, f"{room}x"))
    assert len(encode("job", fits)) == MAX_ENVELOPE_BYTES
    decoder: Decoder[Register] = Decoder("job", ToScheduler)
    assert decoder.decode(wrap(encode("job", fits))) == fits
    with pytest.raises(ProtocolError, match=f"{MAX_ENVELOPE_BYTES + 1} bytes, expected at most"):
        decoder.decode(wrap(encode("job", larger)))


def test_a_view_of_the_largest_cluster_fits() -> None:
    host = "node-0123.rack-17.example.org"
    workers = tuple(Member("worker", rank, host, 1 << 22, "", f"{host}:65535") for rank in range(4096))
    address = f"tcp://{host}:65535"
    servers = tuple(Member("server", rank, host, 1 << 22, address, f"{host}:65535") for rank in range(1024))
    view = View(1, 4095, workers, servers, bytes(8192), ring_epoch=1)
    decoder: Decoder[View] = Decoder("job", FromScheduler)
    assert decoder.decode(encode("job", view)) == view


def test_announced_lengths_do_not_allocate() -> None:
    for header in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\x7f\xff\xff\xff",
    ):
        assert refusal(Decoder("job", ToScheduler), header) == "envelope"
        assert refusal(Decoder("job", ToScheduler), b"\x93" + header) == "envelope"
        register = b"\x93\x03\xa3job\x98\xa8register\xa6worker\x00\xa1h\x01\xa0\xa0"
        assert refusal(Decoder("job", ToScheduler), register + header) == "envelope"
        view = b"\x93\x03\xa3job\x96\xa4view\x01\x00"
        assert refusal(Decoder("job", FromScheduler), view + header) == "envelope"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ring_epoch", -1),
        ("rank", 1 << 16),
        ("tensor", ""),
        ("tensor", "x" * 1025),
        ("step", 1 << 62),
        ("chunks", 0),
        ("kind", "Dense"),
        ("dtype", "float8"),
        ("dtype", "complex64"),
        ("shape", (3, -1)),
        ("shape", (1,) * 65),
        ("span", -1),
        ("columns", 1 << 28),
        ("rows", -1),
        ("codec", "pickle"),
        ("average", 1),
    ],
)
def test_fields_of_a_push_out_of_bounds(field: str, value: object) -> None:
    decoder: Decoder[Push] = Decoder("job", ToServer)
    assert decoder.decode(encode("job", PUSH)) == PUSH
    changed = msgspec.structs.replace(PUSH, **{field: value})
    assert refusal(decoder, encode("job", changed)) == "envelope"


FRAMES = [memoryview(b"positions"), memoryview(b"some values")]


def test_frames_come_with_a_checksum_of_them_and_the_message() -> None:
    decoder = Decoder("job", Push)
    frame = encode("job", PUSH, FRAMES)
    assert decoder.decode(frame, FRAMES) == PUSH
    assert len(frame) <= len(encode("job", PUSH)) + 9


@pytest.mark.parametrize("flipped", range(len(encode("job", PUSH, FRAMES)) - len(encode("job", PUSH)) + 20))
def test_one_flipped_bit_is_noticed(flipped: int) -> None:
    decoder = Decoder("job", Push)
    frame = encode("job", PUSH, FRAMES)
    contents = bytearray(b"".join(FRAMES))
    at = 9 * flipped % len(contents)
    contents[at] ^= 1 << flipped % 8
    with pytest.raises(
        CorruptedError, match=r"^checksum: expected \d+, got \d+ with frames of \[9, 11\] bytes"
    ):
        decoder.decode(frame, [memoryview(contents)[:9], memoryview(contents)[9:]])


def test_no_bit_of_the_message_can_be_flipped() -> None:
    decoder = Decoder("job", Push)
    frame = encode("job", PUSH, FRAMES)
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        assert refusal(decoder, bytes(damaged), FRAMES) in ProtocolError.REASONS


def test_bytes_that_moved_from_frame_to_frame_are_noticed() -> None:
    decoder = Decoder("job", Push)
    joined = memoryview(b"".join(FRAMES))
    with pytest.raises(CorruptedError):
        decoder.decode(encode("job", PUSH, FRAMES), [joined[:10], joined[10:]])


@pytest.mark.parametrize("checksum", [None, -1, "text", [1], 1.5, 1 << 63])
def test_another_checksum_or_none_is_refused(checksum: object) -> None:
    body = msgpack.unpackb(encode("job", PUSH))[2]
    with pytest.raises(CorruptedError) as caught:
        Decoder("job", Push).decode(packed(PROTOCOL_VERSION, "job", body, checksum), FRAMES)
    assert caught.value.message == PUSH


def test_a_field_that_was_added_later_is_ignored() -> None:
    decoder: Decoder[Busy | Result] = Decoder("job", FromServer)
    assert decoder.decode(packed(PROTOCOL_VERSION, "job", ["busy", 9, "t", 1, 2, "new"])) == Busy(
        9, "t", 1, 2
    )


def test_settings_are_plain_values() -> None:
    register = Register("worker", -1, "h", 1, "", "", {"seed": 3, "codec": "auto", "ratio": 0.5})
    decoder: Decoder[Register | Leave] = Decoder("job", ToScheduler)
    got = decoder.decode(encode("job", register))
    assert got == register
    assert isinstance(got, Register)
    assert [type(value) for value in got.settings.values()] == [int, str, float]
