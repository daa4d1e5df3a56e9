"""Fixture of the script that writes the dashboard."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.monitoring.prometheus import FOLDER


@pytest.fixture(scope="session")
def dashboard() -> Iterator[ModuleType]:
    """Imports docker/grafana/dashboard.py as it is when run: with its folder on sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER / "grafana")
        yield importlib.import_module("dashboard")
