"""Whether this machine can have several hosts."""

from __future__ import annotations

import os

import pytest

from tests.netns.hosts import why_not_here


@pytest.fixture(scope="session", autouse=True)
def _several_hosts() -> None:
    if reason := why_not_here():
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
