"""docs/protocol.md has every message, field by field, as zenps/wire defines it.

docs/encoding.md has every position codec.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from zenps.codecs.base import CodecName
from zenps.errors import ProtocolError
from zenps.wire import fields as wire_fields
from zenps.wire import messages, scheduler_messages
from zenps.wire.frames import MAX_ENVELOPE_BYTES, PROTOCOL_VERSION
from zenps.wire.messages import ChunkReply, FromServer, Hello, ToServer
from zenps.wire.scheduler_messages import Change, FromScheduler, Member, NodeStatus, ToScheduler

# Headings of level 2 in the document, and what is sent in that direction.
DIRECTIONS = {
    "Node to scheduler": get_args(ToScheduler),
    "Scheduler to node": get_args(FromScheduler),
    "Worker to server": get_args(ToServer),
    "Server to worker": get_args(FromServer),
}
PARTS = {
    "Member": Member,
    "Node status": NodeStatus,
    "Change": Change,
    "Hello": Hello,
    "Chunk reply": ChunkReply,
}
# Types of fields that the document names, and spells out once.
NAMED = ("Count", "Rank", "Name", "Text", "Host", "Address", "Load", "Late", "Role", "Dtype")

Row = tuple[str, ...]


@pytest.fixture(scope="module")
def protocol(root: Path) -> str:
    return (root / "docs/protocol.md").read_text("utf-8")


def sections(text: str, level: int) -> dict[str, str]:
    """The text under each heading of a level, by heading."""
    parts = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table(text: str, first_column: str) -> list[Row]:
    """The rows of the table whose first column is headed so; none if there is no such table."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip() for cell in line.strip("|").split("|")))
    return rows


def fields(struct: type[msgspec.Struct], generate: ModuleType) -> list[Row]:
    """Name and type of each field that is not inherited, as the document has to write them."""
    names = {getattr(wire_fields, name): name.lower() for name in NAMED}
    names |= {part: heading.lower() for heading, part in PARTS.items()} | {scheduler_messages.View: "view"}
    hints = get_type_hints(struct, include_extras=True)
    (base,) = struct.__bases__
    own = struct.__struct_fields__[len(msgspec.structs.fields(base)) :]
    return [(f"`{name}`", generate.type_text(hints[name], names=names)) for name in own]


def tag(struct: Any) -> str:
    return f"`{struct.__struct_config__.tag}`"


def test_version_is_the_code_s(protocol: str) -> None:
    assert f"Protocol version: **{PROTOCOL_VERSION}**\n" in protocol


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_direction_has_exactly_its_messages(protocol: str, direction: str) -> None:
    documented = sections(sections(protocol, 2)[direction], 3).keys() - PARTS.keys()
    assert documented == {tag(struct) for struct in DIRECTIONS[direction]}


@pytest.mark.parametrize(
    ("heading", "struct"),
    [(tag(struct), struct) for structs in DIRECTIONS.values() for struct in structs] + [*PARTS.items()],
)
def test_message_has_its_fields_in_order(
    protocol: str, generate: ModuleType, heading: str, struct: type[msgspec.Struct]
) -> None:
    section = re.split(r"^## ", sections(protocol, 3)[heading], flags=re.MULTILINE)[0]
    rows = table(section, "field")
    assert [row[:2] for row in rows] == fields(struct, generate)
    assert all(meaning.endswith(".") for _, _, meaning in rows), "a sentence for each field"


def test_named_types_are_the_code_s(protocol: str, generate: ModuleType) -> None:
    documented = table(sections(protocol, 2)["Envelope"], "type")
    assert documented == [(name.lower(), generate.type_text(getattr(wire_fields, name))) for name in NAMED]


def test_every_message_of_the_code_is_sent_in_some_direction() -> None:
    defined = [*vars(messages).values(), *vars(scheduler_messages).values()]
    structs = {s for s in defined if isinstance(s, type) and issubclass(s, msgspec.Struct)}
    assert structs - {msgspec.Struct} == {s for d in DIRECTIONS.values() for s in d} | {*PARTS.values()}


def test_reasons_are_the_code_s(protocol: str) -> None:
    rows = table(sections(protocol, 2)["Malformed messages"], "reason")
    assert [row[0] for row in rows] == [f"`{reason}`" for reason in ProtocolError.REASONS]


def test_codecs_are_the_code_s(root: Path) -> None:
    encoding = (root / "docs/encoding.md").read_text("utf-8")
    rows = table(sections(encoding, 2)["Position codecs"], "codec")
    assert [row[0] for row in rows] == [f"`{name}`" for name in (*get_args(CodecName), "none")]


def test_envelope_limit_is_the_code_s(protocol: str) -> None:
    assert f"MUST NOT exceed {MAX_ENVELOPE_BYTES >> 20} MiB" in protocol
