"""Runs these tests where they are asked for, and several hosts can be made."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _several_hosts(several_hosts: None) -> None:
    pass
