"""Runs these tests where they are asked for, and several hosts can be made."""

from __future__ import annotations

import os

import pytest

from tests.netns.hosts import why_not_here


@pytest.fixture(scope="session", autouse=True)
def _several_hosts() -> None:
    if not os.environ.get("ZENPS_TEST_HOSTS"):
        pytest.skip("make test-hosts runs it")
    if reason := why_not_here():
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
