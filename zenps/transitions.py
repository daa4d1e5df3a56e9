"""What a state machine's table is, and the diagram that is drawn from it.

Each role has one literal table: for each state, the events that matter there and the state that follows.
The machines look their next state up in it, and ``docs/protocol.md`` shows it, so the three cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)

Transitions = Mapping[State, Mapping[Event, State]]
"""``table[state][event]`` is the next state; an event that a state does not list cannot come there."""


def diagram(table: Transitions[State, Event]) -> str:
    """A Mermaid state diagram; it begins in the first state, and ends in those without events.

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
