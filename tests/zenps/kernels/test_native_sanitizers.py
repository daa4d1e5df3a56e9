"""The tests of the native kernels again, under sanitizers."""

from __future__ import annotations

import pytest

from tests.cuda.host.build import Sanitizer
from tests.cuda.host.rerun import Rerun
from tests.zenps.kernels.native_library import has_sanitizer

TESTS = "tests/zenps/kernels/test_native.py"
SELECTED = {
    Sanitizer.ADDRESS: [
        TESTS,
        *(f"tests/zenps/kernels/test_{name}.py" for name in ("bits", "magnitudes", "positions")),
    ],
    # Ten times as slow: those with several threads.
    Sanitizer.THREAD: [TESTS, "-k", "best-3 or (threads and best)"],
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS, Sanitizer.THREAD])
def test_no_sanitizer_objects(sanitizer: Sanitizer) -> None:
    if not has_sanitizer(sanitizer):
        pytest.skip(f"the C compiler has no {sanitizer} sanitizer")
    with Rerun(sanitizer) as rerun:
        outcome = rerun.run(SELECTED[sanitizer], timeout_seconds=880)
    assert outcome.passed, outcome.output[-5000:]
