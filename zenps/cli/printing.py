"""Tables on stdout, for people: the output of ``zenps config``, ``status``, ``doctor`` and ``plan``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Sequence

import msgspec
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zenps.config.sources import Setting
from zenps.config.values import format_bytes
from zenps.errors import ConfigError
from zenps.partition.ring import SLOTS
from zenps.wire.fields import Load
from zenps.wire.scheduler_messages import NodeStatus, Status
from zenps.wire.status import late_workers, throughput

from .doctor import Check

MAX_COLUMNS = 10_000
"""No table is wider."""

DESCRIPTION_COLUMNS = 50
"""Descriptions are shown if they have this width at least: narrower ones are hard to read."""

SHOWN_CHANGES = 8

WATCH_SECONDS = 1.0

_STATE_STYLES = {"running": "green", "present": "green", "failed": "bold red", "lost": "bold red"}
_VERDICT_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_NODES = ("role", "rank", "host", "pid", "address", "metrics", "state", "epoch", "slots", "silent")
_LOADS = ("role", "rank", "step", "rounds", "in", "out", "time", "held", "open", "late")
_NUMBERS = frozenset({"rank", "pid", "epoch", "slots", "silent", *_LOADS[2:]})
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class _Console(Console):
    """A console that raises if its reader is gone, as other output does; that of rich ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def settings_to_json(settings: Sequence[Setting]) -> str:
    """Returns a list of objects with name, value, source and description."""
    rows = [{key: _as_json(value) for key, value in setting._asdict().items()} for setting in settings]
    return msgspec.json.format(msgspec.json.encode(rows).decode())


def _as_json(value: object) -> object:
    """``value``; a path that is not UTF-8 gets replacement characters, because JSON cannot hold its bytes."""
    return os.fsencode(value).decode(errors="replace") if isinstance(value, str) else value


def show_settings(settings: Sequence[Setting]) -> None:
    """Prints name, value as in TOML, and source; also the description if the terminal is wide enough."""
    console = _Console()
    plain = _settings_table(settings, describe=False)
    if console.is_terminal and console.width >= _width(plain) + DESCRIPTION_COLUMNS:
        console.print(_settings_table(settings, describe=True))
    else:
        print_wide(plain)


def _settings_table(settings: Sequence[Setting], describe: bool) -> Table:
    table = make_table("setting", "value", "source")
    if describe:
        table.add_column("description")
    for setting in settings:
        is_default = setting.source == "default"
        table.add_row(
            Text(setting.name),
            Text(_as_toml(setting)),
            Text(printable(setting.source), style="dim" if is_default else "bold"),
            *([Text(setting.description, style="dim")] if describe else []),
        )
    return table


def _as_toml(setting: Setting) -> str:
    value = setting.value
    if setting.name.endswith("_bytes") and isinstance(value, int):
        value = text if (text := format_bytes(value)) != str(value) else value
    return json.dumps(value, ensure_ascii=False)


def show_status(status: Status) -> None:
    """Prints the status once, as wide as its tables are."""
    for part in _status_parts(status):
        print_wide(part)


def watch_status(ask: Callable[[], Status]) -> None:
    """Shows the status every second until ``ask`` raises. Raises :class:`ConfigError` without a terminal."""
    console = _Console()
    if not console.is_terminal:
        raise ConfigError("--watch", "a pipe or a file", "a terminal as output")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*map(_Whole, _status_parts(ask()))), refresh=True)
            time.sleep(WATCH_SECONDS)


class _Whole:
    """Renders a part in its full width: the terminal's edge cuts it, and no column is squeezed."""

    def __init__(self, part: Table | Text) -> None:
        self._part = part

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return console.render(self._part, options.update(width=max(_width(self._part), 1)))


def _status_parts(status: Status) -> list[Table | Text]:
    """Returns the job, throughput, nodes, their loads, stragglers, changes and settings."""
    facts = [
        f"epoch {status.epoch}",
        f"up {status.uptime_seconds:.0f} s",
        f"lease {status.lease_seconds:g} s",
    ]
    if status.page:
        facts.append(f"http://{printable(status.page)}/")
    heading = Text.assemble(f"job {printable(status.job)}  ", _state(status.state), "  ", "  ".join(facts))
    rates = throughput(status)
    total = (
        f"{_human_bytes(rates['pushed_bytes'])}/s pushed  {_human_bytes(rates['pulled_bytes'])}/s pulled  "
        f"{rates['rounds']:.1f} rounds/s  {rates['steps']:.1f} steps/s"
    )
    is_relaxed = any(_consistency(node.load) for node in status.nodes)
    nodes, loads = make_table(*_NODES), make_table(*_LOADS, *(["consistency"] if is_relaxed else []))
    for node in status.nodes:
        nodes.add_row(*_node_row(node))
        if node.load:
            loads.add_row(*_load_row(node), *([Text(_consistency(node.load))] if is_relaxed else []))
    late = [
        Text(f"worker {n.rank} is a straggler: others have waited {n.late_seconds:.1f} s for it", "yellow")
        for n in late_workers(status)
    ]
    if status.stall:
        late.insert(0, Text(f"workers wait for one another: {printable(status.stall)}", "yellow"))
    changes = make_table("ago", "epoch", "who", "became")
    for change in status.changes[:SHOWN_CHANGES]:
        ago, who = f"{change.seconds_ago:.0f} s", Text(printable(change.who))
        changes.add_row(ago, str(change.epoch), who, _state(change.state))
    settings = Text(
        "  ".join(f"{name}={_setting(name, value)}" for name, value in status.settings.items()), "dim"
    )
    return [heading, Text(total), Text(), nodes, Text(), loads, Text(), *late, changes, Text(), settings]


def _node_row(node: NodeStatus) -> list[Text]:
    slots = f"{node.slots} ({node.slots / SLOTS:.0%})" if node.role == "server" else ""
    return [
        *_name(node),
        Text(printable(node.host)),
        Text(str(node.pid)),
        Text(printable(node.address.removeprefix("tcp://"))),
        Text(printable(node.metrics)),
        _state(node.state),
        Text(str(node.epoch)),
        Text(slots),
        Text(f"{node.silent_seconds:.1f} s"),
    ]


def _load_row(node: NodeStatus) -> list[Text]:
    """Returns the cells of a load: each counter, and its rate in brackets."""
    load, rates = node.load, node.rates
    if node.role == "worker":
        received, sent, spent, verb = "pulled_bytes", "pushed_bytes", "wait_seconds", "waiting"
    else:
        received, sent, spent, verb = "received_bytes", "sent_bytes", "busy_seconds", "busy"

    def counted(name: str, show: Callable[[float], str]) -> Text:
        rate = f" ({show(rates[name])}/s)" if name in rates else ""
        return Text(show(load[name]) + rate if name in load else "")

    share = f" ({rates[spent]:.0%})" if spent in rates else ""
    held = " of ".join(_human_bytes(load[name]) for name in ("held_bytes", "budget_bytes") if name in load)
    return [
        *_name(node),
        counted("step", _short),
        counted("rounds", _short),
        counted(received, _human_bytes),
        counted(sent, _human_bytes),
        Text(f"{load[spent]:.1f} s {verb}{share}" if spent in load else ""),
        Text(held),
        Text(_short(load["open_rounds"]) if "open_rounds" in load else ""),
        Text(f"{node.late_seconds:.1f} s" if node.role == "worker" else ""),
    ]


def _consistency(load: Load) -> str:
    """Describes how far a worker is behind, or from the others; empty under ``sync.consistency = bsp``."""
    if {"group", "group_size", "distance"} <= load.keys():
        workers, first = _short(load["group_size"]), _short(load["group"])
        return f"{workers} workers from rank {first}, {load['distance']:.1e} apart"
    return f"{_short(load['staleness'])} step(s) in flight" if load.get("staleness") else ""


def _setting(name: str, value: str | int | float) -> str:
    """Formats a value as :func:`_as_toml` does, but without quotes."""
    if name.endswith("_bytes") and not isinstance(value, str):
        value = format_bytes(value)
    return printable(str(value))


def _name(node: NodeStatus) -> tuple[Text, Text]:
    return Text(node.role), Text(str(node.rank) if node.rank >= 0 else "")


def _state(state: str) -> Text:
    return Text(printable(state), _STATE_STYLES.get(state, "yellow"))


def _short(count: float) -> str:
    return f"{count:.1f}".removesuffix(".0")


def show_checks(checks: Sequence[Check]) -> None:
    """Prints a line for each check, and under it the advice if there is one."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = (f"{check.verdict:<5}", _VERDICT_STYLES[check.verdict])
        print_wide(Text.assemble(verdict, f"{check.name:<{width}}  {printable(check.found)}"))
        if check.advice:
            print_wide(Text(f"{'':<{5 + width}}  → {printable(check.advice)}"))


def make_table(*columns: str, numbers: Collection[str] = _NUMBERS) -> Table:
    """A table without rows. Columns of ``numbers`` are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in numbers else "left")
    return table


def _width(what: Table | Text) -> int:
    console = Console(width=MAX_COLUMNS)
    return Measurement.get(console, console.options, what).maximum


def print_wide(what: Table | Text) -> None:
    """Prints in full width: a pipe has none, and a narrow terminal wraps lines itself."""
    _Console(width=max(_width(what), 1)).print(what)


def _human_bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def printable(text: str) -> str:
    """Escapes control characters, so that a name that a peer reports cannot control the terminal."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
