"""Writes from the code what can be: ``python docs/generate.py``.

That is docs/configuration.md, docs/metrics.md, the modules in docs/architecture.md, and the diagrams in
docs/protocol.md, docs/membership.md and docs/architecture.md. A test compares the files with what this
returns, so that they cannot fall behind.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from zenps.config.settings import FIELDS, Config
from zenps.config.shared import server_settings, shared_settings
from zenps.config.values import choices, format_bytes
from zenps.observe.metrics import SchedulerMetrics, ServerMetrics, WorkerMetrics
from zenps.scheduler.membership.states import JOB
from zenps.server.rounds.states import ROUND as SERVER_ROUND
from zenps.transitions import Transitions, diagram
from zenps.worker.rounds.states import ROUND as WORKER_ROUND
from zenps.worker.training.gradients.step_states import STEP

CONFIGURATION = """\
<!-- Written by docs/generate.py from zenps/config/settings.py. Do not edit. -->
# Configuration

All roles read the same settings from the same sources. The first that has a setting decides it:

1. `--set section.field=value` of a `zenps` command, or `zps.init(sets=["section.field=value"])`
2. the variable `ZENPS_SECTION_FIELD`, such as `ZENPS_SYNC_PARTITION`
3. BytePS's `DMLC_PS_ROOT_URI` with `DMLC_PS_ROOT_PORT`, `DMLC_NUM_WORKER` and `DMLC_NUM_SERVER`
4. torchrun's `WORLD_SIZE`
5. a TOML file: that of `--config` or `zps.init(config=…)`, else that of the variable `ZENPS_CONFIG`, else
   `./zenps.toml` where it exists
6. the default

The rank of a worker or server is torchrun's `RANK`, else BytePS's `DMLC_WORKER_ID`, else the scheduler's
choice.

`zenps config` prints every value and where it came from. A key that does not exist or a value out of
bounds is refused with the field, the value and what is allowed; the command then ends with exit code 2.
A setting whose name ends in `_bytes` also takes a string such as `"8MiB"` (KiB, MiB, GiB, TiB).

The scheduler refuses a worker that differs from it in one of these
([why](decisions/0010-settings-must-equal.md)):

SHARED.

In an elastic job, and with a sparsifier, `cluster.workers` is one of them, too.

It refuses a server that differs in SERVERS.
"""

METRICS = """\
<!-- Written by docs/generate.py from zenps/observe/metrics.py. Do not edit. -->
# Metrics

Every process serves Prometheus at `http://HOST:PORT/metrics`, where `metrics.host` and `metrics.port` say
so ([configuration](configuration.md#metrics)). With the default port, any free one, the port chosen is in
the `metrics` field of `zenps status --json`. Labels are closed sets, but for `rank` and `waits_for`: of these
there are the latest ranks and the longest waits.

How many times fewer bytes a worker moves than dense synchronisation would, and the share of a round that it
waits for servers:

```promql
rate(zenps_dense_bytes_total[1m]) / (rate(zenps_push_bytes_total[1m]) + rate(zenps_pull_bytes_total[1m]))
rate(zenps_wait_duration_seconds_sum[1m]) / rate(zenps_push_pull_duration_seconds_sum[1m])
```

Which ranks the others wait for, as a share of the time: `rate(zenps_late_seconds_total[1m])` of the scheduler
([stragglers](operations.md#stragglers)). A dashboard and alerts are [there](monitoring.md).

`zenps_node_info` gives each address its rank: `… * on (job, instance) group_left (rank) zenps_node_info`.
"""


DIAGRAMS: dict[str, dict[str, Transitions[Any, Any]]] = {
    "architecture.md": {"worker/training/gradients/step_states.py": STEP},
    "membership.md": {"scheduler/membership/states.py": JOB},
    "protocol.md": {"server/rounds/states.py": SERVER_ROUND, "worker/rounds/states.py": WORKER_ROUND},
}
"""By the page, and by the module that has the table."""


def configuration() -> str:
    """docs/configuration.md."""
    shared = ", ".join(f"`{name}`" for name in shared_settings(Config()))
    *some, last = (f"`{name}`" for name in server_settings(Config()))
    on_servers = f"{', '.join(some)} or {last}"
    lines = [CONFIGURATION.replace("SHARED", textwrap.fill(shared, 110)).replace("SERVERS", on_servers)]
    for section, struct in get_type_hints(Config).items():
        lines += [f"## {section}", "", struct.__doc__, ""]
        lines += _table(["setting", "default", "type", "meaning"], _settings(section, struct()))
    return "\n".join(lines)


def metrics() -> str:
    """docs/metrics.md."""
    roles = {"Worker": WorkerMetrics, "Server": ServerMetrics, "Scheduler": SchedulerMetrics}
    families = {role: {family.name: family for family in _collect(kind)} for role, kind in roles.items()}
    common = set.intersection(*map(set, families.values()))
    sections = {"Every role": [f for name, f in families["Worker"].items() if name in common]}
    for role, own in families.items():
        sections[role] = [family for name, family in own.items() if name not in common]
    lines = [METRICS]
    for heading, found in sections.items():
        lines += [f"## {heading}", ""]
        lines += _table(["metric", "type", "labels", "meaning"], map(_metric, found))
    return "\n".join(lines)


def diagrams(page: str) -> str:
    """A page as it is, with the diagrams that belong between its marks."""
    text = _page(page)
    for source, table in DIAGRAMS[page].items():
        text = _filled(text, source, f"```mermaid\n{diagram(table)}\n```\n")
    return text


def architecture() -> str:
    """docs/architecture.md as it is, with a table of modules and a diagram between its marks."""
    root = Path(__file__).resolve().parent.parent
    lines = []
    for top in ("zenps", "worker", "server", "scheduler"):
        for folder in sorted({path.parent for path in (root / top).rglob("*.py")}):
            name = folder.relative_to(root)
            lines += [f"**`{name}/`**: {_summary(folder / '__init__.py')}", ""]
            modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += _table(
                ["module", "what it is"], ([f"`{path.name}`", _summary(path)] for path in modules)
            )
    return _filled(diagrams("architecture.md"), "the modules' docstrings", "\n" + "\n".join(lines))


def _summary(module: Path) -> str:
    """The first paragraph of a module's docstring."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    summary = " ".join(text.partition("\n\n")[0].split())
    summary = re.sub(r":\w+:`~?\.*([\w.]+)`", r"`\1`", summary.replace("``", "`"))
    return summary.replace("|", "\\|")


def _page(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def _filled(text: str, source: str, content: str) -> str:
    """A page as it is, with ``content`` between the marks of ``source``.

    Raises:
        ValueError: the page has no place for it.
    """
    begin, end = (
        f"<!-- Written by docs/generate.py from {source}. Do not edit. -->\n",
        "<!-- Until here. -->",
    )
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"expected {begin!r} and {end!r} after it")
    return f"{head}{begin}{content}{end}{tail}"


def _number(value: float) -> str:
    """``4611686018427387903`` as ``2^62 - 1``: what nobody can read in decimals."""
    for part, rest in ((value, ""), (value + 1, " - 1")):
        exponent = int(part).bit_length() - 1
        if exponent > 16 and part == 1 << exponent:
            return f"2^{exponent}{rest}"
    return str(value) if isinstance(value, int) else f"{value:g}"


def type_text(
    annotated: Any, show: Callable[[float], str] = _number, names: Mapping[Any, str] | None = None
) -> str:
    """A type with its bounds, in words: ``int, 1 to 4096``. The protocol's test uses it, too.

    Args:
        annotated: as it stands at a field of a struct.
        show: how a bound is written.
        names: of types that are not spelt out.
    """
    if names and annotated in names:
        return names[annotated]

    def of(part: Any) -> str:
        return type_text(part, show, names)

    origin, args = get_origin(annotated), get_args(annotated)
    if origin is Annotated:
        return ", ".join(filter(None, [of(args[0]), _bounds(args[1], show)]))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return f"list of {of(args[0])}" if args[-1] is Ellipsis else f"[{', '.join(map(of, args))}]"
    if origin is dict:
        return f"map of {of(args[0])} to {of(args[1])}"
    if origin in (Union, UnionType):
        return " or ".join(map(of, args))
    if annotated is type(None):
        return "nil"
    return "string" if annotated is str else str(annotated.__name__)


def _bounds(meta: msgspec.Meta, show: Callable[[float], str]) -> str:
    if meta.max_length is not None:
        exact = meta.min_length == meta.max_length
        return f"length {meta.max_length}" if exact else f"length {meta.min_length or 0} to {meta.max_length}"
    high = meta.lt - 1 if meta.lt is not None else meta.le
    if high is None:
        return ""
    return f"above {meta.gt}, at most {show(high)}" if meta.ge is None else f"{show(meta.ge)} to {show(high)}"


def _settings(section: str, defaults: msgspec.Struct) -> Iterator[list[str]]:
    for name, field in FIELDS.items():
        if name.partition(".")[0] != section:
            continue
        default = getattr(defaults, name.partition(".")[2])
        show: Callable[[float], str] = _number
        if name.endswith("_bytes"):
            default, show = format_bytes(default), format_bytes
        names = [f"`{value}`" for value in choices(name)]
        kind = ", ".join(names) or type_text(field.annotated, show)
        yield [f"`{name}`", f"`{json.dumps(default)}`", kind, str(field.meta.description)]


def _collect(kind: Callable[[CollectorRegistry], object]) -> list[Metric]:
    registry = CollectorRegistry()
    kind(registry)
    return list(registry.collect())


def _metric(family: Metric) -> list[str]:
    # As Prometheus shows it: the client adds these endings to what a family is called.
    ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
    # Some have no sample yet, and show their labels all the same.
    values: dict[str, list[str]] = {label: [] for label in getattr(family, "_labelnames", ())}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le" and family.type != "info" and value not in values.setdefault(label, []):
                values[label].append(value)
    labels = "; ".join(
        f"`{label}`" if label == "rank" or not found else f"`{label}`: {', '.join(found)}"
        for label, found in values.items()
    )
    if family.type == "info":
        labels = ", ".join(f"`{label}`" for label in sorted(family.samples[0].labels))
    return [
        f"`{family.name}{ending}`",
        {"info": "gauge"}.get(family.type, family.type),
        labels,
        family.documentation,
    ]


def _table(columns: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] + [""]


FILES = {
    **{page: partial(diagrams, page) for page in DIAGRAMS},
    "architecture.md": architecture,
    "configuration.md": configuration,
    "metrics.md": metrics,
}

if __name__ == "__main__":
    for file, text in FILES.items():
        Path(__file__).with_name(file).write_text(text(), encoding="utf-8")
