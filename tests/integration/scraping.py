"""Reads the live Prometheus endpoints of a cluster."""

from __future__ import annotations

import time
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Samples", "await_sample", "parse", "scrape"]

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


def await_sample(address: str, name: str, value: float, seconds: float = 10.0) -> Samples:
    """All samples, once ``name`` is ``value``: gauges are refreshed twice a second."""
    until = time.monotonic() + seconds
    while True:
        samples = parse(scrape(address))
        if samples[name, ""] == value:
            return samples
        assert time.monotonic() < until, f"{name} is {samples[name, '']}, expected {value}"
        time.sleep(0.1)
