"""The kernels are clean under the sanitizers, and the tests catch planted faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.host.build import Sanitizer
from tests.cuda.host.launcher import SANITIZER
from tests.cuda.host.rerun import Rerun
from tests.cuda.plants import BARRIER, BARRIER_TESTS, PLANTS, TESTS, Plant, sow
from zenps.kernels.gpu.sources import EXPRESSIONS, folder

pytestmark = pytest.mark.skipif(SANITIZER is not Sanitizer.NONE, reason="starts the sanitizers itself")

FAILED = 1
"""pytest's exit status where a test failed."""


@pytest.fixture(scope="module")
def reruns() -> Iterator[dict[Sanitizer, Rerun]]:
    """A process for each sanitizer, started on first use, and again after one that took too long."""
    running: dict[Sanitizer, Rerun] = {}
    yield running
    for rerun in running.values():
        rerun.close()


@pytest.fixture
def rerun(reruns: dict[Sanitizer, Rerun], request: pytest.FixtureRequest) -> Rerun:
    sanitizer: Sanitizer = request.param
    if sanitizer not in reruns or reruns[sanitizer].is_closed:
        reruns[sanitizer] = Rerun(sanitizer)
    return reruns[sanitizer]


@pytest.mark.long
@pytest.mark.parametrize("tested", ["scan", *EXPRESSIONS])
@pytest.mark.parametrize("rerun", [Sanitizer.THREAD, Sanitizer.ADDRESS], indirect=True)
@pytest.mark.timeout(900)
def test_sanitizers_find_nothing(rerun: Rerun, tested: str) -> None:
    outcome = rerun.run([str(TESTS / f"test_{tested}.py")], timeout_seconds=880)
    assert outcome.passed, outcome.output


# One for each way of catching them in the default suite: compiling each takes seconds.
SHORT = {plant.caught_by: plant for plant in reversed(PLANTS)}


@pytest.mark.parametrize(
    ("rerun", "plant"),
    [
        pytest.param(
            plant.caught_by,
            plant,
            marks=() if plant in SHORT.values() else pytest.mark.long,
            id=plant.name.replace(" ", "-"),
        )
        for plant in PLANTS
    ],
    indirect=["rerun"],
)
def test_plants_are_caught(rerun: Rerun, plant: Plant) -> None:
    outcome = rerun.run(plant.arguments, sow(plant))
    assert "g++ -std" not in outcome.output, outcome.output
    if plant.caught_by is Sanitizer.NONE:
        assert outcome.status == FAILED, outcome.output
    else:
        assert outcome.reported, outcome.output
        assert f"{plant.file}:" in outcome.output, "the report does not name the line"


def test_every_barrier_is_left_out_once() -> None:
    having = {path.name for path in folder().glob("*.cu*") if BARRIER in path.read_text(encoding="utf-8")}
    assert having == set(BARRIER_TESTS)


def test_plants_that_no_longer_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected 'no such text' once in"):
        sow(PLANTS[0]._replace(old="no such text"))
