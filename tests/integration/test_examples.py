from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zenps as zps

Example = Callable[[str], ModuleType]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_SECONDS = 200.0

SMALL_LSTM = ["--vocabulary", "4000", "--width", "64", "--samples", "256", "--batch", "4"]
SMALL_NMT = ["--words", "60", "--width", "32", "--samples", "40", "--batch", "32", "--lr", "0.01"]
SMALL_BERT = ["--vocabulary", "2000", "--width", "32", "--layers", "1", "--samples", "128", "--batch", "8"]
SMALL_DEEPFM = ["--buckets", "20000", "--hidden", "32", "--batch", "256", "--lr", "0.004"]
SMALL_FINETUNE = ["--width", "32", "--layers", "1", "--pretrain-steps", "10"]


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
    assert "has pushed no gradient" not in done.stdout + done.stderr
    return done.stdout


def alone(script: str, *arguments: str, report: Path) -> tuple[str, dict[str, Any]]:
    output = run([f"examples/{script}", *arguments, "--report", str(report)])
    return output, json.loads(report.read_text())


def launch(*command: str, workers: int = 2, settings: Sequence[str] = ()) -> str:
    """Standard output of Python's ``command`` on a cluster."""
    options = [word for setting in settings for word in ("--set", setting)]
    cluster = ["-m", "zenps.cli", "launch", "--workers", str(workers), "--servers", "2", *options]
    return run([*cluster, "--", sys.executable, *command])


def launched(
    script: str, *arguments: str, report: Path, settings: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    output = launch(f"examples/{script}", *arguments, "--report", str(report), settings=settings)
    return output, json.loads(report.read_text())


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Example:
    """Imports a module of the examples."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def click_log(example: Example) -> ModuleType:
    return example("click_log")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clicks") / "sample.tsv"
    run(["examples/deepfm.py", "--write-sample", str(path), "--rows", "20000", "--seed", "7"])
    return path


# ── the language model ──────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_language_model_learns_alone_with_its_whole_vocabulary(tmp_path: Path) -> None:
    arguments = ["--width", "32", "--batch", "8", "--steps", "60"]
    output, report = alone("lstm_lm.py", *arguments, report=tmp_path / "report.json")
    before, after = report["held_out_loss"]
    assert report["vocabulary"] >= 30_000
    assert report["steps"] == 60
    assert after < before - 2, output
    assert "100% step 60" in output
    assert "words/s" in output


@pytest.mark.long
def test_language_model_shows_what_a_partition_changes_and_what_not(tmp_path: Path) -> None:
    reports = {}
    for partition in ("balanced", "centralized"):
        settings = [f"sync.partition={partition}"]
        output, report = launched(
            "lstm_lm.py", *SMALL_LSTM, "--steps", "30", report=tmp_path / partition, settings=settings
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


@pytest.mark.long
def test_click_model_learns_alone(tmp_path: Path, sample: Path) -> None:
    arguments = ["--data", str(sample), *SMALL_DEEPFM, "--steps", "60"]
    output, report = alone("deepfm.py", *arguments, report=tmp_path / "report.json")
    before, after = report["held_out_loss"]
    assert after < before - 0.1, output
    assert report["held_out_auc"][1] > 0.6
    assert report["malformed_lines"] == 0
    assert "clicks/s" in output


@pytest.mark.long
def test_a_run_stops_by_the_clock(tmp_path: Path, sample: Path) -> None:
    arguments = ["--data", str(sample), *SMALL_DEEPFM, "--steps", "1000000", "--seconds", "0.5"]
    _, report = alone("deepfm.py", *arguments, report=tmp_path / "report.json")
    assert 0.5 <= report["seconds"] < 30
    assert report["steps"] < 1_000_000


@pytest.mark.long
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


# ── the translation model ───────────────────────────────────────────────────────────────────────

# Runs an example, and shows the weights that this rank has at its end.
WATCHED = """
import hashlib, runpy, sys
import zenps as zps

broadcast, weights = zps.broadcast_parameters, {}

def remember(parameters, root_rank):
    weights.update(parameters)
    broadcast(parameters, root_rank=root_rank)

zps.broadcast_parameters = remember
del sys.argv[0]
sys.path.insert(0, "examples")
runpy.run_path(sys.argv[0], run_name="__main__")
data = b"".join(tensor.numpy().tobytes() for tensor in weights.values())
print("weights", hashlib.sha256(data).hexdigest())
"""


def watched(
    tmp_path: Path, script: str, *arguments: str, workers: int = 2, settings: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """As ``launched``; all ranks must end with the same weights."""
    report = tmp_path / "report.json"
    command = ["-c", WATCHED, f"examples/{script}", *arguments, "--report", str(report)]
    output = launch(*command, workers=workers, settings=settings)
    weights = re.findall(r"weights ([0-9a-f]{64})", output)
    assert len(weights) == workers
    assert len(set(weights)) == 1
    return output, json.loads(report.read_text())


@pytest.mark.long
def test_translation_model_learns_in_a_cluster(tmp_path: Path) -> None:
    output, report = watched(tmp_path, "nmt.py", *SMALL_NMT, "--sentences", "2000", "--steps", "40")
    before, after = report["held_out_loss"]
    assert after < before - 0.7, output
    before, after = report["held_out_accuracy"]
    assert before < 0.15 < after, output
    assert report["vocabulary"] == [62, 62]
    assert report["steps"] == 40
    assert "sentences/s" in output


def refusal(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{example.__name__}.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    zps.shutdown()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("a b\nc\n", "x y\n", "a.de has 2 sentences, {0}/a.en 1; expected a translation of each"),
        ("", "", "a.de, {0}/a.en: 0 pairs of sentences; expected at least 40 for each worker"),
        ("\n\n", "x\ny\n", "a.de, {0}/a.en: 0 pairs of sentences; expected at least 40 for each worker"),
    ],
    ids=["counts", "empty", "blank"],
)
def test_files_without_pairs_of_sentences_are_refused_in_a_line(
    source: str,
    target: str,
    message: str,
    example: Example,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.de").write_text(source)
    (tmp_path / "a.en").write_text(target)
    files = ["--source", str(tmp_path / "a.de"), "--target", str(tmp_path / "a.en")]
    refusal(example("nmt"), monkeypatch, *files)
    expected = f"nmt.py: error: {tmp_path}/{message.format(tmp_path)}"
    assert capsys.readouterr().err.splitlines()[-1] == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal(example("lstm_lm"), monkeypatch, "--device", "cuda")
    assert "--device cuda: torch finds no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "error"), [("missing/report.json", FileNotFoundError), ("", IsADirectoryError)]
)
def test_a_report_that_cannot_be_written_is_noticed_before_the_training(
    name: str, error: type[OSError], example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lstm_lm.py", "--report", str(tmp_path / name)])
    monkeypatch.setattr(example("lstm_lm"), "read_standard_library", None)
    with pytest.raises(error, match=str(tmp_path)):
        example("lstm_lm").main()
    zps.shutdown()


@pytest.mark.parametrize("width", [1, 100, 200, 320])
def test_models_are_built_for_any_width(width: int, example: Example) -> None:
    bert = example("bert").MaskedLanguageModel(50, width, layers=1, samples=4)
    finetune = example("finetune").ByteModel(width, layers=1)
    heads = [next(iter(model.encoder.layers)).self_attn.num_heads for model in (bert, finetune)]
    assert heads == [{1: 1, 100: 1, 200: 2, 320: 10}[width]] * 2


def test_one_file_without_the_other_is_refused(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal(example("nmt"), monkeypatch, "--source", __file__)
    assert "--source and --target: expected both or none" in capsys.readouterr().err


def test_the_files_of_iwslt_are_read_without_their_tags(tmp_path: Path, example: Example) -> None:
    german, english = tmp_path / "train.tags.de-en.de", tmp_path / "train.tags.de-en.en"
    german.write_text(
        "<url>http://www.ted.com/</url>\n<reviewer></reviewer>\n<title>W</title>\nDas ist es .\n\nJa , gut\n"
    )
    english.write_text("<url>http://www.ted.com/</url>\n<title>How</title>\nThat 's it .\nLost\nYes , good\n")
    pairs = [("Das ist es .", "That ' s it ."), ("Ja , gut", "Yes , good")]
    assert [tuple(map(" ".join, p)) for p in example("parallel_text").ParallelText(german, english)] == pairs
    german.write_text(
        '<refset>\n<doc docid="1">\n<seg id="1"> 5 < 6 </seg>\n<seg id="2">b</seg>\n</doc>\n</refset>\n'
    )
    english.write_text("5 < 6\n<unk> c@@ d\n")
    pairs = [("5 < 6", "5 < 6"), ("b", "< unk > c@@ d")]
    assert [tuple(map(" ".join, p)) for p in example("parallel_text").ParallelText(german, english)] == pairs


def test_a_pass_has_each_pair_once_beside_others_of_its_length(example: Example) -> None:
    parallel_text = example("parallel_text")
    pairs = [([7] * (1 + i % 10), [i, parallel_text.END_NUMBER]) for i in range(1, 201)]
    a_pass = list(itertools.islice(parallel_text.batches(pairs, 20, seed=3), 10))
    assert sorted(word for batch in a_pass for word in batch.targets[:, 0].tolist()) == list(range(1, 201))
    assert all(int(batch.source_lengths.min()) == batch.source.shape[1] for batch in a_pass)
    assert [len(batch.source[0]) for batch in a_pass] != list(range(1, 11))


def test_a_batch_is_padded_and_says_where(example: Example) -> None:
    batch = example("parallel_text").collate([([5, 6], [3, 4, 0]), ([7], [8, 0])])
    assert batch.source.tolist() == [[5, 6], [7, 0]]
    assert batch.source_lengths.tolist() == [2, 1]
    assert batch.inputs.tolist() == [[0, 3, 4], [0, 8, 0]]
    assert batch.targets[batch.is_word].tolist() == [3, 4, 0, 8, 0]


def test_padding_does_not_change_what_is_predicted(example: Example) -> None:
    torch.manual_seed(5)
    pairs = [([5, 6, 2, 1], [3, 4, 2, 0]), ([7], [8, 0])]
    model, collate = example("nmt").Translator(9, 9, width=8, samples=4), example("parallel_text").collate
    alone = torch.cat([model(collate([pair])) for pair in pairs])
    torch.testing.assert_close(model(collate(pairs)), alone)


def test_the_made_up_translation_keeps_words_and_moves_the_last_to_the_second_place(
    tmp_path: Path, example: Example
) -> None:
    parallel_text = example("parallel_text")
    parallel_text.write_sample(tmp_path / "s", tmp_path / "t", sentences=500, words=40, seed=2)
    translation: dict[str, str] = {}
    for source, target in parallel_text.ParallelText(tmp_path / "s", tmp_path / "t"):
        source.insert(1, source.pop())
        for word, translated in zip(source, target, strict=True):
            assert translation.setdefault(word, translated) == translated
    assert len(set(translation.values())) == len(translation) == 40


# ── the masked language model ───────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_masked_language_model_learns_in_a_cluster_from_a_file(tmp_path: Path) -> None:
    arguments = [*SMALL_BERT, "--data", argparse.__file__, "--steps", "40", "--lr", "0.005"]
    output, report = watched(tmp_path, "bert.py", *arguments)
    before, after = report["held_out_loss"]
    assert after < before - 1, output
    before, after = report["held_out_accuracy"]
    assert before < 0.05 < after, output
    assert report["steps"] == 40
    assert 0 < report["pushed_bytes"] + report["pulled_bytes"] < report["dense_bytes"]


# ── the fine-tuned Transformer ──────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_transformer_is_fine_tuned_with_a_sparsifier(tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    settings = ["sync.sparsifier=exdyna", "sync.density=0.05", "sparsifier.least_bytes=1KiB"]
    arguments = [*SMALL_FINETUNE, "--steps", "40", "--curve", str(curve)]
    output, report = launched("finetune.py", *arguments, report=tmp_path / "report.json", settings=settings)
    before, after = report["held_out_loss"]
    assert after < before - 0.3, output
    assert report["pushed_bytes"] + report["pulled_bytes"] < report["dense_bytes"] / 5
    assert len(json.loads(curve.read_text())) == 40


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("finetune", "400 bytes of text, expected 20480 or more"),
        (
            "bert",
            "1 windows of 64 words to learn from and 0 held out; expected at least 1 and 1 for each worker",
        ),
        ("lstm_lm", "78 words to learn from and 2 held out; expected at least 1,056 and 2 for each worker"),
    ],
)
def test_a_text_that_is_too_short_is_refused(
    name: str,
    message: str,
    tmp_path: Path,
    example: Example,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word\n" * 80)
    refusal(example(name), monkeypatch, "--data", str(path))
    assert capsys.readouterr().err.splitlines()[-1] == f"{name}.py: error: {message}"


def test_a_file_is_read_whatever_its_bytes(tmp_path: Path, example: Example) -> None:
    path = tmp_path / "text"
    path.write_bytes("Größe, 1\r\n\r\n \n".encode() + "Größe".encode("latin-1"))
    documents = list(example("text").TextFile(path))
    assert documents == [
        ["Größe", ",", "1"],
        ["Gr", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", "e"],
    ]


def test_words_outside_the_vocabulary_share_a_number(example: Example) -> None:
    text = example("text")
    documents = [["a", "b", "a"], ["c", "b", "a", "d"]]
    vocabulary = text.Vocabulary(text.most_frequent(documents, 2, "[MASK]"))
    assert len(vocabulary) == 4
    assert vocabulary.encode(documents).tolist() == [2, 3, 2, 1, 3, 2, 1]


def test_of_the_words_to_fill_in_most_are_masked(example: Example) -> None:
    bert = example("bert")
    torch.manual_seed(4)
    words = torch.randint(1, 1_000_000, (2000, bert.WINDOW))
    masked = bert.mask(words, 1_000_000)
    assert torch.equal(words.gather(1, masked.positions), masked.targets)
    shown = masked.words.gather(1, masked.positions)
    assert masked.targets.numel() == 2000 * round(0.15 * bert.WINDOW)
    assert (shown == bert.MASK_NUMBER).double().mean() == pytest.approx(0.8, abs=0.01)
    assert (shown == masked.targets).double().mean() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(masked.words.scatter(1, masked.positions, masked.targets), words)


def test_a_table_for_input_and_output_has_a_sparse_gradient(example: Example) -> None:
    bert = example("bert")
    model = bert.MaskedLanguageModel(50_000, width=8, layers=1, samples=16)
    text = bert.mask(torch.randint(1, 50_000, (2, bert.WINDOW)), 50_000)
    model.words.loss(model(text), text.targets.flatten()).backward()
    gradient = model.words.weight.grad
    assert gradient.is_sparse
    rows = set(gradient.coalesce().indices()[0].tolist())
    assert set(text.words.flatten().tolist()) | set(text.targets.flatten().tolist()) <= rows
    assert len(rows) <= 2 * bert.WINDOW + text.targets.numel() + 16


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


# ── consistency ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_the_fine_tuned_model_is_the_average_of_all_workers(tmp_path: Path) -> None:
    """Pairs of workers average their models in a step, and the two pairs differ after it."""
    settings = ["sync.consistency=ds-sync"]
    watched(tmp_path, "finetune.py", *SMALL_FINETUNE, "--steps", "3", workers=4, settings=settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("finetune.py", SMALL_FINETUNE),
        ("lstm_lm.py", [*SMALL_LSTM, "--data", argparse.__file__]),
        ("nmt.py", [*SMALL_NMT, "--sentences", "2000"]),
        ("bert.py", [*SMALL_BERT, "--data", argparse.__file__]),
        ("deepfm.py", [*SMALL_DEEPFM, "--rows", "20000"]),
    ],
)
def test_averages_in_flight_are_applied_before_the_trained_model_is_evaluated(
    script: str, arguments: list[str], tmp_path: Path
) -> None:
    """With this staleness nothing else is applied."""
    settings = ["sync.consistency=ssp", "sync.staleness=4"]
    steps = ["--steps", "4"]
    output, report = launched(script, *arguments, *steps, report=tmp_path / "report.json", settings=settings)
    before, after = report["held_out_loss"]
    assert after != before, output
