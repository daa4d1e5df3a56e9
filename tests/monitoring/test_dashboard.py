"""Grafana dashboard: the file is what its script writes, and fits its provisioning."""

from __future__ import annotations

import itertools
import json
import re
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.monitoring.prometheus import FOLDER

QUESTIONS = [
    "Is it healthy?",
    "How fast is it?",
    "Where does the time go?",
    "Is the load balanced?",
    "What does sparsity save?",
]

PROVISIONING = FOLDER / "grafana/provisioning"


@pytest.fixture(scope="module")
def tree() -> Any:
    return json.loads((FOLDER / "grafana/dashboards/zenps.json").read_text())


def test_file_is_what_the_script_writes(dashboard: ModuleType) -> None:
    command = "run: .venv/bin/python docker/grafana/dashboard.py"
    assert dashboard.FILE.read_text("utf-8") == dashboard.written(), command


def test_rows_answer_the_questions_in_order(tree: Any) -> None:
    kinds = [panel["type"] for panel in tree["panels"]]
    assert [panel["title"] for panel in tree["panels"] if panel["type"] == "row"] == QUESTIONS
    assert kinds[0] == "row"
    assert all(kind != "row" for before, kind in itertools.pairwise(kinds) if before == "row")


def test_every_panel_says_what_it_shows_and_in_which_unit(tree: Any) -> None:
    panels = [panel for panel in tree["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_panels_have_numbers_of_their_own_and_do_not_overlap(tree: Any) -> None:
    assert len({panel["id"] for panel in tree["panels"]}) == len(tree["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in tree["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not taken & cells, panel["title"]
        taken |= cells


def test_the_datasource_is_the_provisioned_one(tree: Any) -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yaml").read_text())["datasources"]
    assert set(re.findall(r'"uid": "([^"]+)"', json.dumps(tree["panels"]))) == {source["uid"]}
    assert {variable["datasource"]["uid"] for variable in tree["templating"]["list"]} == {source["uid"]}
    scraping = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]


def test_no_variable_is_left_undefined(tree: Any) -> None:
    defined = {variable["name"] for variable in tree["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$(\w+)", json.dumps(tree))) == defined
