"""Reads the live Prometheus endpoints of a cluster."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, str], float]
"""By name and the value of the sample's only label, which is "" where there is none."""


def scrape(address: str) -> str:
    """The text that ``host:port`` serves."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def parse(text: str) -> Samples:
    """All samples of a page."""
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def await_samples(address: str, condition: Callable[[Samples], bool], seconds: float = 10.0) -> Samples:
    """All samples, once they fulfil a condition: gauges are refreshed twice a second."""
    until = time.monotonic() + seconds
    while not condition(samples := parse(scrape(address))):
        assert time.monotonic() < until, f"not fulfilled by {samples}"
        time.sleep(0.1)
    return samples
