"""Grafana dashboard: the file is what its script writes, and fits its provisioning."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
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

# The epoch changes between the scrapes at 15 s and at 30 s. Grafana does not ask at the times of scrapes,
# which a window would include at both of its ends.
EPOCH_CHANGES = """
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: 'zenps_epoch{{job="a", role="scheduler"}}', values: '1 1 2 2'}}
    promql_expr_test:
      - {{expr: '{expr}', eval_time: 29s}}
      - expr: '{expr}'
        eval_time: 35s
        exp_samples: [{{labels: '{{job="a", role="scheduler"}}', value: 1}}]
"""


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


def test_everything_is_read_from_the_data_source_that_is_chosen(tree: Any) -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yaml").read_text())["datasources"]
    choice, *variables = tree["templating"]["list"]
    assert (choice["type"], choice["query"]) == ("datasource", source["type"])
    panels = [panel for panel in tree["panels"] if panel["type"] != "row"]
    targets = [target for panel in panels for target in panel["targets"]]
    chosen = {"type": source["type"], "uid": f"${{{choice['name']}}}"}
    for reader in (*variables, *tree["annotations"]["list"], *panels, *targets):
        assert reader["datasource"] == chosen, reader


def test_rates_have_values_at_the_scrape_interval_of_our_prometheus() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yaml").read_text())["datasources"]
    scraping = yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]


def test_no_variable_is_left_undefined(tree: Any) -> None:
    defined = {variable["name"] for variable in tree["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(tree))) == defined


def test_every_window_has_four_scrapes_at_the_slowest_that_is_allowed(tree: Any) -> None:
    text = (FOLDER.parent / "docs/monitoring.md").read_text("utf-8")
    (slowest_seconds,) = re.findall(r"`scrape_interval` of (\d+) seconds or less", text)
    rules = [path.read_text("utf-8") for path in (FOLDER / "prometheus/rules").iterdir()]
    windows = re.findall(r"\[(\d+)([smh])\]", "".join((json.dumps(tree), *rules)))
    assert windows
    for number, unit in windows:
        assert int(number) * {"s": 1, "m": 60, "h": 3600}[unit] >= 4 * int(slowest_seconds)


def test_a_new_epoch_is_marked_at_the_slowest_scrapes_that_are_allowed(
    dashboard: ModuleType, promtool: str, tmp_path: Path
) -> None:
    file = tmp_path / "epochs.yml"
    file.write_text(EPOCH_CHANGES.format(expr=dashboard.EPOCHS["expr"].replace("$job", "a")))
    done = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
