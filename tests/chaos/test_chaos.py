"""A short form of ``make chaos``, and tests that it notices faults."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.chaos import chaos as harness
from tests.chaos import run
from tests.chaos.chaos import Report, chaos
from tests.chaos.extremes import Sizes, _play, _train, extremes
from tests.chaos.job import Model, digest, loss_of, optimizers_of
from tests.chaos.nodes import SERVERS, Nodes, Server
from tests.chaos.run import Run
from tests.chaos.schedule import KILLS, Counts, Done, Event, draw
from tests.chaos.workers import Loss, Survivor, lose_with_gloo
from tests.integration.cluster import Cluster


@pytest.mark.long
def test_weights_keep_their_bits_while_servers_and_the_scheduler_are_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "LOGS", tmp_path)
    report = chaos(1, Counts(kills=4, scheduler_kills=1, drains=1, joins=1), 200, lease_seconds=4.0, seed=1)
    assert report.faults == []
    assert report.good
    assert sum(report.kills.values()) == 4
    assert (report.scheduler_kills, report.drains, report.joins) == (1, 1, 1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_training_goes_on_under_extreme_conditions() -> None:
    ends = list(extremes(Sizes(in_flight_bytes=128 << 20, idle=100)))
    assert [one.fault for one in ends] == [""] * 4


@pytest.mark.long
def test_gloo_does_not_say_who_is_lost() -> None:
    loss = lose_with_gloo(signal.SIGKILL)
    assert [one.rank for one in loss.survivors] == [0, 1]
    assert not any(one.names_victim for one in loss.survivors)


# ── that it would notice ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("survivor", "good"),
    [
        (Survivor(1, "PeerLostError", "worker 2 (host a, pid 1) was silent", 1.0, names_victim=True), True),
        (Survivor(1, "PeerLostError", "a worker was silent", 1.0, names_victim=False), False),
        (Survivor(1, "DeadlineError", "no answer of worker 2", 20.0, names_victim=True), False),
        (Survivor(1, "", "", 30.0, names_victim=False), False),
    ],
    ids=["named", "not named", "another error", "hangs"],
)
@pytest.mark.parametrize("system", ["ZenPS", "gloo"])
def test_all_must_be_told_of_a_lost_worker(system: str, survivor: Survivor, good: bool) -> None:
    told = Survivor(0, "PeerLostError", "worker 2 (host a, pid 1) was silent", 1.0, names_victim=True)
    report = Report(0, "", 3, 2, 600, 1.0, losses=[Loss(system, "SIGKILL", [told, survivor])])
    assert report.good is (good or system == "gloo")


class NodesThatDoNotJoin(Nodes):
    """Instead of each server that shall join a running job, a process sleeps."""

    def start_server(self) -> Server:
        if len(self.servers) < SERVERS:
            return super().start_server()
        self.servers.append(Server(self._start("asleep", time.sleep, 600.0)))
        return self.servers[-1]


@pytest.mark.long
def test_a_server_that_does_not_join_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "Nodes", NodesThatDoNotJoin)
    monkeypatch.setattr(run, "RUN_SECONDS", 40.0)
    played = Run(tmp_path, 20, 4.0, [Event(1, 0.0, "join")], random.Random(0), apart=False)
    played.play()
    assert played.faults == ["not over after 40 s", "asleep has not joined"]


@pytest.mark.long
def test_an_error_without_a_text_is_a_fault() -> None:
    def fail(_: Cluster) -> None:
        raise AssertionError

    extreme = _play("an attack that fails", {}, _train, Sizes(), fail)
    assert extreme.fault == "AssertionError()"


def train_alone(skipped: int | None) -> str:
    torch.manual_seed(0)
    model = Model()
    optimizers = optimizers_of(model)
    for step in range(3):
        model.zero_grad()
        loss_of(model, step, 0).backward()
        for number, optimizer in enumerate(optimizers):
            if (step, number) != (1, skipped):
                optimizer.step()
    return digest(model, optimizers)


def test_a_gradient_that_is_lost_changes_the_digest() -> None:
    digests = [train_alone(skipped) for skipped in (None, 0, 1, 2)]
    assert train_alone(None) == digests[0]
    assert len(set(digests)) == 4


def test_one_bit_of_a_state_changes_the_digest() -> None:
    model = Model()
    optimizers = optimizers_of(model)
    before = digest(model, optimizers)
    optimizers[0].state[model.words.weight]["sum"].view(torch.int32)[7, 3] ^= 1
    assert digest(model, optimizers) != before


def test_a_pause_is_the_longest_step_up_to_the_second_after_the_event() -> None:
    steps = [(0.0, 1.0), (1.0, 2.1), (2.2, 5.0), (5.0, 5.1), (5.2, 9.0), (9.0, 20.0)]
    assert Done("SIGKILL", 0, since=0.9).pause_seconds(steps) == pytest.approx(1.1)
    assert Done("SIGKILL", 0, since=3.0).pause_seconds(steps) == pytest.approx(2.0), "it was in flight"
    assert Done("drain", 0, since=2.0, until=5.05).pause_seconds(steps) == pytest.approx(3.8)
    assert Done("SIGKILL", 0, since=30.0).pause_seconds(steps) == 0


@pytest.mark.parametrize("apart", [True, False])
def test_events_are_in_order_and_come_while_the_scheduler_is_away_only_where_they_may(apart: bool) -> None:
    counts = Counts(kills=10, scheduler_kills=1, drains=1, joins=2)
    for seed in range(200):
        events = draw(random.Random(seed), counts, 600, 1.0, apart)
        assert events == draw(random.Random(seed), counts, 600, 1.0, apart)
        assert sum(event.act in KILLS for event in events) == 10
        assert [event.step for event in events] == sorted(event.step for event in events)
        assert events[0].step > 0
        assert events[-1].step < 0.85 * 600
        at = next(index for index, event in enumerate(events) if event.act == "scheduler")
        for event in events[at + 1 : at + 2]:
            assert event.step > events[at].step + 99 if apart else event.step == events[at].step
