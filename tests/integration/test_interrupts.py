"""Ctrl-C at every point of a push_pull, with real roles: results stay right, and nothing stalls."""

from __future__ import annotations

import dis
import os
import random
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import zenps as zps
from tests.integration.cluster import Cluster, await_file
from tests.integration.interrupts import interrupted_in
from zenps.errors import UsageError
from zenps.worker.core.pending import Pending

SOON_SECONDS = 10.0
"""Far below the 60 s after which an unanswered push is repeated."""

# Instructions after which CPython handles signals.
CHECKED = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX"}
PACKAGE = Path(zps.__file__).parent.parent.resolve()
# Finalizers are called by weakref.
TRACED = (*(str(PACKAGE / folder) for folder in ("worker", "zenps")), weakref.__file__)


class Interrupter:
    """Sends SIGINT to this thread at the n-th traced instruction after which Python handles signals."""

    def __init__(self, after: int) -> None:
        self.left = after
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            is_checked = self._last.get(frame) in CHECKED
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if is_checked:
                self.left -= 1
                if not self.left:
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace


def soon(tensor: Tensor, name: str) -> Tensor:
    """The sum, by a push that is repeated while the name is in flight."""
    until = time.monotonic() + SOON_SECONDS
    while True:
        try:
            return answer(zps.push_pull_async(tensor, name, average=False))
        except UsageError as error:
            if "in flight" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.001)


def answer(handle: Pending) -> Tensor:
    """What :func:`zenps.synchronize` returns; asserts that it is soon."""
    began = time.monotonic()
    result = zps.synchronize(handle)
    assert time.monotonic() - began < SOON_SECONDS
    return result


def is_right(result: Tensor, tensor: Tensor) -> bool:
    return bool(torch.equal(result.to_dense(), tensor.to_dense()))


def at_every_point(kind: str, stride: int) -> int:
    """Interrupts a push_pull after n instructions, for n = 1, 1 + stride, … until it ends before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    makers = {
        "small": lambda n: torch.full((256,), float(n)),
        "large": lambda n: torch.arange(100_000.0) + n,
        "sparse": lambda n: torch.sparse_coo_tensor(
            torch.tensor([[1, 5000, 1]]), torch.full((3, 8), float(n)), (10_000, 8)
        ),
    }
    after, interrupted = 1, 0
    while True:
        tensor, handle = makers[kind](after), None
        with Interrupter(after) as interrupter:
            try:
                handle = zps.push_pull_async(tensor, "x", average=False)
                assert is_right(zps.synchronize(handle), tensor)
                handle = None  # drops the result
            except KeyboardInterrupt:
                interrupted += 1
            else:
                assert interrupter.left > 0, f"an interrupt at {after} was lost"
        if handle is not None:
            assert is_right(answer(handle), tensor), f"wrong after an interrupt at {after}"
        for name in ("x", "y"):
            assert is_right(soon(tensor * 2, name), tensor * 2), f"wrong after an interrupt at {after}"
        if interrupter.left > 0:
            return interrupted
        after += stride


@pytest.mark.parametrize("kind", ["small", "large", "sparse"])
def test_an_interrupt_at_any_instruction_loses_nothing(kind: str) -> None:
    with Cluster(workers=1, servers=2) as cluster:
        (interrupted,) = cluster.run(at_every_point, kind, 3)
    assert interrupted > 5  # fewer on Python 3.13, which looks for signals at fewer instructions


def at_random_times(count: int) -> int:
    """Signals come while this waits for answers, as Ctrl-C does; waits again, with the same handles."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = random.Random(zps.rank())
    interrupted = 0
    tensors = [torch.arange(400_000.0) + i for i in range(4)]
    for _ in range(count):
        begun, results = threading.Event(), []

        def interrupt(begun: threading.Event = begun, seconds: float = chosen.uniform(0, 0.01)) -> None:
            begun.wait()
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

        killer = threading.Thread(target=interrupt)
        killer.start()
        handles = [zps.push_pull_async(tensor, f"t{i}", average=False) for i, tensor in enumerate(tensors)]
        try:
            begun.set()
            for handle in handles:
                answer(handle)
            killer.join()
            time.sleep(SOON_SECONDS)  # the signal comes here at the latest
        except KeyboardInterrupt:
            interrupted += 1
        killer.join()
        results = [answer(handle) for handle in handles]
        for result, tensor in zip(results, tensors, strict=True):
            assert torch.equal(result, zps.size() * tensor)
    return interrupted


def test_waits_that_signals_interrupt_at_random_times_can_be_repeated() -> None:
    with Cluster(workers=2, servers=2) as cluster:
        assert cluster.run(at_random_times, 60) == [60, 60]


def wait_for_a_late_rank(directory: Path) -> tuple[float, float]:
    """Rank 0 is interrupted before rank 1 pushes; returns when, and the result at last."""
    tensor, ended_after = torch.ones(3), 0.0
    if zps.rank() == 0:
        handle, begin = zps.push_pull_async(tensor, "x", average=False), time.monotonic()
        with interrupted_in(Pending.wait):
            handle.wait()
        ended_after = time.monotonic() - begin
        (directory / "interrupted").touch()
    else:
        await_file(directory / "interrupted")
        handle = zps.push_pull_async(tensor, "x", average=False)
    return ended_after, float(answer(handle).sum())


def test_an_interrupt_ends_a_wait_for_a_rank_that_is_late(tmp_path: Path) -> None:
    with Cluster(workers=2, servers=1) as cluster:
        (seconds, first), (_, second) = cluster.run(wait_for_a_late_rank, tmp_path)
    assert seconds < SOON_SECONDS
    assert first == second == 6.0
