"""Rules of docker/prometheus/: checked by promtool, and against the metrics that exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from tests.docs.test_docs import anchor
from tests.monitoring.prometheus import FOLDER, faster
from zenps.observe.metrics import SchedulerMetrics, ServerMetrics, WorkerMetrics

ROOT = FOLDER.parent
PROMETHEUS = FOLDER / "prometheus"
TESTS = PROMETHEUS / "tests/alerts.yml"


def rules(kind: str) -> list[dict[str, Any]]:
    """Returns all rules with a field, ``alert`` or ``record``."""
    return [
        rule
        for path in sorted((PROMETHEUS / "rules").iterdir())
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if kind in rule
    ]


def test_promtool_accepts_the_configuration_and_its_rules(promtool: str) -> None:
    done = _run(promtool, "check", "config", "--lint=all", "--lint-fatal", PROMETHEUS / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 rules found" in done.stdout


def test_promtool_passes_the_rules_tests(promtool: str) -> None:
    done = _run(promtool, "test", "rules", TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_threshold_would_be_noticed(promtool: str, tmp_path: Path) -> None:
    for path in ("rules/recording.yml", "rules/alerts.yml", "tests/alerts.yml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        text = (PROMETHEUS / path).read_text()
        (tmp_path / path).write_text(text.replace("[5m])) > 1.5", "[5m])) > 2.5"))
    done = _run(promtool, "test", "rules", tmp_path / "tests/alerts.yml")
    assert done.returncode == 1
    assert re.findall(r"alertname: (\w+)", done.stdout + done.stderr) == ["Imbalance"]


def test_every_alert_is_tested_both_ways() -> None:
    cases: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test.get("alert_rule_test", ()):
            cases.setdefault(case["alertname"], set()).add("exp_alerts" in case)
    assert cases == {rule["alert"]: {True, False} for rule in rules("alert")}


def test_every_alert_says_what_is_wrong_and_where_it_is_explained() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        page, _, fragment = rule["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
        assert fragment == rule["alert"].lower()
        assert fragment in {anchor(heading) for heading in headings}


def test_every_alert_explained_is_one() -> None:
    text = (ROOT / "docs/monitoring.md").read_text("utf-8")
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == [rule["alert"] for rule in rules("alert")]


def test_rules_and_panels_name_series_that_there_are(dashboard: ModuleType) -> None:
    series = {"up", "ALERTS"} | {rule["record"] for rule in rules("record")} | set(_series())
    texts = [str(rule) for rule in (*rules("alert"), *rules("record"))]
    texts += [query.expr for panels in dashboard.ROWS.values() for panel in panels for query in panel.queries]
    named = {name for text in texts for name in re.findall(r"[\w:]*(?:zenps|process)_\w+(?::\w+)*", text)}
    assert len(named) > 30
    assert named - series == set()


def test_alerts_read_the_right_label() -> None:
    """An alert with a label that no series has would never fire."""
    values = {
        value for family in _families() for sample in family.samples for value in sample.labels.values()
    }
    for rule in (*rules("alert"), *rules("record")):
        for value in re.findall(r'(?:outcome|reason|role|stage)="(\w+)"', str(rule)):
            assert value in values


def test_clocks_go_faster_everywhere() -> None:
    text = "for: 5m\nexpr: rate(a[30s]) > 3 * max_over_time(job:a:rate1m[1h]) > 10 # 5s"
    wanted = "for: 30000ms\nexpr: rate(a[3000ms]) > 3 * max_over_time(job:a:rate1m[360000ms]) > 10 # 500ms"
    assert faster(text, 10) == wanted


def _families() -> Iterator[Any]:
    for role in (WorkerMetrics, ServerMetrics, SchedulerMetrics):
        registry = CollectorRegistry()
        role(registry)
        yield from registry.collect()


def _series() -> Iterator[str]:
    for family in _families():
        yield from {sample.name for sample in family.samples}


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=60, check=False
    )
