"""Figures on pages that are written by hand, beside the files that they were measured in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.simulation.plants import PLANTS

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text("utf-8").split())


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text("utf-8"))
    return found


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def test_fuzzing_s_figures_are_those_that_were_measured() -> None:
    run, text = results("fuzz.json"), page("reliability.md")
    grown = run["resident_after_bytes"] - run["resident_before_bytes"]
    assert f"{spaced(run['inputs'])} in {run['seconds']:.0f} s" in text
    assert f"{run['hangs']}; the slowest took {1000 * run['slowest_seconds']:.0f} ms" in text
    assert f"{grown / MIB:.1f} MiB on {run['resident_before_bytes'] / MIB:.0f} MiB" in text


def test_all_planted_mistakes_are_counted() -> None:
    assert f"{sum(map(len, PLANTS.values()))} mistakes are planted" in page("reliability.md")


@pytest.mark.parametrize("name", ["loopback-700001x48.json", "loopback-500000x32.json", "kernels.json"])
def test_the_machine_is_the_one_that_was_measured(name: str) -> None:
    machine, text = results(name)["machine"], page("performance.md")
    assert machine["cores"] == 2
    assert f"One virtual machine with two cores ({machine['cpu']}, no GPU)" in text


def cells(text: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    rows = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def loopback(name: str) -> dict[tuple[int, str, int], tuple[dict[str, float], float]]:
    """Milliseconds of each way, and the speed-up over gloo, by workers, way to the same host, and levels."""
    return {
        (found["workers"], found["setup"]["same_host"], found["setup"]["levels"]): (
            {way: 1000 * took["p50_seconds"] for way, took in found["block"]["table"].items()},
            found["speedup"],
        )
        for found in results(name)["measurements"]
        if found["setup"]["partition"] == "balanced"
    }


def test_the_readme_s_loopback_is_what_was_measured() -> None:
    rows, measured = cells((ROOT / "README.md").read_text("utf-8")), loopback("loopback-700001x48.json")
    for workers in (2, 8):
        took, _ = measured[workers, "memory", 1]
        own, dense = took.pop("zenps"), took["gloo dense"]
        name = f"one host, 700 001 × 48, {workers} workers"
        times = [f"{own:.0f}", f"{min(took.values()):.0f}", "", f"{dense:.0f}"]
        assert [name, *times, f"{dense / own:.1f} ×"] in rows
    few, many = (measured[workers, "tcp", 1][1] for workers in (2, 8))
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"takes {few:.2f} and {many:.2f} × as long as ZenPS by TCP" in text


@pytest.mark.parametrize("name", ["loopback-700001x48.json", "loopback-500000x32.json"])
def test_loopback_is_what_was_measured(name: str) -> None:
    rows, measured = cells((ROOT / "docs" / "performance.md").read_text("utf-8")), loopback(name)
    for workers in (2, 4, 8):
        took, speedup = measured[workers, "memory", 1]
        others = [measured[workers, way, levels][1] for way, levels in (("tcp", 1), ("memory", 2))]
        times = [f"{took[way]:.1f}" for way in ("zenps", "gloo dense", "gloo sparse", "gloo gather")]
        expected = [str(workers), *times, *(f"{each:.2f} ×" for each in (speedup, *others))]
        assert expected in [row[1:] for row in rows]


def test_processor_times_are_what_was_measured() -> None:
    measured = {
        (found["workers"], found["setup"]["same_host"]): found["block"]["table"]["zenps"]["processor_seconds"]
        for found in results("loopback-700001x48.json")["measurements"]
        if (found["setup"]["partition"], found["setup"]["levels"]) == ("balanced", 1)
    }
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    rows = cells(text.partition("## Processor time")[2].partition("\n## ")[0])[2:]
    ways = ("memory", "tcp")
    assert rows == [[str(n), *(f"{1000 * measured[n, way]:.1f}" for way in ways)] for n in (2, 4, 8)]


def test_versions_that_were_tested_are_those_of_ci_and_of_the_gpu() -> None:
    """CI has the versions of constraints.txt, and the interpreter that made the other figures."""
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert pinned is not None
    cpu, gpu = (results(name)["versions"] for name in ("kernels.json", "gpu-h200-700001x48.json"))
    python, on_gpu, gpu_torch = (
        version.rpartition(".")[0] for version in (cpu["python"], gpu["python"], gpu["torch"])
    )
    tested = f"(tested: {python} with {pinned[1]}, and on a GPU {on_gpu} with {gpu_torch})"
    assert tested in (ROOT / "README.md").read_text("utf-8")


def test_the_last_run_on_a_gpu_is_dated() -> None:
    names = ("compaction-h200.json", "kernels-h200.json", "gpu-h200-700001x48.json")
    (day,) = {results(name)["started"].partition("T")[0] for name in names}
    assert f"ran on one H200, last on {day};" in page("usage.md")


@pytest.mark.parametrize("workload", ["lstm", "deepfm", "nmt", "opt"])
def test_the_readme_s_eight_hosts_are_what_was_measured(workload: str) -> None:
    seconds = {
        found["scheme"]: found["seconds"]
        for found in results("net.json")["measurements"]
        if (found["workload"], found["workers"], found["mbit"]) == (workload, 8, 50)
    }
    took = {scheme: 1000 * median(of_steps) for scheme, of_steps in seconds.items()}
    own, dense = took["zenps"], took["gloo dense"]
    others = [scheme for scheme in took if not scheme.startswith(("zenps", "auto", "gloo"))]
    columns = ("zenps", min(others, key=took.__getitem__), "zen", "gloo dense")
    times = [f"{took[scheme]:.0f}{'¹' * (len(seconds[scheme]) == 1)}" for scheme in columns]
    factor = f"{dense / own:.0f} ×" if dense > 10 * own else f"{dense / own:.1f} ×"
    rows = cells((ROOT / "README.md").read_text("utf-8"))
    [shown] = [row[1:] for row in rows if row[0].lower().startswith(f"{workload},")]
    assert [cell.replace(" ", "") for cell in shown] == [*times, factor.replace(" ", "")]


def test_the_cost_of_a_push_by_table_size_is_what_was_measured() -> None:
    rows = cells((ROOT / "docs" / "performance.md").read_text("utf-8"))
    names = {10**6: "10⁶", 10**8: "10⁸", 10**9: "10⁹", 1 << 34: "2³⁴", 1 << 40: "2⁴⁰"}
    tables = results("tables.json")["tables"]
    assert [table["messages"] for table in tables] == [2] * len(tables)
    for table in tables:
        push, processor = (f"{1000 * table[field]:.2f}" for field in ("seconds", "processor_seconds"))
        ratio, first = f"{table['ratio']:.2f} ×", f"{1000 * table['first_seconds']:.0f}"
        assert [f"{names[table['rows']]} × {table['columns']}", push, processor, ratio, first] in rows


def test_what_sorting_takes_on_a_gpu_is_what_was_measured() -> None:
    over = re.search(r"`sort` takes ([\d.]+) to ([\d.]+) × the floor", page("performance.md"))
    assert over is not None
    measured = [
        found["over_floor"]
        for found in results("compaction-h200.json")["results"]
        if found["way"] == "sort_compact"
        and (found["case"]["ids"], found["case"]["dtype"]) == (10**6, "float32")
        and found["case"]["dim"] >= 64
    ]
    assert [f"{bound:.1f}" for bound in (min(measured), max(measured))] == list(over.groups())


def test_threads_have_the_names_that_the_architecture_gives() -> None:
    table = (
        (ROOT / "docs" / "architecture.md")
        .read_text("utf-8")
        .partition("## Threads")[2]
        .partition("\n## ")[0]
    )
    shown = set(re.findall(r"`(zenps-[a-z-]+)`", table))
    sources = [
        path.read_text("utf-8")
        for folder in ("worker", "server", "scheduler", "zenps")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = set(re.findall(r"(?:name|thread_name_prefix)=\"(zenps-[a-z-]+)\"", "\n".join(sources)))
    assert shown == named | {"zenps-host", "zenps-host-link"}, "those two are put together where they start"
