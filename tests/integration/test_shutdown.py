"""However a job ends: every role ends with it, soon, with the right exit code, and without our tracebacks.

Real processes, as users start them. Each case is a state in which rank 0 is, and a way in which the job
ends there. Rank 1 keeps rank 0 in that state.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.zenps.conftest import PATIENT_ZENPS

END_SECONDS = 30.0
LEASE_SECONDS = 60.0  # no job ends by it in time

OUTSIDE = {"ctrl-c": (signal.SIGINT, 130), "sigterm": (signal.SIGTERM, 143)}
INSIDE = {"exception": 1, "sys.exit": 7, "os._exit": 8, "kill": 137, "sigterm worker": 143}

TRAIN = """
import os, signal, sys, time

state, way, rank = os.environ["STATE"], os.environ["WAY"], int(os.environ["RANK"])
if state == "rendezvous" and rank == 1:
    print("ready", flush=True)
    time.sleep(600)

import torch
import torch.distributed as dist
import zenps as zps

def end():
    # What the others wait for is not there yet; they are in their state once they have had this time.
    time.sleep(0.5)
    print("ready", time.time(), flush=True)
    if state == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "exception":
        raise RuntimeError("the user's own")
    if way == "sys.exit":
        sys.exit(7)
    if way == "os._exit":
        os._exit(8)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "sigterm worker":
        os.kill(os.getpid(), signal.SIGTERM)
    if way != "return":  # the script ends, without zps.shutdown()
        time.sleep(600)

def enter():
    if state == "computing":
        while True:
            torch.ones(1000).sum()
    if state == "barrier":
        zps.barrier()
    if state in ("push_pull", "stopped"):
        zps.push_pull(torch.ones(100_003), "x")
    if state == "backward":
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    if state == "ddp":
        ddp(torch.ones(4)).sum().backward()

torch.set_num_threads(1)
if state == "rendezvous":
    print("ready", flush=True)
zps.init()
model = torch.nn.Linear(4, 4)
optimizer = zps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
if state == "ddp":
    model = torch.nn.Linear(4, 4)
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(zps.CommHookState(), zps.comm_hook)
zps.barrier()
end() if rank == 1 else enter()
"""


class Case(NamedTuple):
    """One end of a job."""

    state: str
    way: str
    code: int

    def __str__(self) -> str:
        return f"{self.state}, {self.way}"


def cases() -> list[Case]:
    states = ["rendezvous", "computing", "push_pull", "barrier", "backward", "ddp", "stopped"]
    found = [Case(state, way, code) for state in states for way, (_, code) in OUTSIDE.items()]
    found += [Case(state, way, code) for state in states[1:-1] for way, code in INSIDE.items()]
    # Nothing is wrong with rank 1, but rank 0 waits for it, and fails.
    return found + [Case(state, "return", 1) for state in states[2:-1]]


# The others take minutes, most of which are imports of torch.
SHORT = {("rendezvous", "ctrl-c")}
LONG = {
    ("stopped", "sigterm"),
    ("backward", "kill"),
    ("ddp", "exception"),
    ("push_pull", "sys.exit"),
    ("push_pull", "return"),
    ("barrier", "os._exit"),
}
CHOSEN = [
    pytest.param(case, marks=() if case[:2] in SHORT else pytest.mark.long, id=str(case))
    for case in cases()
    if os.environ.get("ZENPS_TEST_EVERY") or case[:2] in SHORT | LONG
]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.parametrize("case", CHOSEN)
def test_launch(zenps: Any, train: Path, case: Case) -> None:
    lease = ("--set", f"cluster.lease_seconds={LEASE_SECONDS}")
    arguments = ("--workers", "2", "--servers", "1", *lease, "--", sys.executable, str(train))
    env = {"STATE": case.state, "WAY": case.way}
    popen = zenps.start("launch", *arguments, env=env, start_new_session=True, program=PATIENT_ZENPS)
    lines = await_ready(popen, 2 if case.state == "rendezvous" else 1)
    if case.way in OUTSIDE:
        time.sleep(0.2)  # rank 1 stops, or rank 0 begins to wait
        begin = time.time()
        end = os.killpg if case.way == "ctrl-c" else os.kill
        end(popen.pid, OUTSIDE[case.way][0])
    else:
        begin = float(lines[-1].split()[-1])
    out, err = popen.communicate(timeout=60)
    took = time.time() - begin
    assert popen.returncode == case.code, err
    assert zenps.processes() == {}
    assert took < END_SECONDS, err
    assert_only_the_users_tracebacks(case, out + err)
    print(f"{case}: {took:.2f} s")  # shown by pytest -rP


def await_ready(popen: subprocess.Popen[str], count: int) -> list[str]:
    assert popen.stdout is not None
    ready: list[str] = []
    while len(ready) < count:
        line = popen.stdout.readline()
        assert line, popen.communicate(timeout=10)
        if "ready" in line:
            ready.append(line)
    return ready


def assert_only_the_users_tracebacks(case: Case, text: str) -> None:
    """Of the training script: rank 1's own, and what our errors raise in rank 0's."""
    assert "Exception ignored" not in text
    assert "Exception in thread" not in text
    assert "not ended after" not in text or case.state == "ddp"
    blocks = text.split("Traceback (most recent call last):")[1:]
    assert all("train.py" in block for block in blocks)
    assert not any(" | Traceback" in line and not line.startswith("worker") for line in text.splitlines())
    if case.way in OUTSIDE:
        # Rank 1 is told to end first: rank 0 may see it leave before it is told, too.
        assert all("left the job" in block for block in blocks)
    if case.way == "exception":
        assert "RuntimeError: the user's own" in text


HANDLED = """
import os, signal, sys, threading, time
import zenps as zps

def end(*_):
    zps.shutdown()
    sys.exit(7)

def terminate():
    print("ready", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

def train():
    import torch
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = zps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    for step in range(9):
        if rank == 1 and step == 5:
            return
        weight.sum().backward()
        if step == 5:
            threading.Timer(1.0, terminate).start()
        optimizer.step()
        optimizer.zero_grad()

signal.signal(signal.SIGTERM, end)
state, rank = os.environ["STATE"], int(os.environ["RANK"])
if state != "init":
    zps.init()
if state == "step":
    train()
if rank == 1:
    time.sleep(600)
wait = zps.init if state == "init" else zps.shutdown  # imports torch
threading.Timer(1.0, terminate).start()
wait()
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.parametrize("state", ["step", "init", "shutdown"])
def test_a_handler_of_the_script_may_call_shutdown_within(zenps: Any, tmp_path: Path, state: str) -> None:
    """It runs on the thread that waits for the others there; in a step, for what leaving would drain."""
    (tmp_path / "train.py").write_text(HANDLED)
    consistency = ("--set", "sync.consistency=ssp")
    script = (sys.executable, str(tmp_path / "train.py"))
    arguments = ("--workers", "2", "--servers", "1", *consistency, "--", *script)
    popen = zenps.start("launch", *arguments, env={"STATE": state}, start_new_session=True)
    (line,) = await_ready(popen, 1)
    out, err = popen.communicate(timeout=60)
    assert time.time() - float(line.split()[-1]) < END_SECONDS, err
    assert popen.returncode == 7, out + err
    assert "Traceback" not in out + err
