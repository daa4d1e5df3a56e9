"""Prometheus for tests, started with our rules or running elsewhere, and queries to it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

FOLDER = Path(__file__).parents[2] / "docker"

START_SECONDS = 30.0
ANSWER_SECONDS = 10.0

Labels = Mapping[str, str]
T = TypeVar("T")


class Sample(NamedTuple):
    """One series at one time."""

    labels: Labels
    value: float


def has_data(samples: list[Sample]) -> bool:
    """True if there is any series, and none is NaN, as a rate over no rounds is."""
    return bool(samples) and all(math.isfinite(sample.value) for sample in samples)


class Alert(NamedTuple):
    """An alert that is pending or fires."""

    name: str
    state: str
    labels: Labels
    annotations: Labels


class Prometheus:
    """A running Prometheus; ``address`` is its ``host:port``."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[Sample]:
        """Returns all series of ``expression`` now."""
        data = self._get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in data["result"]]

    def alerts(self, state: str = "firing") -> list[Alert]:
        """Returns all alerts in a state: ``firing`` or ``pending``."""
        found = (
            Alert(alert["labels"]["alertname"], alert["state"], alert["labels"], alert["annotations"])
            for alert in self._get("alerts")["alerts"]
        )
        return [alert for alert in found if alert.state == state]

    def await_query(
        self,
        expression: str,
        condition: Callable[[list[Sample]], bool] = bool,
        seconds: float = 30.0,
    ) -> list[Sample]:
        """Returns the series of ``expression`` once they fulfil ``condition``: by default, there are any."""
        return _await(lambda: self.query(expression), condition, seconds, expression)

    def await_alert(self, name: str, seconds: float = 30.0, says: str = "", **labels: str) -> Alert:
        """Returns the first firing alert with this name and these labels, once its description ``says`` so.

        A description may follow later than the alert, because other scrapes fill it.
        """
        wanted = {"alertname": name, **labels}.items()

        def of_that_name() -> list[Alert]:
            named = [alert for alert in self.alerts() if wanted <= alert.labels.items()]
            return [alert for alert in named if says in alert.annotations["description"]]

        return _await(of_that_name, bool, seconds, f"alert {name} {says}")[0]

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode(errors='replace')}") from error


def _await(look: Callable[[], T], condition: Callable[[T], bool], seconds: float, what: str) -> T:
    until = time.monotonic() + seconds
    while not condition(found := look()):
        assert time.monotonic() < until, f"{what}: not within {seconds:g} s, but {found}"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def prometheus_of(
    binary: str, directory: Path, jobs: Mapping[str, Path], times: float
) -> Iterator[Prometheus]:
    """Runs docker/prometheus/ with other targets and with shorter durations.

    Args:
        binary: of Prometheus.
        directory: an empty one, for its configuration, data and log.
        jobs: files of :func:`write_targets`, by the name of the job.
        times: every duration in the configuration and the rules is divided by this.
    """
    _write_configuration(directory, jobs, times)
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Prometheus(_address(process, log))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_targets(path: Path, nodes: Iterable[tuple[str, str]]) -> None:
    """Writes pairs of role and address to a file for ``file_sd_configs`` of Prometheus, atomically.

    The role has the label of a DNS lookup of the service, so that relabelling is the same.
    """
    groups = [{"targets": [address], "labels": {"__meta_dns_name": role}} for role, address in nodes]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(groups))
    partial.rename(path)


def panel_queries(times: float = 1.0) -> dict[str, str]:
    """Returns the queries of the dashboard by panel and legend, with variables filled in as Grafana does."""
    tree = json.loads((FOLDER / "grafana/dashboards/zenps.json").read_text())
    values = {"$job": "zenps", "$instance": ".*", "$__rate_interval": faster("1m", times)}
    queries = {}
    for panel in tree["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for variable, value in values.items():
                expression = expression.replace(variable, value)
            queries[f"{panel['title']}: {target['legendFormat']}"] = expression
    return queries


def faster(text: str, times: float) -> str:
    """Returns ``text`` with every duration divided by ``times``: ``[5m]`` becomes ``[15000ms]`` at 20."""
    seconds = {"s": 1, "m": 60, "h": 3600}

    def divided(match: re.Match[str]) -> str:
        return f"{math.ceil(1000 * int(match[1]) * seconds[match[2]] / times)}ms"

    # Not the 1m of a rule's name, job:…:rate1m.
    return re.sub(r"(?<![\w.])(\d+)([smh])\b", divided, text)


def _write_configuration(directory: Path, jobs: Mapping[str, Path], times: float) -> None:
    source = FOLDER / "prometheus"
    (directory / "rules").mkdir()
    for path in (source / "rules").iterdir():
        (directory / "rules" / path.name).write_text(faster(path.read_text(), times))
    tree = yaml.safe_load(faster((source / "prometheus.yml").read_text(), times))
    (scrape,) = tree["scrape_configs"]
    del scrape["dns_sd_configs"]
    tree["scrape_configs"] = [
        scrape | {"job_name": job, "file_sd_configs": [{"files": [str(targets)]}]}
        for job, targets in jobs.items()
    ]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(tree))


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Returns the address once Prometheus listens and has read its rules."""

    def listening() -> str:
        text = log.read_text()
        assert process.poll() is None, text
        found = re.search(r'msg="Listening on".* address=(\S+)', text)
        return found[1] if found and "ready to receive web requests" in text else ""

    return _await(listening, bool, START_SECONDS, "Prometheus")
