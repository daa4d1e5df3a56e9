"""Performance model of the CUDA kernels, from their machine code.

Each case runs one of ZenPS's ways to compact or encode a gradient. Its kernels are interpreted on a small
sample (:mod:`benchmarks.sass`), which gives instructions and bytes for each element; PyTorch's own operations
count with the bytes that they read and write. On a device, a kernel takes the greater of bytes over bandwidth
and instructions over issue rate, and each launch takes the host's time. Latency, occupancy, and atomics to
one address are not modelled: measured times stand beside the predicted ones (:mod:`benchmarks.bench_model`).

``python -m benchmarks.kernel_model`` writes ``benchmarks/results/kernel_model.json`` and the table of
``docs/performance.md``; ``tests/benchmarks/test_kernel_model.py`` fails if a kernel got more than 10 % worse.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cubins import compact_json
from benchmarks.model_cases import CASES, Case
from benchmarks.sass import CountingLauncher

RESULTS = Path(__file__).parent / "results" / "kernel_model.json"
MEASURED = RESULTS.with_name("kernels-h200.json")
DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- Written by benchmarks/kernel_model.py. -->\n", "<!-- End of the table. -->\n"

# Of an H200: the bandwidth of its data sheet less a tenth; 132 multiprocessors, each of which issues four
# warp instructions in each of 1.755e9 cycles a second; and what a launch costs the host at least.
BYTES_PER_SECOND = 4.3e12
INSTRUCTIONS_PER_SECOND = 132 * 4 * 32 * 1.755e9
LAUNCH_SECONDS = 3e-6

FREE = {
    "empty", "view", "_unsafe_view", "as_strided", "slice", "select", "t", "detach", "alias", "unsqueeze",
    "squeeze", "empty_like", "new_empty", "reshape", "expand", "permute", "transpose", "split", "unbind",
    "split_with_sizes",
}  # fmt: skip
"""ATen operations that start nothing on a device."""


class Cost(NamedTuple):
    """What one launch costs on the whole sample; ``instructions`` are 0 where they are not known."""

    name: str
    instructions: float
    bytes: float

    def seconds(self) -> float:
        """Predicted time on the device."""
        return max(self.bytes / BYTES_PER_SECOND, self.instructions / INSTRUCTIONS_PER_SECOND)


class _Recorder(TorchDispatchMode):
    """Records the kernels of ``launcher`` and PyTorch's operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.launcher = CountingLauncher()
        self._costs: list[Cost] = []

    def costs(self) -> list[Cost]:
        kernels = [
            Cost(each.expression, each.instructions, each.read_bytes + each.written_bytes)
            for each in self.launcher.launches
        ]
        return kernels + self._costs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name not in FREE:
            moved = sum(each.nbytes for each in _tensors((args, kwargs, result)))
            self._costs.append(Cost(f"torch.{name}", 0, moved))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


class Entry(NamedTuple):
    """A case's row of the table.

    Attributes:
        elements: of the gradient in the predicted case.
        instructions, bytes, floor_bytes: for each element; bytes are those of global memory.
        launches: kernels of ZenPS and PyTorch.
        over_floor: predicted time on the device, over that of the bytes that every way must move.
        with_launches_over_floor: the same, with 3 µs added for each launch.
    """

    elements: int
    instructions: float
    bytes: float
    floor_bytes: float
    launches: int
    over_floor: float
    with_launches_over_floor: float
    parts: dict[str, tuple[float, float]]
    """Instructions and bytes for each element, by kernel."""


def evaluate(case: Case) -> Entry:
    """Interprets a case's kernels, and predicts its time."""
    torch.manual_seed(1)
    prepared = case.sampled()
    sampled, floor_bytes = prepared.elements, prepared.floor_bytes
    with _Recorder() as recorder:
        prepared.run(recorder.launcher)
    costs = recorder.costs()
    seconds = sum(cost.seconds() for cost in costs) / sampled
    floor_seconds = floor_bytes / sampled / BYTES_PER_SECOND
    launches = len(costs)
    waiting = launches * LAUNCH_SECONDS / case.elements
    parts: dict[str, tuple[float, float]] = {}
    for cost in costs:
        instructions, moved = parts.get(cost.name, (0.0, 0.0))
        parts[cost.name] = instructions + cost.instructions / sampled, moved + cost.bytes / sampled
    rounded = {name: (round(part[0], 2), round(part[1], 2)) for name, part in parts.items()}
    return Entry(
        case.elements,
        round(sum(cost.instructions for cost in costs) / sampled, 2),
        round(sum(cost.bytes for cost in costs) / sampled, 2),
        round(floor_bytes / sampled, 2),
        launches,
        round(seconds / floor_seconds, 2),
        round((seconds + waiting) / floor_seconds, 2),
        rounded,
    )


def table(entries: dict[str, dict[str, Any]]) -> str:
    """The Markdown table of the JSON file's ``entries``, beside what an H200 measured."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["entries"]
    lines = [
        "| on an H200 | instructions | bytes | launches | × floor predicted | with launches "
        "| measured | measured, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name} | {each['instructions']:.1f} | {each['bytes']:.2f} | {each['launches']} "
        f"| {each['over_floor']:.2f} | {each['with_launches_over_floor']:.2f} "
        f"| {measured[name][2]:.2f} | {measured[name][0]:.3f} |"
        for name, each in entries.items()
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str, entries: dict[str, dict[str, Any]]) -> str:
    """The page with its table renewed."""
    before, _, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    assert ended, f"expected {BEGIN!r} and {END!r} in the page"
    return before + BEGIN + table(entries) + END + after


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write (default: %(default)s)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="page with the table (default: %(default)s)")
    options = parser.parse_args(arguments)
    entries = {name: evaluate(case)._asdict() for name, case in CASES.items()}
    report = {
        "device": "H200, predicted",
        "bytes_per_second": BYTES_PER_SECOND,
        "instructions_per_second": INSTRUCTIONS_PER_SECOND,
        "launch_seconds": LAUNCH_SECONDS,
        "entries": entries,
    }
    options.json.write_text(compact_json(report) + "\n", encoding="utf-8")
    options.docs.write_text(with_table(options.docs.read_text(encoding="utf-8"), entries), encoding="utf-8")
    print(table(entries))


if __name__ == "__main__":
    main()
