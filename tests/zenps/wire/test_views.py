"""Views on the wire: one frame for all nodes of a role."""

from __future__ import annotations

import msgspec
import pytest

from zenps.errors import ProtocolError
from zenps.wire.frames import CorruptedError, Decoder
from zenps.wire.scheduler_messages import FromScheduler, Member, SharedView, View
from zenps.wire.views import ViewEncoder, decode_view

WORKERS = tuple(Member("worker", rank, "box", rank, "", "") for rank in range(3))
SERVER = Member("server", 0, "box", 7, "tcp://box:1", "")
VIEW = View(4, 0, WORKERS, (SERVER,), bytes(8192), ring_epoch=2, left=(1,), admitted=3)


def received(envelope: bytes, *frames: bytes) -> View:
    parts = [memoryview(frame) for frame in frames]
    message: FromScheduler = Decoder("job", FromScheduler).decode(envelope, parts)
    assert isinstance(message, SharedView)
    return decode_view(message, parts)


def test_each_receiver_gets_its_rank_and_all_get_one_frame() -> None:
    encoder = ViewEncoder("job")
    views = [msgspec.structs.replace(VIEW, rank=rank) for rank in range(3)]
    messages = [encoder.encode(view) for view in views]
    assert [received(*message) for message in messages] == views
    assert len({id(frame) for _, frame in messages}) == 1
    assert sum(len(envelope) for envelope, _ in messages) < 0.1 * len(messages[0][1])


def test_other_views_have_other_frames() -> None:
    encoder = ViewEncoder("job")
    others = [
        msgspec.structs.replace(VIEW, **fields)
        for fields in ({"epoch": 5}, {"workers": WORKERS[:2]}, {"servers": (SERVER, SERVER)})
    ]
    for other in others:
        assert [received(*encoder.encode(view)) for view in (VIEW, other, VIEW)] == [VIEW, other, VIEW]


def test_a_view_that_no_node_reads_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def encode(letters: int, epoch: int) -> None:
        host = "h" * letters
        workers = [Member("worker", rank, host, rank, "", f"{host}:1", bytes(39)) for rank in range(4096)]
        servers = [Member("server", rank, host, rank, f"tcp://{host}:1", f"{host}:1") for rank in range(1024)]
        view = msgspec.structs.replace(VIEW, epoch=epoch, workers=(*workers,), servers=(*servers,))
        ViewEncoder("job").encode(view)

    encode(60, 1)
    assert not caplog.records
    encode(100, 2)
    encode(100, 3)
    (record,) = caplog.records
    assert record.message.startswith("5120 nodes take ")
    assert record.message.endswith("nobody gets it; give hosts shorter names, or run fewer nodes")


def test_a_damaged_frame_is_noticed() -> None:
    envelope, frame = ViewEncoder("job").encode(VIEW)
    with pytest.raises(CorruptedError):
        received(envelope, frame[:-1] + b"x")


@pytest.mark.parametrize("frames", [(), (b"", b""), (b"no view",)], ids=["none", "two", "no view"])
def test_what_is_no_view_is_refused(frames: tuple[bytes, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode_view(SharedView(0), [memoryview(frame) for frame in frames])
