"""What ``zenps config``, ``status`` and ``doctor`` print for people: tables on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zenps.config import Setting
from zenps.doctor import Check
from zenps.lateness import stragglers
from zenps.settings import format_bytes
from zenps.wire.messages import NodeStatus, Status

__all__ = ["settings_to_json", "show_checks", "show_settings", "show_status"]

MAX_COLUMNS = 10_000

DESCRIPTION_COLUMNS = 50
"""A description that is wrapped to less is hard to read."""

STRAGGLER_SECONDS = 1.0
"""A worker that others have waited for less is named as no straggler."""

_STATE_STYLES = {"running": "green", "present": "green", "failed": "bold red", "lost": "bold red"}
_VERDICT_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_COUNTERS = ("epoch", "slots", "rounds", "in", "out", "time", "late", "silent")
_NUMBERS = frozenset({"rank", "pid", *_COUNTERS})
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def settings_to_json(settings: Sequence[Setting]) -> str:
    """A list of objects with name, value, source and description."""
    return msgspec.json.format(msgspec.json.encode([setting._asdict() for setting in settings]).decode())


def show_settings(settings: Sequence[Setting]) -> None:
    """Name, value as TOML writes it, source; and the description where the terminal has room for it."""
    console = Console()
    plain = _settings_table(settings, describe=False)
    if console.is_terminal and console.width >= _width(plain) + DESCRIPTION_COLUMNS:
        console.print(_settings_table(settings, describe=True))
    else:
        _print(plain)


def _settings_table(settings: Sequence[Setting], describe: bool) -> Table:
    table = _table("setting", "value", "source")
    if describe:
        table.add_column("description")
    for setting in settings:
        is_default = setting.source == "default"
        table.add_row(
            Text(setting.name),
            Text(_as_toml(setting)),
            Text(_printable(setting.source), style="dim" if is_default else "bold"),
            *([Text(setting.description, style="dim")] if describe else []),
        )
    return table


def _as_toml(setting: Setting) -> str:
    value = setting.value
    if setting.name.endswith("_bytes") and isinstance(value, int):
        value = text if (text := format_bytes(value)) != str(value) else value
    return json.dumps(value, ensure_ascii=False)


def show_status(status: Status) -> None:
    """The job's state in one line, a row for each node, and a line for each straggler."""
    heading = Text.assemble(
        f"job {_printable(status.job)}  ",
        (_printable(status.state), _STATE_STYLES.get(status.state, "yellow")),
        f"  epoch {status.epoch}  lease {status.lease_seconds:g} s",
    )
    table = _table("role", "rank", "host", "pid", "address", "state", *_COUNTERS)
    for node in status.nodes:
        table.add_row(*_node_row(node))
    _print(heading)
    _print(table)
    late = {node.rank: node.late_seconds for node in status.nodes if node.role == "worker"}
    for rank in stragglers(late, len(late), STRAGGLER_SECONDS):
        _print(Text(f"worker {rank} is a straggler: others have waited {late[rank]:.1f} s for it", "yellow"))


def _node_row(node: NodeStatus) -> list[Text]:
    load = node.load
    if node.role == "worker":
        received, sent, spent = "pulled_bytes", "pushed_bytes", ("wait_seconds", "waiting")
    else:
        received, sent, spent = "received_bytes", "sent_bytes", ("busy_seconds", "busy")
    seconds, verb = spent
    cells = [
        node.role,
        str(node.rank) if node.rank >= 0 else "",
        node.host,
        str(node.pid),
        node.address.removeprefix("tcp://"),
        node.state,
        str(node.epoch),
        str(node.slots) if node.role == "server" else "",
        f"{load['rounds']:.0f}" if "rounds" in load else "",
        _human_bytes(load[received]) if received in load else "",
        _human_bytes(load[sent]) if sent in load else "",
        f"{load[seconds]:.1f} s {verb}" if seconds in load else "",
        f"{node.late_seconds:.1f} s" if node.role == "worker" else "",
        f"{node.silent_seconds:.1f} s",
    ]
    styles = {5: _STATE_STYLES.get(node.state, "yellow")}
    return [Text(_printable(cell), style=styles.get(index, "")) for index, cell in enumerate(cells)]


def show_checks(checks: Sequence[Check]) -> None:
    """A line for each check, and under one that is not ok what to do."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = (f"{check.verdict:<5}", _VERDICT_STYLES[check.verdict])
        _print(Text.assemble(verdict, f"{check.name:<{width}}  {_printable(check.found)}"))
        if check.advice:
            _print(Text(f"{'':<{5 + width}}  → {_printable(check.advice)}"))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in _NUMBERS else "left")
    return table


def _width(what: Table | Text) -> int:
    console = Console(width=MAX_COLUMNS)
    return Measurement.get(console, console.options, what).maximum


def _print(what: Table | Text) -> None:
    """Nothing is cut off: a pipe has no width, and a narrow terminal wraps lines itself."""
    Console(width=_width(what)).print(what)


def _human_bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _printable(text: str) -> str:
    """What a peer calls itself must not steer the terminal."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
