from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.autograd.profiler import profile

from zenps.observe.trace import NOTHING, TraceWriter
from zenps.worker.core.spans import Spans

# Without Kineto, whose first start takes seconds: tests/integration/test_timeline.py has torch.profiler.


def test_nobody_looks_on() -> None:
    assert Spans()("push", "emb", 3) is NOTHING


def test_the_profiler_alone() -> None:
    spans = Spans()
    with profile(use_kineto=False) as profiler:
        with spans("compact", "emb", 3) as span:
            assert not span
            torch.ones(10).sum()
        with spans("barrier"):
            pass
    (compact,) = [event for event in profiler.function_events if event.name == "zenps::compact(emb)"]
    assert "aten::sum" in {child.name for child in compact.cpu_children}
    assert "zenps::barrier()" in {event.name for event in profiler.function_events}
    assert spans("compact", "emb", 3) is NOTHING  # as it is over


def test_the_profiler_and_a_timeline(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "part", "worker")
    spans = Spans(writer)
    with profile(use_kineto=False) as profiler, spans("scatter", "emb", 3) as span:
        assert span
        span.note(rows=5)
    writer.close()
    assert "zenps::scatter(emb)" in {event.name for event in profiler.function_events}
    (event,) = [e for e in json.loads(writer.path.read_text()) if e.get("cat") == "scatter"]
    assert event["args"] == {"tensor": "emb", "step": 3, "rows": 5}
