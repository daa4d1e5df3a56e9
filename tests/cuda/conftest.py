"""Fixtures of kernel tests: a launcher, and uninitialised memory that is not zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda.host.build import Sanitizer
from tests.cuda.host.launcher import SANITIZER, HostLauncher


@pytest.fixture(scope="session", params=[0, 1] if SANITIZER is Sanitizer.NONE else [0], ids="seed{}".format)
def launcher(request: pytest.FixtureRequest) -> HostLauncher:
    """Runs kernels on CPU tensors under two schedules; a sanitizer needs only one to find the same faults."""
    return HostLauncher(seed=request.param)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN and the greatest integers, so that memory that no kernel wrote is noticed."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")
