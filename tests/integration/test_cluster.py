"""Clusters of tests: what the tests' own environment sets for their processes."""

from __future__ import annotations

import pytest

from tests.integration.cluster import KERNELS, Cluster
from zenps.config.sources import load


@pytest.mark.parametrize(("settings", "expected"), [({}, "torch"), ({"kernels.backend": "native"}, "native")])
def test_servers_have_the_kernels_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], expected: str
) -> None:
    monkeypatch.setenv(KERNELS, "torch")
    sets = Cluster(settings=settings)._sets()
    assert load(sets=sets, environ={}).config.kernels.backend == expected
