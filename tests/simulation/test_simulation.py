"""Simulations: scripts by hypothesis, scripts that once failed, and faulty classes, which must fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from . import plants
from .nodes import Parts, Violation
from .plants import (
    PLANTS,
    BeginsAnew,
    OverwritesEarlierPushes,
    OverwritesWhatHasEnded,
    WaitsForADeadJob,
)
from .promises import Promises
from .run import simulate
from .script import (
    BUDGETS,
    KINDS,
    MAX_SECONDS,
    MESSAGE_UNITS,
    RESHARD_SECONDS,
    WORKER_KINDS,
    Fault,
    Scenario,
    Script,
    random_script,
)
from .simulation import Simulation

MAX_RUNS = 1000
"""The number of scripts within which a mistake is found; most are found in the first few."""


def scripts(scenario: Scenario) -> st.SearchStrategy[Script]:
    """All scripts of a scenario."""
    fault = st.builds(
        Fault,
        st.floats(0, 60).map(lambda at: round(at, 3)),
        st.sampled_from(KINDS if scenario == "steady" else KINDS + WORKER_KINDS),
        st.integers(0, 99),
        st.floats(0.1, MAX_SECONDS).map(lambda seconds: round(seconds, 3)),
    )
    return st.builds(
        Script,
        seed=st.integers(0, 1 << 32),
        workers=st.integers(1, 4),
        servers=st.integers(1, 4),
        steps=st.integers(1, 40),
        settles=st.booleans(),
        slow_seconds=st.sampled_from((0.05, 0.5, 2.0)),
        duplicates=st.sampled_from((0.0, 0.02, 0.2)),
        budget_bytes=st.sampled_from(BUDGETS),
        faults=st.lists(fault, max_size=8).map(lambda faults: tuple(sorted(faults))),
        scenario=st.just(scenario),
        left_over=st.booleans(),
        reshard_seconds=st.sampled_from(RESHARD_SECONDS),
        message_units=st.sampled_from(MESSAGE_UNITS),
        bytes_per_second=st.sampled_from((0.0, 0.0, 0.0, 200.0)),
        pods=st.booleans(),
        catches=st.booleans(),
    )


LOST_BUT_ALIVE = Script(
    seed=2,
    workers=2,
    servers=3,
    steps=40,
    slow_seconds=2.0,
    faults=(
        Fault(at=9.277, kind="stall server", target=4, seconds=12.034),
        Fault(at=15.081, kind="stall server", target=21, seconds=12.576),
        Fault(at=27.119, kind="stall server", target=39, seconds=10.881),
        Fault(at=38.285, kind="stall server", target=7, seconds=10.321),
    ),
)
"""A server that was lost sums what one rank has pushed again, and answers a rank that knows nothing of it."""

ONCE_FAILED = [
    # A late push comes when its result is forgotten, and the next step has fewer chunks.
    Script(
        seed=882,
        workers=2,
        servers=2,
        steps=50,
        runs_ahead=False,
        settles=False,
        slow_seconds=0.5,
        duplicates=0.2,
        budget_bytes=1,
        faults=(),
    ),
    # An answer is lost, and forgotten, and others have taken the room.
    Script(
        seed=1010,
        workers=2,
        servers=4,
        steps=40,
        runs_ahead=False,
        settles=False,
        slow_seconds=2.0,
        duplicates=0.02,
        budget_bytes=1,
        faults=(
            Fault(at=1.219, kind="drain server", target=13, seconds=20.849),
            Fault(at=15.599, kind="cut", target=45, seconds=24.917),
            Fault(at=17.13, kind="crash scheduler", target=55, seconds=10.305),
        ),
    ),
    # A round is recalled before the rank that lacks it has pushed all its chunks.
    Script(
        seed=1622,
        workers=2,
        servers=1,
        steps=54,
        runs_ahead=True,
        settles=False,
        slow_seconds=2.0,
        duplicates=0.0,
        budget_bytes=1048576,
        faults=(
            Fault(at=0.201, kind="lose", target=4, seconds=20.144),
            Fault(at=4.705, kind="lose", target=77, seconds=13.043),
            Fault(at=11.748, kind="lose", target=19, seconds=12.16),
            Fault(at=12.542, kind="stall server", target=36, seconds=18.463),
            Fault(at=30.779, kind="start server", target=20, seconds=14.855),
            Fault(at=37.63, kind="stall server", target=93, seconds=6.268),
            Fault(at=55.462, kind="crash scheduler", target=84, seconds=6.066),
        ),
    ),
    # Duplicates of what is forgotten ask for one another.
    Script(
        seed=1589,
        workers=2,
        servers=4,
        steps=56,
        runs_ahead=False,
        settles=True,
        slow_seconds=0.05,
        duplicates=0.2,
        budget_bytes=1,
        faults=(),
    ),
    # Several rings, and little room.
    Script(
        seed=1053,
        workers=2,
        servers=3,
        steps=43,
        runs_ahead=False,
        settles=True,
        slow_seconds=0.05,
        duplicates=0.02,
        budget_bytes=1,
        faults=(
            Fault(at=0.442, kind="stop server", target=63, seconds=0.618),
            Fault(at=2.255, kind="crash server", target=83, seconds=10.165),
            Fault(at=7.319, kind="crash scheduler", target=75, seconds=8.163),
            Fault(at=7.547, kind="stall worker", target=83, seconds=18.265),
            Fault(at=55.59, kind="crash server", target=21, seconds=21.21),
        ),
    ),
    # A chunk that was never pushed was pushed again, so its round was not completed without a lost rank.
    Script(
        seed=400284,
        workers=3,
        servers=2,
        steps=45,
        runs_ahead=True,
        settles=True,
        slow_seconds=0.5,
        duplicates=0.2,
        budget_bytes=1048576,
        faults=(
            Fault(at=0.153, kind="leave worker", target=64, seconds=9.115),
            Fault(at=0.153, kind="stall scheduler", target=68, seconds=24.188),
            Fault(at=12.001, kind="drain server", target=93, seconds=1.086),
        ),
        scenario="continue",
    ),
    # A late push asks for what all have ended, forgotten and settled, and takes the only room.
    Script(
        seed=400534,
        workers=3,
        servers=1,
        steps=47,
        runs_ahead=False,
        settles=False,
        slow_seconds=2.0,
        duplicates=0.2,
        budget_bytes=1,
        faults=(
            Fault(at=0.0, kind="drain server", target=78, seconds=21.743),
            Fault(at=27.8, kind="crash worker in an admission", target=33, seconds=18.247),
        ),
        scenario="continue",
    ),
    # A chunk that only one rank has takes the only room, and the ranks never learn that they disagree.
    Script(
        seed=9,
        workers=2,
        servers=2,
        steps=35,
        slow_seconds=0.05,
        duplicates=0.0,
        budget_bytes=1,
        faults=(
            Fault(at=0.241, kind="crash scheduler", target=95, seconds=22.182),
            Fault(at=2.521, kind="drain server", target=92, seconds=19.825),
            Fault(at=6.868, kind="stall scheduler", target=77, seconds=2.02),
            Fault(at=12.259, kind="crash scheduler", target=20, seconds=4.211),
            Fault(at=12.259, kind="stop server", target=64, seconds=21.793),
            Fault(at=22.562, kind="start server", target=17, seconds=4.654),
            Fault(at=22.815, kind="crash server", target=93, seconds=9.475),
        ),
        catches=True,
    ),
    # A rank pushes a round for the first time under a ring that is newer than its failure on the others.
    Script(
        seed=914,
        workers=3,
        servers=3,
        steps=44,
        slow_seconds=2.0,
        duplicates=0.02,
        budget_bytes=1024,
        faults=(Fault(at=40.535, kind="stop server", target=43, seconds=3.801),),
        settles=False,
        message_units=4,
        catches=True,
    ),
    # A rank pushes again what the others, which shard it differently, have given up.
    Script(
        seed=914,
        workers=4,
        servers=1,
        steps=1,
        slow_seconds=2.0,
        duplicates=0.0,
        budget_bytes=1,
        faults=(
            Fault(at=0.0, kind="crash server", target=3, seconds=1.0),
            Fault(at=0.0, kind="stall scheduler", target=0, seconds=4.0),
            Fault(at=15.0, kind="crash server", target=0, seconds=1.0),
        ),
        settles=False,
        left_over=True,
        catches=True,
    ),
    # A left-over server does not hear of its end; then a restarted scheduler hears of two jobs.
    Script(
        seed=0,
        workers=2,
        servers=1,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.2,
        budget_bytes=1,
        faults=(
            Fault(at=0.0, kind="cut", target=3, seconds=1.0),
            Fault(at=1.0, kind="crash scheduler", target=0, seconds=1.0),
        ),
        left_over=True,
        message_units=1024,
    ),
    # All workers have left, torchrun is about to start others, and the last server is stopped.
    Script(
        seed=1000836,
        workers=2,
        servers=1,
        steps=50,
        runs_ahead=False,
        settles=True,
        slow_seconds=2.0,
        duplicates=0.2,
        budget_bytes=8192,
        faults=(
            Fault(at=0.507, kind="leave worker", target=45, seconds=24.443),
            Fault(at=1.299, kind="stop server", target=40, seconds=22.534),
            Fault(at=2.593, kind="crash worker in a push", target=78, seconds=21.598),
            Fault(at=2.598, kind="drain server", target=31, seconds=22.045),
            Fault(at=6.722, kind="crash worker at a view", target=38, seconds=22.003),
            Fault(at=14.731, kind="crash worker at a view", target=87, seconds=11.726),
            Fault(at=31.669, kind="crash worker in an admission", target=76, seconds=24.663),
            Fault(at=54.538, kind="cut", target=29, seconds=11.207),
        ),
        scenario="restart",
        left_over=False,
        reshard_seconds=15.0,
        message_units=4,
        catches=True,
    ),
    # A failure is forgotten of a round that others have the result of, with the push of a rank that is lost.
    Script(
        seed=2000065,
        workers=3,
        servers=1,
        steps=11,
        runs_ahead=False,
        settles=True,
        slow_seconds=2.0,
        duplicates=0.2,
        budget_bytes=8192,
        faults=(
            Fault(at=3.667, kind="crash all workers but one", target=4, seconds=11.026),
            Fault(at=3.667, kind="lose", target=86, seconds=3.635),
            Fault(at=33.114, kind="start server", target=12, seconds=19.804),
            Fault(at=38.49, kind="leave worker", target=60, seconds=19.731),
        ),
        scenario="continue",
        left_over=True,
        reshard_seconds=0.0,
        message_units=1,
        catches=True,
    ),
    # The job had begun before its first scheduler heard of the left-over server, which has a newer view.
    Script(
        seed=75404,
        workers=1,
        servers=1,
        steps=1,
        runs_ahead=True,
        settles=False,
        slow_seconds=2.0,
        duplicates=0.0,
        faults=(Fault(at=0.75, kind="crash scheduler", target=0, seconds=1.0),),
        left_over=True,
    ),
    # Of the workers that wait for the end of a recovery, some have been ended by torchrun.
    Script(
        seed=1568,
        workers=2,
        servers=3,
        steps=48,
        runs_ahead=True,
        slow_seconds=0.5,
        duplicates=0.0,
        faults=(
            Fault(at=13.763, kind="drain server", target=0, seconds=0.546),
            Fault(at=22.399, kind="stall worker", target=57, seconds=10.641),
            Fault(at=31.578, kind="crash server", target=6, seconds=0.642),
            Fault(at=34.026, kind="cut", target=4, seconds=3.979),
            Fault(at=36.88, kind="crash scheduler", target=13, seconds=2.502),
            Fault(at=46.459, kind="crash all workers but one", target=60, seconds=10.812),
            Fault(at=48.047, kind="crash all workers but one", target=91, seconds=0.91),
        ),
        scenario="restart",
        left_over=True,
        reshard_seconds=15.0,
        message_units=4,
        catches=True,
    ),
    # A failed round is pushed again for another rank, and fails again.
    Script(
        seed=62,
        workers=4,
        servers=2,
        steps=17,
        runs_ahead=True,
        duplicates=0.2,
        faults=(
            Fault(at=0.255, kind="drain server", target=59, seconds=7.747),
            Fault(at=1.756, kind="stop server", target=20, seconds=0.194),
        ),
        catches=True,
    ),
    # A rank waits for room for a round that the others have given up.
    Script(
        seed=64,
        workers=2,
        servers=2,
        steps=45,
        slow_seconds=2.0,
        budget_bytes=1,
        faults=(
            Fault(at=0.935, kind="lose", target=51, seconds=13.404),
            Fault(at=2.485, kind="start server", target=90, seconds=22.817),
            Fault(at=31.215, kind="crash server", target=98, seconds=11.459),
            Fault(at=31.215, kind="lose", target=33, seconds=5.481),
            Fault(at=31.215, kind="stall server", target=22, seconds=2.635),
            Fault(at=31.215, kind="stall server", target=51, seconds=16.987),
            Fault(at=35.07, kind="stop server", target=10, seconds=21.533),
        ),
        reshard_seconds=2.0,
        catches=True,
    ),
    # A worker that was silent while it registered registers again, twice.
    Script(
        seed=0,
        workers=1,
        servers=1,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.0,
        budget_bytes=1048576,
        faults=(Fault(at=0.0, kind="stall worker", target=0, seconds=11.0),),
        scenario="restart",
    ),
    # A worker ends while the scheduler is away, and the other gives up before the restarted scheduler does.
    Script(
        seed=0,
        workers=2,
        servers=1,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.0,
        budget_bytes=1048576,
        faults=(
            Fault(at=0.0, kind="crash scheduler", target=0, seconds=7.0),
            Fault(at=0.0, kind="crash worker", target=0, seconds=1.0),
        ),
        scenario="fail",
    ),
    # A restarted scheduler is stopped before members have returned, until after they should have.
    Script(
        seed=1,
        workers=1,
        steps=1,
        slow_seconds=0.05,
        faults=(
            Fault(at=17.0, kind="crash scheduler", seconds=25.0),
            Fault(at=43.0, kind="stall scheduler", seconds=15.0),
        ),
    ),
    # All nodes of a job die before any worker has the state, and another job of the name begins.
    Script(
        seed=0,
        workers=1,
        servers=1,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.0,
        faults=(
            Fault(at=0.062, kind="crash server", target=0, seconds=1.0),
            Fault(at=1.0, kind="crash scheduler", target=0, seconds=1.0),
            Fault(at=3.0, kind="crash worker", target=0, seconds=1.0),
        ),
        scenario="continue",
    ),
    # Workers return without a quorum, and one that was started again waits: it begins another job.
    Script(
        seed=770052,
        workers=3,
        servers=1,
        steps=5,
        runs_ahead=False,
        settles=False,
        slow_seconds=2.0,
        duplicates=0.0,
        budget_bytes=1048576,
        faults=(
            Fault(at=1.748, kind="crash worker in a barrier", target=2, seconds=13.634),
            Fault(at=15.366, kind="crash scheduler", target=0, seconds=13.479),
            Fault(at=26.035, kind="stop server", target=7, seconds=18.465),
        ),
        scenario="continue",
        reshard_seconds=0.0,
        message_units=4,
    ),
    # A restarted scheduler makes up an identity for a worker that had left, and tells servers.
    Script(
        seed=0,
        workers=4,
        servers=2,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.0,
        faults=(
            Fault(at=0.0, kind="cut", target=13, seconds=1.0),
            Fault(at=1.0, kind="leave worker", target=1, seconds=1.0),
            Fault(at=2.0, kind="crash scheduler", target=0, seconds=1.0),
        ),
        scenario="fail",
    ),
    # What a server asks for again takes longer on the link than the server waits before it asks once more.
    Script(
        seed=1027,
        workers=4,
        servers=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.2,
        budget_bytes=1024,
        faults=(Fault(at=17.556, kind="stall scheduler", target=28, seconds=0.07),),
        reshard_seconds=15.0,
        message_units=1,
        bytes_per_second=15.0,
        catches=True,
    ),
    # A worker restarts in its pod, the scheduler, too, and the only server dies: nobody knows identities.
    Script(
        seed=904,
        workers=2,
        servers=1,
        steps=11,
        runs_ahead=True,
        slow_seconds=0.05,
        duplicates=0.02,
        faults=(
            Fault(at=14.195, kind="crash all workers but one", target=36, seconds=22.465),
            Fault(at=14.195, kind="crash worker in a barrier", target=30, seconds=21.813),
            Fault(at=14.53, kind="crash scheduler", target=3, seconds=11.979),
            Fault(at=21.82, kind="crash server", target=52, seconds=12.237),
        ),
        scenario="fail",
        left_over=True,
        message_units=1,
        pods=True,
    ),
    # Of a new job's two pods one ends before the other has its view, and there is a left-over server.
    Script(
        seed=1115,
        workers=2,
        servers=1,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.0,
        faults=(
            Fault(at=0.0, kind="crash server", target=1, seconds=6.0),
            Fault(at=0.0, kind="crash worker in a push", target=0, seconds=1.0),
        ),
        scenario="fail",
        left_over=True,
        message_units=4,
        pods=True,
    ),
    # A worker that is lost has begun a round with another, of whose loss the rest knows before it begins it.
    Script(
        seed=3691,
        workers=3,
        servers=2,
        steps=12,
        settles=False,
        slow_seconds=2.0,
        budget_bytes=8192,
        faults=(
            Fault(at=0.08, kind="stop server", target=39, seconds=0.674),
            Fault(at=13.149, kind="crash scheduler", target=68, seconds=17.515),
            Fault(at=24.062, kind="start server", target=8, seconds=14.595),
            Fault(at=33.09, kind="drain server", target=35, seconds=4.782),
            Fault(at=47.26, kind="crash all workers but one", target=61, seconds=0.065),
        ),
        scenario="continue",
        reshard_seconds=2.0,
        bytes_per_second=15.0,
    ),
    # Both ranks lack an answer that was forgotten, and push again at different times.
    Script(
        seed=0,
        workers=2,
        servers=1,
        steps=1,
        settles=False,
        slow_seconds=0.05,
        duplicates=0.0,
        budget_bytes=1024,
        faults=(Fault(at=0.0, kind="lose", target=0, seconds=5.0),),
        message_units=4,
        bytes_per_second=200.0,
    ),
    # A worker's first message at a barrier comes after it has passed the barrier, and after an admission.
    Script(
        seed=72,
        workers=2,
        servers=1,
        steps=12,
        settles=False,
        slow_seconds=2.0,
        duplicates=0.2,
        faults=(Fault(at=1.0, kind="leave worker", target=0, seconds=1.0),),
        scenario="continue",
    ),
]


@settings(max_examples=80, deadline=None)
@given(scripts("steady"))
def test_every_round_has_one_answer_under_any_faults(script: Script) -> None:
    Simulation(script).run()


@pytest.mark.parametrize("scenario", ["fail", "continue", "restart"])
def test_every_round_has_one_answer_when_workers_are_lost(scenario: Scenario) -> None:
    @settings(max_examples=25, deadline=None)
    @given(scripts(scenario))
    def run(script: Script) -> None:
        Simulation(script).run()

    run()


@settings(max_examples=25, deadline=None)
@given(scripts("steady"))
def test_every_round_has_one_answer_when_workers_run_ahead(script: Script) -> None:
    script = replace(script, runs_ahead=True, budget_bytes=max(BUDGETS))
    Simulation(script).run()


@pytest.mark.parametrize("script", ONCE_FAILED, ids=range(len(ONCE_FAILED)))
def test_scripts_that_once_failed(script: Script) -> None:
    Simulation(script).run()


REVEALING: dict[type, Script] = {
    OverwritesWhatHasEnded: Script(
        workers=4,
        servers=3,
        steps=10,
        slow_seconds=2.0,
        duplicates=0.2,
        budget_bytes=8192,
        scenario="continue",
    ),
}
"""Scripts that reveal a mistake under one seed in 25 or more, where random scripts need hundreds of runs."""


def is_plant(value: object) -> bool:
    return isinstance(value, type) and value.__module__ == plants.__name__


def plant_of(parts: Parts) -> type:
    types = (parts.membership, parts.rounds, parts.worker_rounds)
    return next(part for part in types if part.__module__.endswith("plants"))


def name_of(parts: Parts | Scenario) -> str:
    return parts if isinstance(parts, str) else plant_of(parts).__name__


@pytest.mark.parametrize(
    ("scenario", "parts"),
    [
        # The first of each scenario in the default suite.
        pytest.param(scenario, parts, marks=() if parts == plants[0] else pytest.mark.long)
        for scenario, plants in PLANTS.items()
        for parts in plants
    ],
    ids=name_of,
)
def test_a_mistake_is_found(scenario: Scenario, parts: Parts) -> None:
    revealing = REVEALING.get(plant_of(parts))

    def run() -> None:
        for seed in range(MAX_RUNS):
            script = replace(revealing, seed=seed) if revealing else random_script(seed, scenario)
            Simulation(script, parts).run()

    with pytest.raises(Violation):
        run()


@pytest.mark.parametrize("plant", [each for each in vars(plants).values() if is_plant(each)])
def test_a_plant_replaces_methods_that_exist(plant: type) -> None:
    """Otherwise it plants nothing, and what its test finds is something else."""
    own = {name for name, value in vars(plant).items() if callable(value) and not name.startswith("__")}
    assert own <= {name for base in plant.__mro__[1:] for name in vars(base)}


def test_memory_of_pushes_under_an_earlier_ring_is_not_overwritten() -> None:
    with pytest.raises(Violation, match="overwritten"):
        Simulation(LOST_BUT_ALIVE, Parts(worker_rounds=OverwritesEarlierPushes)).run()
    Simulation(LOST_BUT_ALIVE).run()


def test_a_server_of_a_dead_job_does_not_keep_the_next_from_beginning() -> None:
    script = Script(left_over=True)
    assert Simulation(script).run().rounds
    with pytest.raises(Violation, match="missing since"):
        Simulation(script, Parts(membership=WaitsForADeadJob)).run()


@pytest.mark.parametrize(
    ("is_alive", "has_state", "seen", "origin", "job"),
    [
        (False, False, (1001,), 8, 2),
        (True, False, (1001,), 8, 1),
        (False, True, (1001,), 8, 1),
        (False, False, (1000, 1001), 8, 1),
        (False, False, (1001,), 7, 1),
    ],
    ids=["all are dead", "one lives", "one had the state", "one is of the same view", "of one scheduler"],
)
def test_a_job_is_another_once_all_members_of_the_last_died_without_the_state(
    is_alive: bool, has_state: bool, seen: tuple[int, ...], origin: int, job: int
) -> None:
    simulation: Any = SimpleNamespace(workers=[], script=Script(scenario="continue"))
    promises = Promises(simulation)

    def worker(pid: int, seen: tuple[int, ...], origin: int) -> Any:
        view = SimpleNamespace(workers=[SimpleNamespace(pid=pid) for pid in seen], origin=origin)
        training = SimpleNamespace(has_state=has_state)
        made: Any = SimpleNamespace(pid=pid, is_pod=False, view=view, is_alive=is_alive, training=training)
        made.is_called = lambda member: member.pid == pid
        simulation.workers.append(made)
        made.job = promises.job_of(made)
        return made

    assert worker(1000, (1000,), 7).job == 1
    assert worker(1001, seen, origin).job == job


def test_another_job_that_begins_while_members_of_the_last_live_is_found() -> None:
    script = replace(random_script(1046, "continue"), budget_bytes=BUDGETS[2])
    with pytest.raises(Violation, match="but before"):
        Simulation(script, Parts(membership=BeginsAnew)).run()
    Simulation(script).run()


def test_the_loss_of_a_worker_ends_all_others_with_an_error_that_names_it() -> None:
    fault = Fault(3.0, "crash worker", target=1)
    simulation = Simulation(Script(workers=3, servers=2, steps=1000, faults=(fault,), scenario="fail"))
    simulation.run()
    others = [worker for worker in simulation.workers if worker.ended != "crashed"]
    assert len(others) == 2
    assert all("worker 1 (host host, pid 1001) is lost" in worker.error for worker in others)
    assert all(worker.gone_at < 3.0 + 2 * simulation.cluster.lease_seconds for worker in others)
    assert not any(server.is_alive for server in simulation.servers)


def test_an_elastic_job_continues_and_a_restarted_worker_comes_back() -> None:
    fault = Fault(3.0, "crash worker", target=1)
    simulation = Simulation(Script(workers=3, servers=2, steps=60, faults=(fault,), scenario="continue"))
    assert simulation.run().admissions == 1
    assert [worker.ended for worker in simulation.supervisor.current] == ["done"] * 3
    back = simulation.supervisor.current[1]
    assert back is not simulation.workers[1]
    assert (back.rank, back.training.step) == (1, 60)
    assert back.training.state == simulation.workers[0].training.state


def test_torchrun_restarts_all_workers() -> None:
    fault = Fault(3.0, "crash worker", target=1)
    simulation = Simulation(Script(workers=3, servers=2, steps=60, faults=(fault,), scenario="restart"))
    assert simulation.run().generations == 1
    assert [worker.ended for worker in simulation.supervisor.current] == ["done"] * 3


def test_the_same_seed_is_the_same_run() -> None:
    first, second = (Simulation(random_script(7)).run() for _ in range(2))
    assert first == second


def test_different_seeds_are_different_runs() -> None:
    report = simulate(rounds=500, seed=0)
    assert report.interleavings == report.runs > 1
    assert report.rounds >= 500
    assert not report.violation


def test_a_violation_comes_with_the_script_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Promises, "check_answer", fail)
    report = simulate(rounds=100, seed=3)
    assert report.runs == 1
    assert f"Simulation({random_script(3)!r}).run()" in report.violation


def fail(*_: object) -> None:
    raise Violation("planted")
