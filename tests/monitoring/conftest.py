"""Fixture of the script that writes the dashboard."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.monitoring.prometheus import FOLDER


@pytest.fixture(scope="session")
def dashboard() -> ModuleType:
    """Imports docker/grafana/dashboard.py, which is not on sys.path."""
    spec = importlib.util.spec_from_file_location("dashboard", FOLDER / "grafana/dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module
