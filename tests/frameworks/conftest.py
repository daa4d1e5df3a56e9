"""Jobs of other frameworks, with their real libraries. ``make test-frameworks`` runs what is here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not os.environ.get("ZENPS_TEST_FRAMEWORKS"):
            item.add_marker(pytest.mark.skip(reason="make test-frameworks runs it with the frameworks"))
