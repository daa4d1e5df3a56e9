from __future__ import annotations

from typing import Any

import pytest

from zenps.scheduler.membership.states import JOB
from zenps.server.rounds.states import ROUND as SERVER_ROUND
from zenps.transitions import Transitions, diagram
from zenps.worker.rounds.states import ROUND as WORKER_ROUND
from zenps.worker.training.gradients.step_states import STEP

LAMP: Transitions[Any, Any] = {
    "off": {"press": "on", "hold": "on", "break": "broken"},
    "on": {"press": "off", "flicker": "on"},
    "broken": {},
}

every_table = pytest.mark.parametrize(
    "table", [JOB, SERVER_ROUND, WORKER_ROUND, STEP], ids=["job", "server", "worker", "step"]
)


def test_a_diagram_has_one_arrow_between_two_states() -> None:
    assert diagram(LAMP) == (
        "stateDiagram-v2\n"
        "    [*] --> off\n"
        "    off --> on: press, hold\n"
        "    off --> broken: break\n"
        "    on --> off: press\n"
        "    on --> on: flicker\n"
        "    broken --> [*]"
    )


@every_table
def test_every_event_leads_to_a_state_of_the_table(table: Transitions[Any, Any]) -> None:
    assert {state for events in table.values() for state in events.values()} <= table.keys()


@every_table
def test_every_state_can_be_reached_and_left_for_an_end_or_the_beginning(
    table: Transitions[Any, Any],
) -> None:
    def reachable(start: str) -> set[str]:
        found, todo = {start}, [start]
        while todo:
            new = {*table[todo.pop()].values()} - found
            found |= new
            todo += new
        return found

    begin = next(iter(table))
    ends = {state for state in table if not table[state]} or {begin}
    assert reachable(begin) == {*table}
    assert all(reachable(state) & ends for state in table)
