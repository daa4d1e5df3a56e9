from __future__ import annotations

from typing import Any

import pytest

from zenps.scheduler.membership.states import JOB
from zenps.server.rounds.states import ROUND as SERVER_ROUND
from zenps.transitions import Transitions, diagram
from zenps.worker.rounds.states import ROUND as WORKER_ROUND

LAMP: Transitions[Any, Any] = {
    "off": {"press": "on", "hold": "on", "break": "broken"},
    "on": {"press": "off", "flicker": "on"},
    "broken": {},
}

every_table = pytest.mark.parametrize(
    "table", [JOB, SERVER_ROUND, WORKER_ROUND], ids=["job", "server", "worker"]
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
def test_every_state_can_be_reached_and_left_for_the_end(table: Transitions[Any, Any]) -> None:
    def reachable(start: str) -> set[str]:
        found, todo = {start}, [start]
        while todo:
            new = {*table[todo.pop()].values()} - found
            found |= new
            todo += new
        return found

    assert reachable(next(iter(table))) == {*table}
    assert all(any(not table[end] for end in reachable(state)) for state in table)
