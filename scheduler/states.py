"""The states of a job, and what leads from one to another."""

from __future__ import annotations

from typing import Final, Literal

from zenps.transitions import Transitions

State = Literal["gathering", "recovering", "confirming", "running", "draining", "stopped", "failed"]
Event = Literal[
    "all registered",
    "a member returns",
    "all returned",
    "servers confirmed",
    "members changed",
    "workers restart",
    "a worker left",
    "goes on without a worker",
    "joining workers admitted",
    "workers left",
    "servers left",
    "deadline",
    "a worker lost",
    "told to end",
]

JOB: Final[Transitions[State, Event]] = {
    "gathering": {
        "all registered": "confirming",
        "a member returns": "recovering",
        "deadline": "failed",
        "told to end": "failed",
    },
    "recovering": {
        "all returned": "running",
        "members changed": "confirming",
        "goes on without a worker": "confirming",
        "workers restart": "gathering",
        "workers left": "draining",
        "a worker lost": "failed",
        "told to end": "failed",
    },
    "confirming": {
        "servers confirmed": "running",
        "members changed": "confirming",
        "a worker left": "confirming",
        "goes on without a worker": "confirming",
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
        "goes on without a worker": "confirming",
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
"""A job at its scheduler: ``confirming`` while servers learn of a view that workers do not have yet."""
