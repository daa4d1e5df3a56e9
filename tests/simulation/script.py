"""Simulation script: the size of the job, the quality of the network, and the faults with their times."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

import msgspec

Scenario = Literal["steady", "fail", "continue", "restart"]
"""The consequence of losing a worker: in ``steady`` none is lost; a job may fail, continue without the worker
(elastic), or be restarted by torchrun."""
SCENARIOS: dict[Scenario, int] = {"steady": 8, "fail": 3, "continue": 6, "restart": 3}
"""How often each is played, in twentieths of all runs."""

Kind = Literal[
    "crash server",
    "stall server",
    "stop server",
    "drain server",
    "start server",
    "stall worker",
    "crash scheduler",
    "stall scheduler",
    "cut",
    "lose",
    "crash worker",
    "crash all workers but one",
    "leave worker",
    "crash worker in a push",
    "crash worker in a barrier",
    "crash worker at a view",
    "crash worker in an admission",
]
WORKER_KINDS: tuple[Kind, ...] = Kind.__args__[10:]  # type: ignore[attr-defined]
"""Not in ``steady``. The last four wait for their moment."""
KINDS: tuple[Kind, ...] = Kind.__args__[:10]  # type: ignore[attr-defined]

MAX_SECONDS = 25.0
"""How long a fault lasts at most: more than two leases, so that a stalled server is lost."""
BUDGETS = (1 << 20, 8 << 10, 1 << 10)
"""The small budgets admit few rounds: the pushes of a rank before it waits do not fit at once. The smallest
is less than any round takes, and half of what four ranks push in one, beyond which fragments are refused."""
BYTES_PER_SECOND = (0.0,) * 8 + (200.0, 15.0)
"""A push of a whole tensor is 512 bytes: on the slowest links, it is to be repeated while it is queued."""
RESHARD_SECONDS = (0.0, 2.0, 15.0)
"""Within the longest, a worker may hear of more views, and of the loss of another worker."""
MESSAGE_UNITS = (1 << 10, 4, 1)


class Fault(NamedTuple):
    """A fault: its time, kind, target (by number among the possible targets), and duration."""

    at: float
    kind: Kind
    target: int = 0
    seconds: float = 1.0


class Script(msgspec.Struct, frozen=True):
    """Everything that a run depends on; its ``repr`` reproduces the run."""

    seed: int = 0
    workers: int = 2
    servers: int = 2
    steps: int = 10
    runs_ahead: bool = False
    """True if a worker begins a step before the rounds of the last one have ended."""
    settles: bool = True
    """True if workers wait until nothing more happens before they leave."""
    slow_seconds: float = 0.5
    duplicates: float = 0.02
    budget_bytes: int = 1 << 20
    faults: tuple[Fault, ...] = ()
    scenario: Scenario = "steady"
    left_over: bool = False
    """True if a server of a dead job is still there, and knows that job's members."""
    reshard_seconds: float = 0.0
    """How long a round waits at most to be resharded, and then takes at most; 0: it is resharded at once."""
    message_units: int = 1 << 10
    """How many units a message takes: a chunk with more travels in fragments."""
    bytes_per_second: float = 0.0
    """Of slow links; 0: none is slow."""
    pods: bool = False
    """True if a worker's process has the rank, the host name and the number of the one before it, as in a pod
    of a StatefulSet, and is started again also where no worker can come back."""
    catches: bool = False
    """True if ranks push some tensors that they shard differently, and catch the error."""


def random_script(seed: int, scenario: Scenario | None = None) -> Script:
    """A random script."""
    rng = random.Random(seed)
    scenario = scenario or rng.choices(list(SCENARIOS), list(SCENARIOS.values()))[0]
    faults: list[Fault] = []
    for _ in range(rng.randrange(9)):
        is_worker = scenario != "steady" and rng.random() < 0.5
        # Often together with another.
        at = faults[-1].at if faults and rng.random() < 0.2 else round(60 * rng.random() ** 2, 3)
        kind = rng.choice(WORKER_KINDS if is_worker else KINDS)
        faults.append(Fault(at, kind, rng.randrange(100), round(rng.random() * MAX_SECONDS, 3)))
    runs_ahead = rng.random() < 0.5
    # From another source: a seed keeps the other choices that it had before there were these.
    further = random.Random(~seed)
    bytes_per_second = further.choice(BYTES_PER_SECOND)
    return Script(
        seed=seed,
        workers=rng.choice((1, 2, 2, 3, 3, 4) if scenario == "steady" else (2, 3, 3, 4)),
        servers=rng.randint(1, 4),
        steps=rng.randint(10, 60) // (4 if bytes_per_second else 1),  # each takes longer
        runs_ahead=runs_ahead,
        settles=rng.random() < 0.5,
        slow_seconds=rng.choice((0.05, 0.5, 2.0)),
        duplicates=rng.choice((0.0, 0.02, 0.2)),
        budget_bytes=BUDGETS[0] if runs_ahead else rng.choice(BUDGETS),
        faults=tuple(sorted(faults)),
        scenario=scenario,
        reshard_seconds=rng.choice(RESHARD_SECONDS),
        message_units=rng.choice(MESSAGE_UNITS),
        left_over=rng.random() < 0.2,
        catches=rng.random() < 0.75,
        bytes_per_second=bytes_per_second,
        pods=further.random() < 0.4,
    )
