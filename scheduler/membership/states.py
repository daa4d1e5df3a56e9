"""State machine of a job at its scheduler: one literal transition table."""

from __future__ import annotations

from typing import Final, Literal

from zenps.transitions import Transitions

JobState = Literal["gathering", "recovering", "confirming", "running", "draining", "stopped", "failed"]
JobEvent = Literal[
    "all registered",
    "recovery started",
    "recovery finished",
    "another job begins",
    "servers confirmed",
    "members changed",
    "workers restart",
    "a worker left",
    "a worker removed",
    "joining workers admitted",
    "workers left",
    "servers left",
    "deadline",
    "a worker lost",
    "told to end",
]

JOB: Final[Transitions[JobState, JobEvent]] = {
    "gathering": {
        "all registered": "confirming",
        "recovery started": "recovering",
        "deadline": "failed",
        "told to end": "failed",
    },
    "recovering": {
        "recovery finished": "running",
        "another job begins": "gathering",
        "members changed": "confirming",
        "a worker removed": "confirming",
        "workers restart": "gathering",
        "workers left": "draining",
        "a worker lost": "failed",
        "told to end": "failed",
    },
    "confirming": {
        "servers confirmed": "running",
        "members changed": "confirming",
        "a worker left": "confirming",
        "a worker removed": "confirming",
        "joining workers admitted": "confirming",
        "workers restart": "gathering",
        "workers left": "draining",
        "deadline": "failed",
        "a worker lost": "failed",
        "told to end": "failed",
    },
    "running": {
        "members changed": "confirming",
        "a worker left": "confirming",
        "a worker removed": "confirming",
        "joining workers admitted": "confirming",
        "workers restart": "gathering",
        "workers left": "draining",
        "a worker lost": "failed",
        "told to end": "failed",
    },
    "draining": {"workers restart": "gathering", "servers left": "stopped", "told to end": "failed"},
    "stopped": {},
    "failed": {},
}
"""``table[state][event]`` is the next state.

``another job begins``: the nodes that return are left over from a dead job, and others wait. ``confirming``:
servers learn of a new view, which workers get once all servers have it. ``a worker left``: the view still
names it, so rounds that wait for it fail. ``a worker removed``: an elastic job continues without it, and the
view does not name it.
"""
