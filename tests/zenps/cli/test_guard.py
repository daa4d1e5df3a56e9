"""Guard process: which process groups it kills."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from zenps.cli import guard


def test_all_groups_that_are_left_are_killed_even_if_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []

    def kill(group: int, signal_number: int) -> None:
        killed.append((group, signal_number))
        if group == 11:
            raise ProcessLookupError
        if group == 12:  # as another user, by sudo
            raise PermissionError

    monkeypatch.setattr(sys, "stdin", io.StringIO("+11\n+12\n+13\n+14\n-13\n+15\n"))
    monkeypatch.setattr(os, "killpg", kill)
    guard.main()
    assert sorted(killed) == [(group, signal.SIGKILL) for group in (11, 12, 14, 15)]
