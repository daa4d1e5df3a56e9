"""The tests of the native kernels again, under sanitizers."""

from __future__ import annotations

import pytest

from tests.cuda.host.build import Sanitizer
from tests.cuda.host.rerun import Rerun
from tests.zenps.kernels.native_library import EAGER, build_native

TESTS = "tests/zenps/kernels/test_native.py"
SELECTED = {
    Sanitizer.ADDRESS: [TESTS],
    # Ten times as slow: those with several threads.
    Sanitizer.THREAD: [TESTS, "-k", "best-3 or (threads and best)"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", SELECTED)
def test_no_sanitizer_objects(sanitizer: Sanitizer) -> None:
    try:
        build_native(EAGER, sanitizer=sanitizer)
    except RuntimeError as error:
        pytest.skip(f"the C compiler has no {sanitizer} sanitizer: {error}")
    with Rerun(sanitizer) as rerun:
        outcome = rerun.run(SELECTED[sanitizer], timeout_seconds=280)
    assert outcome.passed, outcome.output[-5000:]
