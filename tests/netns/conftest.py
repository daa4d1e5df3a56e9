"""Runs these tests only on request, and only on a machine that can create network namespaces."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _several_hosts(several_hosts: None) -> None:
    pass
