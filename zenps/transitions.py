"""State transition tables of state machines, and their Mermaid diagrams.

Each role has literal tables: for each state, the events that may come there and the state that follows. The
code looks up its next state in the table, and ``docs/`` shows the diagram, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)

Transitions = Mapping[State, Mapping[Event, State]]
"""``table[state][event]`` is the next state. An event that is not listed for a state cannot come there."""


def diagram(table: Transitions[State, Event]) -> str:
    """A Mermaid state diagram. It begins in the first state and ends in the states without events.

    Source: https://mermaid.js.org/syntax/stateDiagram.html
    """
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, events in table.items():
        for event, following in events.items():
            arrows.setdefault((state, following), []).append(event)
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    lines += [
        f"    {state} --> {following}: {', '.join(events)}" for (state, following), events in arrows.items()
    ]
    lines += [f"    {state} --> [*]" for state, events in table.items() if not events]
    return "\n".join(lines)
