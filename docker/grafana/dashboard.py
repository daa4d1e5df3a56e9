"""Grafana dashboard as code: ``python docker/grafana/dashboard.py`` writes dashboards/zenps.json.

Grafana reads the JSON; people read and change panels.py, which has what the dashboard shows. A test compares
the two, another runs every query against a Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from panels import JOB, ROWS, Panel

FILE: Final = Path(__file__).with_name("dashboards") / "zenps.json"

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
"""The one that is chosen at the top of the dashboard, which may be imported beside other data sources."""

WIDTH: Final = 24
"""The width of Grafana's grid."""

DATASOURCES: Final = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": DATASOURCE["type"],
}

VARIABLES: Final = (
    {"name": "job", "label": "Job", "query": "label_values(zenps_build_info, job)"},
    {
        "name": "instance",
        "label": "Instance",
        "query": f"label_values(zenps_build_info{{{JOB}}}, instance)",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
    },
)

EPOCHS: Final = {
    "name": "New epochs",
    "datasource": DATASOURCE,
    "enable": True,
    "iconColor": "blue",
    "expr": f'changes(zenps_epoch{{{JOB}, role="scheduler"}}[1m]) > 0',
    "titleFormat": "members have changed",
    "step": "5s",
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana's JSON model."""
    return {
        "uid": "zenps",
        "title": "ZenPS",
        "description": "A ZenPS job. docs/monitoring.md says how to read it.",
        "tags": ["zenps"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [DATASOURCES, *(_variable(**variable) for variable in VARIABLES)]},
        "annotations": {"list": [EPOCHS]},
        "panels": list(_panels()),
    }


def written() -> str:
    """Returns the content of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _variable(name: str, query: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes: jobs come and go
        "sort": 1,
        **more,
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Places the panels of each row from left to right, and rows from top to bottom."""
    number = y = 0
    for question, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": question,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            x, height = x + panel.width, max(height, panel.height)
        y += height


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    is_stat = panel.kind == "stat"
    custom = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 60, "stacking": {"mode": "normal", "group": "A"}}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
        custom |= {} if is_stat else {"thresholdsStyle": {"mode": "dashed"}}
    limits = {} if panel.most is None else {"max": panel.most}
    stat = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "none"}
    lines = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": position,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                **({"instant": True} if is_stat else {"range": True}),
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                **limits,
                "thresholds": {"mode": "absolute", "steps": steps},
                **({} if is_stat else {"custom": custom}),
            },
            "overrides": [],
        },
        "options": (stat if is_stat else lines) | panel.options,
    }


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
