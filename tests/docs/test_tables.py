"""Tables on pages that are written by hand, beside the files that their figures were measured in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from statistics import mean, median
from typing import Any

import msgspec
import pytest

from benchmarks.bench_compaction import Report as Compaction
from tests.docs.test_figures import ROOT, cells, page, results, spaced
from tests.soak.soak import Report as Soak

Found = dict[str, Any]


def shown(name: str) -> list[list[str]]:
    """The rows of all tables of a page, without the marks of bold cells."""
    rows = cells((ROOT / "docs" / name).read_text("utf-8"))
    return [[cell.replace("**", "") for cell in row] for row in rows]


def by(key: str, found: Iterable[Found]) -> dict[str, Found]:
    return {each[key]: each for each in found}


# ── consistency.md ──────────────────────────────────────────────────────────────────────────────


def test_losses_by_consistency() -> None:
    runs = {run["way"]["name"]: run for run in results("consistency.json")["runs"]}
    loss = {name: run["final_loss"] for name, run in runs.items()}
    stale = [f"ssp, staleness {steps}" for steps in (1, 2, 4)]
    expected = [
        ["`bsp`", f"{loss['bsp']:.4f}", "", "0"],
        [
            "`ssp`, s = 1 / 2 / 4",
            " / ".join(f"{loss[name]:.4f}" for name in stale),
            " / ".join(f"{loss[name] / loss['bsp']:.2f}" for name in stale),
            "0",
        ],
        ["`bsp`, `topk` 0.01", f"{loss['bsp, topk 0.01']:.4f}", "", "0"],
        [
            "`ssp`, s = 1, `topk` 0.01",
            f"{loss['ssp, staleness 1, topk 0.01']:.4f}",
            f"{loss['ssp, staleness 1, topk 0.01'] / loss['bsp, topk 0.01']:.2f}",
            "0",
        ],
        ["`bsp`, momentum 0.9", f"{loss['bsp, momentum 0.9']:.4f}", "", "0"],
        [
            "`ssp`, s = 4, momentum 0.9",
            f"{loss['ssp, staleness 4, momentum 0.9']:.2f}",
            "diverges",
            "0",
        ],
    ]
    for title, name in (
        ("`ds-sync`", "ds-sync"),
        ("the same groups in all steps", "ds-sync, static groups"),
        ("each worker alone", "each worker alone"),
    ):
        distance = runs[name]["consensus_distance"]
        expected.append([title, f"{loss[name]:.4f}", f"{loss[name] / loss['bsp']:.2f}", f"{distance:.2g}"])
    for row in expected:
        assert row in shown("consistency.md")


def test_losses_of_early_steps() -> None:
    """The means of the losses of steps 181 to 200 and of all seeds."""
    runs = {run["way"]["name"]: run for run in results("consistency.json")["runs"]}
    early = {
        name: mean(loss for curve in run["curves"] for loss in curve["losses"][180:200])
        for name, run in runs.items()
    }
    ratios = [f"{early[f'ssp, staleness {steps}'] / early['bsp']:.2f}" for steps in (1, 2, 4)]
    assert f"s = 1 / 2 / 4 were at {' / '.join(ratios)} of `bsp`" in page("consistency.md")


def test_steps_with_a_delay_and_in_racks() -> None:
    measured = results("consistency.json")
    sides = []
    for key in ("delayed", "racked"):
        first = measured[key][0]["step_seconds"]
        sides.append(
            [
                [
                    f"`{run['way']}`".replace(", staleness 1`", "`, s = 1")
                    .replace(", staleness 2`", "`, s = 2")
                    .replace(", staleness 4`", "`, s = 4"),
                    f"{run['step_seconds']:.2f}",
                    f"{first / run['step_seconds']:.2f}" if number else "",
                ]
                for number, run in enumerate(measured[key])
            ]
        )
    for left, right in zip(*sides, strict=True):
        assert left + right in shown("consistency.md")
    assert f"the network takes, {measured['delayed'][0]['compute_seconds']:.2f} s" in page("consistency.md")


@pytest.mark.parametrize(
    ("name", "measured"), [("consistency.md", "consistency.json"), ("sparsifiers.md", "finetune.json")]
)
def test_times_with_long_packets_in_the_queues_are_marked(name: str, measured: str) -> None:
    """A run that records how links were shaped is one of after the queues were mended."""
    is_marked = "when a full queue of the testbed still dropped packets of up to 64 KiB whole" in page(name)
    assert is_marked == (results(measured).get("links") is None)


# ── sparsifiers.md ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("title", "way"),
    [
        ("`sync.scheme = byteps`, dense", "byteps (dense)"),
        ("dense", "zenps (dense)"),
        ("`topk`, density 0.01", "topk 0.01"),
        ("`exdyna`, density 0.04", "exdyna 0.04"),
    ],
)
def test_fine_tuning(title: str, way: str) -> None:
    run = by("way", results("finetune.json")["runs"])[way]
    before, after = run["held_out_loss"]
    time = f"{1000 * run['step_seconds']:.0f} ms"
    expected = [title, str(len(run["curve"])), time, f"{before:.2f} → {after:.2f}"]
    assert expected in shown("sparsifiers.md")


def test_a_step_of_ten_million_elements() -> None:
    took = results("finetune.json")["step_seconds"]
    assert (
        f"takes {took['byteps (dense)']:.2f} s there by `byteps`, {took['topk 0.001']:.3f} s by `topk` and "
        f"{took['exdyna 0.001']:.3f} s by `exdyna`"
    ) in page("sparsifiers.md")


@pytest.mark.parametrize(
    ("title", "digits", "text"),
    [
        ("`none`", "none", "none"),
        ("`topk`, 0.01", "topk 0.01", "topk 0.01"),
        ("`topk`, 0.01, without residual", "topk 0.01, no residual", "topk 0.01, no residual"),
        ("`dgc`, 0.01", "dgc 0.01", "dgc 0.01"),
        ("`exdyna`, 0.01; text: 0.04", "exdyna 0.01", "exdyna 0.04"),
        ("`micro`, 0.01; text: 0.04", "micro 0.01", "micro 0.04"),
        ("`none`, momentum", "none, momentum", ""),
        ("`topk`, 0.01, momentum", "topk 0.01, momentum", ""),
        ("`dgc`, 0.01, momentum", "dgc 0.01, momentum", ""),
        ('`dgc`, 0.01, momentum, `mask_momentum = "off"`', "dgc 0.01, unmasked, momentum", ""),
    ],
)
def test_convergence(title: str, digits: str, text: str) -> None:
    expected = [title]
    for name, trained in zip((digits, text), results("convergence.json")["trained"], strict=True):
        runs = {run["way"]["name"]: run for run in trained["runs"]}
        if not name:
            expected += ["", ""]
        elif name.startswith("none"):
            expected += [f"1 ({runs[name]['final_loss']:.3f})", "1"]
        else:
            expected += [f"{runs[name]['loss_ratio']:.2f}", f"{runs[name]['bytes_ratio']:.1f}"]
    # The losses of the runs with momentum are over that of `none` with momentum, of which the ratio is 1.
    assert expected in shown("sparsifiers.md")


@pytest.mark.parametrize(
    ("title", "way", "digits"),
    [
        ("`topk`", "topk", 2),
        ("`exdyna`", "exdyna", 2),
        ("`micro`", "micro", 2),
        ('`exdyna`, `controller = "published"`', "exdyna, published", 0),
    ],
)
def test_density(title: str, way: str, digits: int) -> None:
    measured = results("density.json")
    run = by("way", measured["runs"])[way]
    assert 4 * measured["drop_at"] == 3 * measured["steps"]
    assert f"after three quarters of {measured['steps']} steps the gradients" in page("sparsifiers.md")
    settled, dropped = (
        " to ".join(f"{bound:.{digits}f}" for bound in run[when]) for when in ("settled", "dropped")
    )
    if not digits:
        dropped = f"{run['dropped'][0]:.2f} to {run['dropped'][1]:.1f}"
    expected = [title, settled, dropped, f"{run['imbalance']:.2f}", f"{run['bytes_ratio']:.0f}"]
    assert expected in shown("sparsifiers.md")


@pytest.mark.parametrize(
    ("title", "way"),
    [
        ("`topk`", "topk"),
        ("`dgc`", "dgc"),
        ("`threshold`", "threshold"),
    ],
)
def test_selection(title: str, way: str) -> None:
    expected = [title]
    for run in results("selection.json")["runs"]:
        seconds = run["seconds"][way]
        expected.append(f"{1000 * seconds:.2f}, {int(run['topk_seconds'] / seconds + 0.5)} ×")
    assert expected in shown("sparsifiers.md")


@pytest.mark.parametrize(
    ("title", "way"),
    [
        ("`exdyna`, from an eighth", "exdyna"),
        ("`exdyna`, from an eighth, with its counts", "exdyna and its counts"),
    ],
)
def test_selection_from_an_eighth(title: str, way: str) -> None:
    measured = results("selection.json")
    assert measured["world"] == 8
    expected = [title]
    for run in measured["runs"]:
        seconds = run["seconds"][way]
        expected.append(f"{1000 * seconds:.2f}, {run['part_topk_seconds'] / seconds:.1f} ×")
    assert expected in shown("sparsifiers.md")


@pytest.mark.parametrize(
    ("title", "key", "digits"),
    [("`torch.topk`", "topk_seconds", 1), ("`torch.topk`, from an eighth", "part_topk_seconds", 2)],
)
def test_selection_by_torch(title: str, key: str, digits: int) -> None:
    took = [1000 * run[key] for run in results("selection.json")["runs"]]
    assert [title, *(f"{each:.{digits}f}" for each in took)] in shown("sparsifiers.md")


def test_selection_on_a_gpu() -> None:
    took, _, over, _, by_torch = results("kernels-h200.json")["entries"]["threshold_compact, dense, float32"]
    assert (
        f"both take {over:.2f} × the floor for 214 M elements, {took:.2f} ms; PyTorch's own operations take "
        f"{by_torch:.2f}."
    ) in page("sparsifiers.md")


# ── schemes.md ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
def test_quantized_values(form: str) -> None:
    runs = {(run["form"], run["case"]["forgets"]): run for run in results("values.json")["runs"]}
    kept, forgot = runs[form, False], runs[form, True]
    losses = [f"{run['loss_ratio']:.3f}" for run in (kept, forgot)]
    assert [f"`{form}`", *losses, f"{kept['bytes_ratio']:.2f}"] in shown("schemes.md")


def step_seconds_between_hosts() -> dict[tuple[str, int, float, str], float]:
    """By workload, hosts, Mbit/s and scheme."""
    return {
        (each["workload"], each["workers"], each["mbit"], each["scheme"]): median(each["seconds"])
        for each in results("net.json")["measurements"]
    }


def test_auto_between_hosts() -> None:
    took = step_seconds_between_hosts()
    exchanged, owned = list[float](), list[float]()
    for workload, hosts, mbit, scheme in took:
        if scheme == "auto":
            own, peers, auto = (took[workload, hosts, mbit, name] for name in ("zenps", "agsparse", "auto"))
            (exchanged if peers < own else owned).append(own / auto)
            assert (peers < own) == (hosts == 2 and workload != "opt")
    text = page("schemes.md")
    assert f"takes {min(exchanged):.2f} to {max(exchanged):.2f} times as long as one of `auto`" in text
    differ = max(max(each, 1 / each) for each in owned) - 1
    assert f"the two differ by at most {100 * differ:.0f} %" in text


def test_a_step_in_bfloat16_between_hosts() -> None:
    took = step_seconds_between_hosts()
    times = [
        took[workload, hosts, 50, "zenps"] / took[workload, hosts, 50, "zenps-bfloat16"]
        for workload in ("lstm", "deepfm", "nmt")
        for hosts in (2, 4)
    ]
    assert f"takes {min(times):.1f} to {max(times):.1f} times as long as one in `bfloat16`" in page(
        "schemes.md"
    )


# ── reliability.md ──────────────────────────────────────────────────────────────────────────────


def test_killed_servers_and_schedulers() -> None:
    run, rows = results("chaos.json"), shown("reliability.md")
    kills = run["kills"]
    stopped = kills["SIGSTOP, SIGKILL"] + kills["SIGSTOP, SIGCONT"]
    killed = f"{sum(kills.values())}: {kills['SIGKILL']} `SIGKILL`, {stopped} `SIGSTOP`, "
    for row in (
        [f"runs, of {run['steps']} steps", f"{run['runs']}, in {run['seconds']:.0f} s"],
        ["servers killed", f"{killed}{kills['SIGTERM']} `SIGTERM`"],
        ["servers drained; joined", f"{run['drains']}; {run['joins']}"],
        ["scheduler killed", str(run["scheduler_kills"])],
        ["runs with other bits", str(run["mismatching_runs"])],
        ["runs that failed otherwise", str(run["failed_runs"])],
    ):
        assert row in rows


@pytest.mark.parametrize(
    ("title", "event", "digits"),
    [
        ("`SIGKILL` of a server", "SIGKILL", 2),
        ("`SIGSTOP`, then `SIGKILL`", "SIGSTOP, SIGKILL", 2),
        ("`SIGSTOP`, then `SIGCONT`", "SIGSTOP, SIGCONT", 2),
        ("any of these three", "any of the first three", 2),
        ("`SIGTERM` of a server", "SIGTERM", 2),
        ("`zenps drain`", "drain", 2),
        ("a server joins", "join", 2),
        ("any of these while the scheduler is away", "any of a server, scheduler away", 1),
        ("`SIGKILL` of the scheduler, nothing else", "scheduler", 2),
        ("nothing: a step", "nothing", 3),
    ],
)
def test_pauses(title: str, event: str, digits: int) -> None:
    pause = results("chaos.json")["pauses"][event]
    times = [f"{pause[f'{which}_seconds']:.{digits}f} s" for which in ("p50", "p95", "most")]
    assert [title, str(pause["count"]), *times] in shown("reliability.md")


def test_the_death_of_a_server_beside_a_step() -> None:
    pauses = results("chaos.json")["pauses"]
    killed, step = pauses["SIGKILL"], pauses["nothing"]["p50_seconds"]
    assert (
        f"usually costs about {killed['p50_seconds'] / step:.0f} steps ({killed['p50_seconds']:.3f} s; a "
        f"step takes {step:.3f} s), and at most {killed['most_seconds']:.2f} s here"
    ) in page("reliability.md")


def test_lost_workers() -> None:
    losses = {(each["system"], each["signal"]): each["survivors"] for each in results("chaos.json")["losses"]}
    for signal, gloo in (
        ("SIGKILL", f"`RuntimeError` after {losses['gloo', 'SIGKILL'][0]['seconds']:.2f} s"),
        ("SIGSTOP", "nothing in 30 s"),
    ):
        survivors = losses["ZenPS", signal]
        assert all((each["kind"], each["names_victim"]) == ("PeerLostError", True) for each in survivors)
        took = f"`PeerLostError`, which names it, after {max(each['seconds'] for each in survivors):.1f} s"
        assert [f"`{signal}` of a worker", took, gloo] in shown("reliability.md")


def test_simulated_faults() -> None:
    run, rows = results("simulation.json"), shown("reliability.md")
    faults, messages = run["faults"], run["messages"]

    def several(*kinds: str) -> str:
        return spaced(sum(count for name, count in faults.items() if name.startswith(kinds)))

    crashes = f"{faults['crash server']} crashes of a server, {faults['crash scheduler']} of the scheduler"
    of_workers = sum(
        count for name, count in faults.items() if name.startswith(("crash", "leave")) and "worker" in name
    )
    for row in (
        ["by scenario", ", ".join(f"`{name}` {spaced(run['scenarios'][name]['rounds'])}"
                                  for name in ("steady", "fail", "continue", "restart"))],
        ["faults", f"{spaced(sum(faults.values()))}: {crashes}, {spaced(of_workers)} crashes and leaves of "
                   f"workers, {several('stall')} stalls, {several('drain', 'stop')} drains and leaves of "
                   f"servers, {several('start')} joins, {several('cut', 'lose')} cuts and losses"],
        ["workers", f"{spaced(run['worker_crashes'])} processes crashed, {run['admissions']} admissions, "
                    f"{run['generations']} generations"],
        ["messages", f"{messages['sent'] / 1e6:.1f} million sent, {spaced(messages['lost'])} lost, "
                     f"{spaced(messages['duplicated'])} duplicated"],
        ["rounds begun again, and pushed again for another rank",
         f"{spaced(run['resharded'])}, and {spaced(run['recalled'])}"],
        ["sums of values that were dropped meanwhile",
         f"{messages['sums of what was overwritten']}, none delivered"],
    ):  # fmt: skip
        assert row in rows
    assert any(row[0] == "rounds" and row[1].startswith(spaced(run["rounds"])) for row in rows)
    assert any(row[0] == "distinct interleavings" and row[1].startswith(str(run["runs"])) for row in rows)
    virtual = f"for {run['virtual_seconds'] / 3600:.0f} hours of virtual time"
    assert any(row[0] == "time" and row[1].endswith(virtual) for row in rows)


def test_soak() -> None:
    data = (ROOT / "benchmarks" / "results" / "soak.json").read_bytes()
    report = msgspec.json.decode(data, type=Soak)
    for name in report.samples:
        first, last = report.warm(name)[0], report.warm(name)[-1]
        mib = [f"{sample.resident_bytes / (1 << 20):.1f}" for sample in (first, last)]
        expected = [name, f"{mib[0]} to {mib[1]} MiB", f"{report.growth(name):+.2%}"]
        expected += [f"{first.descriptors} to {last.descriptors}", f"{first.threads} to {last.threads}"]
        assert expected in shown("reliability.md")
    assert f"in {report.seconds:.0f} s, with occasional other work" in page("reliability.md")


# ── performance.md ──────────────────────────────────────────────────────────────────────────────


def measured_loopback(name: str) -> dict[tuple[str, str, int], dict[int, Found]]:
    """By partition, way to the same host and levels; then by workers."""
    found: dict[tuple[str, str, int], dict[int, Found]] = {}
    for each in results(name)["measurements"]:
        setup = each["setup"]
        key = setup["partition"], setup["same_host"], setup["levels"]
        found.setdefault(key, {})[each["workers"]] = each
    return found


def listed(numbers: Iterable[float], digits: int) -> str:
    *most, last = (f"{number:.{digits}f}" for number in numbers)
    return f"{', '.join(most)} and {last}"


def test_partitions_on_loopback() -> None:
    text = page("performance.md")
    for name in ("loopback-700001x48.json", "loopback-500000x32.json"):
        for partition in ("parallel", "centralized"):
            found = measured_loopback(name)[partition, "memory", 1]
            times = [1000 * each["block"]["table"]["zenps"]["p50_seconds"] for each in found.values()]
            assert f"{listed(times, 1)} ms" in text


def test_balance_on_loopback() -> None:
    found = measured_loopback("loopback-700001x48.json")
    for partition in ("balanced", "parallel"):
        imbalance = [each["block"]["imbalance"] for each in found[partition, "memory", 1].values()]
        assert f"{listed(imbalance, 3)} × " in page("performance.md")
    assert "with `parallel`, and all of them with `centralized`" in page("performance.md")
    assert [each["block"]["imbalance"] for each in found["centralized", "memory", 1].values()] == [2, 4, 8]


def test_latency_on_loopback() -> None:
    blocks: dict[int, list[Found]] = {}
    for name in ("loopback-700001x48.json", "loopback-500000x32.json"):
        for each in results(name)["measurements"]:
            blocks.setdefault(each["workers"], []).append(each["block"]["small"])

    def milliseconds(workers: int, way: str, which: str) -> list[float]:
        return [1000 * block[way][f"{which}_seconds"] for block in blocks[workers]]

    def between(way: str, which: str, digits: int) -> str:
        times = milliseconds(2, way, which)
        return f"{min(times):.{digits}f} to {max(times):.{digits}f} ms"

    for part in (
        f"takes {between('zenps', 'p50', 2)}, in consecutive calls (p50; p95 {between('zenps', 'p95', 2)})",
        f"takes {between('gloo dense', 'p50', 2)} (p95 {between('gloo dense', 'p95', 1)})",
        "takes {:.1f} and {:.1f} ms, and gloo's {:.1f} and {:.1f} ms".format(
            *(median(milliseconds(n, way, "p50")) for way in ("zenps", "gloo dense") for n in (4, 8))
        ),
    ):
        assert part in page("performance.md")


def test_kernels_on_the_cpu() -> None:
    found, rows = results("kernels.json"), shown("performance.md")
    warm = [each for each in found["results"] if not each["is_cold"]]
    numbers = [row[1:] for row in rows]
    for each in warm:
        factors = [f"{each[which]:.1f} ×" for which in ("over_torch", "times_memcpy")]
        # To two digits by halves up, for the file has them rounded to four.
        times = [f"{each[way] + 1e-9:.{1 if each[way] >= 10 else 2}f}" for way in ("torch_ms", "native_ms")]
        assert [*times, *factors] in numbers, each["name"]
    for columns in (1, 16, 64, 256, 1024):
        cold = [
            each for each in found["results"] if each["is_cold"] and each["name"].endswith(f"× {columns}")
        ]
        factors = [
            ", ".join(f"{each[which]:.1f}" for each in cold) + " ×"
            for which in ("over_torch", "times_memcpy")
        ]
        assert ["", "", *factors] in numbers, columns


def test_compaction_on_a_gpu() -> None:
    found = results("compaction-h200.json")["results"]
    ways = ("sort_compact", "bitmap_compact", "torch: coalesce, index_select by owner",
            "torch: unique, index_add_")  # fmt: skip
    rows = shown("performance.md")
    for title, ids, dim, zipf, dtype in (
        ("10⁶ × 64, exponent 1, a third are different", 10**6, 64, 1.0, "float32"),
        ("exponent 0, nearly all are different", 10**6, 64, 0.0, "float32"),
        ("exponent 1.2, a tenth", 10**6, 64, 1.2, "float32"),
        ("10⁶ × 1", 10**6, 1, 1.0, "float32"),
        ("10⁶ × 256", 10**6, 256, 1.0, "float32"),
        ("10⁶ × 64, bfloat16", 10**6, 64, 1.0, "bfloat16"),
        ("10⁵ × 64", 10**5, 64, 1.0, "float32"),
        ("10⁴ × 64", 10**4, 64, 1.0, "float32"),
    ):
        case = {"ids": ids, "dim": dim, "rows": 10**7, "zipf": zipf, "servers": 16, "dtype": dtype}
        of_case = [each for each in found if each["case"] == case]
        times = {each["way"]: each["p50_ms"] for each in of_case}
        taken = [three_digits(times[way]) for way in ways]
        assert [title, *taken, f"{of_case[0]['floor_ms']:.3f}"] in rows


def test_compaction_in_the_readme() -> None:
    case = {"ids": 10**6, "dim": 64, "rows": 10**7, "zipf": 1.0, "servers": 16, "dtype": "float32"}
    times = {
        each["way"]: each["p50_ms"]
        for each in results("compaction-h200.json")["results"]
        if each["case"] == case
    }
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert (
        f"10⁶ rows × 64 in {times['sort_compact']:.2f} ms with launches hidden; PyTorch's `unique` and "
        f"`index_add_`, with waits, take {times['torch: unique, index_add_']:.2f}, `coalesce` and selection "
        f"by owner {times['torch: coalesce, index_select by owner']:.0f}."
    ) in readme


def test_times_with_all_launches_are_missing_until_they_are_measured() -> None:
    report = msgspec.json.decode(
        (ROOT / "benchmarks" / "results" / "compaction-h200.json").read_bytes(), type=Compaction
    )
    is_measured = all(result.wall_p50_ms is not None for result in report.results)
    is_missing = "Times with all launches have not been measured yet" in page("performance.md")
    assert is_measured != is_missing


def three_digits(number: float) -> str:
    return f"{number:.{3 if number < 1 else 2 if number < 10 else 1}f}"


def test_the_span_of_lookups_on_a_gpu() -> None:
    """Compaction of 10⁶ float32 rows of 64 and more columns, by sorting, beside others."""
    found: dict[str, dict[str, float]] = {}
    for each in results("compaction-h200.json")["results"]:
        found.setdefault(json.dumps(each["case"]), {})[each["way"]] = each["p50_ms"]
    large = [
        times
        for case, times in found.items()
        if '"ids": 1000000' in case and "float32" in case and json.loads(case)["dim"] >= 64
    ]
    coalesce = [times["torch: coalesce, index_select by owner"] / times["sort_compact"] for times in large]
    hashed = [times["hash_compact"] / times["sort_compact"] for times in found.values()]
    assert 10 <= min(coalesce) < 11
    assert 360 < max(coalesce) <= 370
    assert "and 10 to 370 × less time than `coalesce`" in page("performance.md")
    assert f"took {min(hashed):.1f} to {max(hashed):.0f} times as long as `sort`" in page("performance.md")


def test_rounds_on_a_gpu() -> None:
    measured = {
        (each["setup"]["same_host"], each["workers"]): each
        for each in results("gpu-h200-700001x48.json")["measurements"]
    }

    def of(way: str, key: str) -> list[float]:
        return [
            1000 * min(times["p50_seconds"] for name, times in table.items() if name.startswith(key))
            for table in (measured[way, workers]["block"]["table"] for workers in (2, 4))
        ]

    def faster(way: str) -> str:
        return listed((measured[way, workers]["speedup"] for workers in (2, 4)), 2)

    text = page("performance.md")
    best = f"the best of gloo's ways ({listed(of('memory', 'gloo'), 1)} ms)"
    assert f"on the same host {listed(of('memory', 'zenps'), 1)} ms, {faster('memory')} × {best}" in text
    assert f"by TCP {listed(of('tcp', 'zenps'), 1)} ms, {faster('tcp')} ×" in text
