from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_SECONDS = 100.0

SMALL_LSTM = ["--vocabulary", "4000", "--width", "64", "--samples", "256", "--batch", "4"]
SMALL_DEEPFM = ["--buckets", "20000", "--hidden", "32", "--batch", "256", "--lr", "0.004"]


def run(command: list[str]) -> str:
    """Standard output of a command that must end well; everything else is shown if it does not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZENPS_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def alone(script: str, *arguments: str, report: Path) -> tuple[str, dict[str, Any]]:
    output = run([f"examples/{script}", *arguments, "--report", str(report)])
    return output, json.loads(report.read_text())


def launched(
    script: str, *arguments: str, report: Path, partition: str = "balanced"
) -> tuple[str, dict[str, Any]]:
    launch = ["-m", "zenps.cli", "launch", "--workers", "2", "--servers", "2"]
    launch += ["--set", f"sync.partition={partition}", "--", sys.executable]
    output = run([*launch, f"examples/{script}", *arguments, "--report", str(report)])
    return output, json.loads(report.read_text())


@pytest.fixture
def click_log(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return pytest.importorskip("click_log")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "sample.tsv"
    run(["examples/deepfm.py", "--write-sample", str(path), "--rows", "20000", "--seed", "7"])
    return path


# ── the language model ──────────────────────────────────────────────────────────────────────────


def test_language_model_learns_alone_with_its_whole_vocabulary(tmp_path: Path) -> None:
    arguments = ["--width", "32", "--batch", "8", "--steps", "60"]
    output, report = alone("lstm_lm.py", *arguments, report=tmp_path / "report.json")
    before, after = report["held_out_loss"]
    assert report["vocabulary"] >= 30_000
    assert report["steps"] == 60
    assert after < before - 2, output
    assert "100% step 60" in output
    assert "words/s" in output


def test_language_model_shows_what_a_partition_changes_and_what_not(tmp_path: Path) -> None:
    reports = {}
    for partition in ("balanced", "centralized"):
        output, report = launched(
            "lstm_lm.py", *SMALL_LSTM, "--steps", "30", report=tmp_path / partition, partition=partition
        )
        reports[partition] = report
        before, after = report["held_out_loss"]
        assert after < before - 1, output
        for row in ("pushed per step", "pulled per step", "dense sync", "imbalance", "waiting for servers"):
            assert row in output
        assert report["partition"] == partition
        assert report["workers"] == 2
        assert 0 < report["pushed_bytes"] + report["pulled_bytes"] < report["dense_bytes"] / 2
    balanced, centralized = reports["balanced"], reports["centralized"]
    assert balanced["imbalance"] < 1.3 < 1.5 < centralized["imbalance"] <= 2
    assert balanced["held_out_loss"] == centralized["held_out_loss"]


# ── the click model ─────────────────────────────────────────────────────────────────────────────


def test_click_model_learns_alone(tmp_path: Path, sample: Path) -> None:
    arguments = ["--data", str(sample), *SMALL_DEEPFM, "--steps", "60"]
    output, report = alone("deepfm.py", *arguments, report=tmp_path / "report.json")
    before, after = report["held_out_loss"]
    assert after < before - 0.1, output
    assert report["held_out_auc"][1] > 0.6
    assert report["malformed_lines"] == 0
    assert "clicks/s" in output


def test_a_run_stops_by_the_clock(tmp_path: Path, sample: Path) -> None:
    arguments = ["--data", str(sample), *SMALL_DEEPFM, "--steps", "1000000", "--seconds", "0.5"]
    _, report = alone("deepfm.py", *arguments, report=tmp_path / "report.json")
    assert 0.5 <= report["seconds"] < 30
    assert report["steps"] < 1_000_000


def test_click_model_learns_in_a_cluster_and_counts_malformed_lines(tmp_path: Path, sample: Path) -> None:
    lines = sample.read_text().splitlines()[:6000]
    lines[3] = lines[3].replace("\t", " ", 1)
    lines[10] = "maybe" + lines[10][1:]
    lines[19] += "xyz"
    lines[100] = ""
    damaged = tmp_path / "damaged.tsv"
    damaged.write_text("\n".join(lines))
    # 14 steps of 2 · 256 lines: more than a pass over what is not held out.
    arguments = ["--data", str(damaged), *SMALL_DEEPFM, "--steps", "14"]
    output, report = launched("deepfm.py", *arguments, report=tmp_path / "report.json")
    assert report["malformed_lines"] == 4
    assert "4 malformed lines were skipped" in output
    assert report["held_out_loss"][1] < report["held_out_loss"][0], output
    assert report["pushed_bytes"] + report["pulled_bytes"] < report["dense_bytes"]
    assert "imbalance" in output


# ── click logs ──────────────────────────────────────────────────────────────────────────────────


def test_sample_is_in_criteos_format_and_skewed(sample: Path) -> None:
    lines = sample.read_text().splitlines()
    assert len(lines) == 20_000
    integer, category = r"\t[0-9]*", r"\t(?:[0-9a-f]{8})?"
    line_format = re.compile(rf"[01](?:{integer}){{13}}(?:{category}){{26}}")
    assert all(line_format.fullmatch(line) for line in lines)
    assert 0.1 < sum(line[0] == "1" for line in lines) / len(lines) < 0.5
    third_categories = [line.split("\t")[16] for line in lines]
    top_values = Counter(value for value in third_categories if value).most_common(100)
    assert sum(count for _, count in top_values) > len(lines) / 4
    assert len(set(third_categories)) > 5000


def test_sample_depends_on_the_seed_alone(tmp_path: Path, sample: Path, click_log: ModuleType) -> None:
    click_log.write_sample(tmp_path / "same", 5000, seed=7)
    click_log.write_sample(tmp_path / "other", 5000, seed=8)
    first = sample.read_text().splitlines()[:4096]
    assert (tmp_path / "same").read_text().splitlines()[:4096] == first
    assert (tmp_path / "other").read_text().splitlines()[:4096] != first


def test_every_line_is_read_by_one_rank_either_to_learn_or_held_out(
    tmp_path: Path, click_log: ModuleType
) -> None:
    path = tmp_path / "log.tsv"
    path.write_text("".join(f"0{chr(9)}{i}" + "\t" * 38 + "\n" for i in range(300)))
    seen: list[int] = []
    for rank in range(3):
        log = click_log.ClickLog(path, rank, 3)
        training = next(log.training_batches(90))
        held_out = log.held_out(limit=100)
        assert len(held_out.labels) == 10
        seen += torch.cat([training.numbers, held_out.numbers])[:, 0].exp().sub(1).round().int().tolist()
    assert sorted(seen) == list(range(300))


def test_empty_fields_and_windows_line_ends_are_read(tmp_path: Path, click_log: ModuleType) -> None:
    path = tmp_path / "log.tsv"
    fields = ["1", "-2", *[""] * 12, "ffffffff", *[""] * 24, "0A"]
    path.write_bytes(("\t".join(fields) + "\r\n").encode())
    clicks = next(click_log.ClickLog(path, 0, 1).training_batches(1))
    assert clicks.labels.tolist() == [1.0]
    assert clicks.numbers.tolist() == [[0.0] * 13]
    assert clicks.categories.tolist() == [[0xFFFFFFFF, *[click_log.MISSING] * 24, 0x0A]]


def test_a_value_has_its_own_bucket_in_each_column(click_log: ModuleType) -> None:
    buckets = click_log.bucket(torch.full((1, 26), 0x1234), 1_000_000)
    assert len(set(buckets[0].tolist())) == 26
    assert int(buckets.min()) >= 0
    assert int(buckets.max()) < 1_000_000


@pytest.mark.parametrize("content", ["", "label\tI1\tI2\n" * 20], ids=["empty", "malformed"])
def test_a_log_without_a_usable_line_is_refused(tmp_path: Path, content: str, click_log: ModuleType) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"log\.tsv: no training line in Criteo's format for rank 0"):
        next(click_log.ClickLog(path, 0, 1).training_batches(1))
