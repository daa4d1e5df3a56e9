"""What is recommended where the answer is known, and how it is explained and written."""

from __future__ import annotations

import errno
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.zenps.cli.plan.conftest import Trace
from zenps.cli.plan.planner import DOUBLINGS, make_plan
from zenps.cli.plan.profile import Profile, profiles
from zenps.cli.plan.units import show_bytes
from zenps.cli.plan.written import check_settings, ruled_out, write_settings
from zenps.config.settings import Config, SyncConfig
from zenps.config.sources import load
from zenps.errors import ConfigError
from zenps.observe.recording import Header, Push
from zenps.schemes.registry import fixed_schemes
from zenps.schemes.traffic import Links

COUNTS = [8, 16, 1024]
SCHEMES = [scheme.name for scheme in fixed_schemes()]


def links(workers: int = 8, gbits: float = 10, latency_seconds: float = 0.0, servers: int = 0) -> Links:
    return Links(
        workers=workers,
        servers=servers,
        bytes_per_second=gbits * 1e9 / 8,
        latency_seconds=latency_seconds,
    )


@pytest.fixture
def hot(made_up: Any) -> list[Profile]:
    """Some rows that nearly all workers push, side by side."""
    return profiles(made_up(np.where(np.arange(50_000) < 500, 0.9, 0.0004), columns=64))[0]


def test_rows_in_common_are_for_zenps(hot: list[Profile]) -> None:
    plan = make_plan(hot, links(), COUNTS)
    assert plan.scheme == "zenps"
    assert plan.reason.startswith("zenps for 8 workers: ")
    assert re.search(r"Most of the time goes into pulls: .* pushed and .* pulled on the busiest", plan.reason)
    assert re.search(
        r"100% of the bytes are those of 'table': one worker pushes 0\.9\d% of its 50000 rows", plan.reason
    )
    first, second, *_ = sorted((p for p in plan.predictions if p.workers == 8), key=lambda p: p.seconds)
    assert first.scheme == "zenps"
    ratio = second.seconds / first.seconds
    assert f"Next is {second.scheme}, which takes {ratio:.2f} times as long: " in plan.reason
    assert [(p.workers, p.scheme) for p in plan.predictions] == [(n, s) for n in COUNTS for s in SCHEMES]


def test_rows_of_one_worker_each_are_merged_in_pairs(made_up: Any) -> None:
    """With nothing in common it sends (n - 1)·d, and servers 1 + 1/n times that (OSDI '25, theorem 1)."""
    plan = make_plan(profiles(made_up(np.full(50_000, 0.01), columns=64))[0], links(), COUNTS)
    assert plan.scheme == "sparcml"
    (own,) = (p for p in plan.predictions if (p.workers, p.scheme) == (8, "sparcml"))
    assert f"Bytes decide: {show_bytes(own.push_bytes)} sent on the busiest link. 100%" in plan.reason
    assert "Next is hierarchical-centralization, which is equally fast. " in plan.reason


def test_nearly_dense_rows_are_not(made_up: Any) -> None:
    found, _ = profiles(made_up(np.full(11_000, 0.999), columns=1, steps=4))  # slots of two rows and of three
    plan = make_plan(found, links(), COUNTS)
    dense, own = (
        next(p.seconds for p in plan.predictions if p.scheme == scheme) for scheme in ("byteps", "zenps")
    )
    assert 1 < own / dense < 1.05
    assert plan.scheme == "zenps"
    assert re.search(r"would take 0\.9\d of that time\. zenps is recommended unless another", plan.reason)
    assert "zenps is recommended unless another scheme wins by 5%." in plan.reason


@pytest.mark.parametrize(("chance", "variant"), [(0.7, "split"), (1.0, "split, dense")])
def test_servers_change_nothing_among_workers(made_up: Any, chance: float, variant: str) -> None:
    """A worker sums a range of rows, however many servers there are."""
    skewed = made_up(np.where(np.arange(8192) < 4096, chance, 0.05), columns=64)
    even = made_up(np.full(8192, 0.3), columns=64, name="even")
    found, _ = profiles([*skewed, *even])
    plans = [make_plan(found, links(servers=servers), COUNTS) for servers in (1, 2, 4, 16, 0)]
    first, *others = ([p for p in plan.predictions if p.scheme in AMONG_WORKERS] for plan in plans)
    assert variant in [p.variant for p in make_plan(found[:1], links(), [8]).predictions]
    assert others == [first] * 4
    one, two = plans[:2]
    assert one.scheme == two.scheme == "sparcml"
    assert one.reason.partition("Next")[0] == two.reason.partition("Next")[0]


OVERTAKING: dict[str, tuple[NDArray[np.float64], dict[str, Any]]] = {
    # Of a thousand servers, the fullest has far more than its share of two thousand rows.
    "servers": (np.where(np.arange(2000) < 400, 0.9, 0.01), {}),
    "workers": (np.where(np.arange(2000) < 400, 0.9, 0.01), {"servers": 8}),
    "back and forth": (np.full(2000, 0.005), {"latency_seconds": 1e-5}),
    "once": (np.full(2000, 0.5), {"servers": 4, "latency_seconds": 1e-6}),
}


@pytest.mark.parametrize("case", OVERTAKING)
def test_where_another_overtakes(made_up: Any, case: str) -> None:
    chances, network = OVERTAKING[case]
    found, _ = profiles(made_up(chances, columns=64))
    best = {n: make_plan(found, links(n, **network), [n]).scheme for n in DOUBLINGS}
    for workers in (2, 24, 1024):
        *_, last = make_plan(found, links(workers, **network), [48]).reason.removesuffix(".").split(". ")
        ranges = re.findall(r"(\S+) (?:is recommended )?for (\d+)(?: to (\d+))?", last)
        claimed = {
            n: scheme
            for scheme, begin, end in ranges
            for n in DOUBLINGS
            if int(begin) <= n <= int(end or begin)
        }
        assert claimed == best
    assert len(ranges) > 2


def test_one_scheme_for_all_numbers_of_workers(made_up: Any) -> None:
    found, _ = profiles(made_up(np.full(50_000, 0.05), columns=64))
    plan = make_plan(found, links(), COUNTS, ruled_out=dict.fromkeys(AMONG_WORKERS, "security.keys"))
    assert plan.reason.endswith(" zenps is recommended for 2 to 1024 workers.")


def test_a_tensor_too_small_for_even_shares_does_not_decide_the_granule(made_up: Any) -> None:
    trace = made_up(np.full(200_000, 0.05), columns=1, steps=2)
    tiny = made_up(np.full(1000, 0.5), columns=1, steps=2, name="tiny")
    (big, small), _ = profiles([*trace, *tiny])
    network = links(servers=4)
    both, alone = make_plan([big, small], network, [8]), make_plan([small], network, [8])
    assert both.granule == big.granule(4) == 64
    assert "in runs of 64 (sync.granule)" in both.reason
    assert alone.granule == 1
    assert "in runs of 1 (sync.granule)" in alone.reason


def test_latency_decides_small_tensors(made_up: Any) -> None:
    found, _ = profiles(made_up(np.full(1000, 0.05), columns=1))
    plan = make_plan(found, links(latency_seconds=0.001), COUNTS)
    assert "Latency decides: 2 rounds of 1 ms" in plan.reason


def dense(trace: Trace, elements: int, pushed: int) -> Trace:
    """A dense tensor beside that of a trace: its elements, and how many of them are not zero."""
    return [
        (
            header,
            Push(
                tensor="bucket", step=push.step, shape=(elements,), sparse_dims=0, item_bytes=4, pushed=pushed
            ),
        )
        for header, push in trace
    ]


def test_the_heaviest_tensor_decides(made_up: Any) -> None:
    rows = made_up(np.full(5000, 0.5), columns=64)
    light, heavy = (
        profiles([*rows, *dense(rows, 1000, 1000)])[0],
        profiles([*rows, *dense(rows, 10**6, 10**6)])[0],
    )
    pulled, pushed = (make_plan(found, links(), COUNTS).reason for found in (light, heavy))
    assert "Most of the time goes into pulls: " in pulled
    assert re.search(r"link\. (99|100)% of the bytes are those of 'table': ", pulled)
    dense_is = "which is dense and travels whole under every scheme"
    assert re.search(rf"Bytes decide: .* (8|9)\d% of the bytes are those of 'bucket', {dense_is}", pushed)


def test_a_note_says_what_a_sparsifier_would_save(made_up: Any) -> None:
    pushes = made_up(np.full(5000, 0.05), columns=4)
    found, _ = profiles([*pushes, *dense(pushes, 10**6, 10**6)])
    (note,) = make_plan(found, links(4), COUNTS).notes
    assert note == (
        "of large dense gradients each worker pushes and pulls 8 MB a step; "
        "sync.sparsifier would reduce that to 240 kB with topk, 92.6 kB with exdyna at a density of 0.01 "
        "(docs/sparsifiers.md)"
    )


def test_settings_that_the_plan_does_not_count_are_named(made_up: Any) -> None:
    pushes = made_up(np.full(5000, 0.05), columns=4)
    found, _ = profiles([*pushes, *dense(pushes, 10**6, 10**6)])
    (note,) = make_plan(found, links(4), COUNTS, config=Config(sync=SyncConfig(density=0.1))).notes
    assert note.endswith("at a density of 0.1 (docs/sparsifiers.md)")
    assert "to 2.18 MB with topk" in note
    others = Config(sync=SyncConfig(sparsifier="topk", values="int8"))
    assert make_plan(found, links(4), COUNTS, config=others).notes == [
        "sync.values = 'int8' is not counted: values count as gradients have them",
        "sync.sparsifier = 'topk' is not counted: dense gradients count whole",
    ]


def test_notes_say_what_to_doubt(made_up: Any) -> None:
    steady = made_up(np.full(5000, 0.05), workers=1)
    repeated = [(h, type(p)(**{f: getattr(p, f) for f in p.__struct_fields__} | {"rows": steady[0][1].rows,
                 "pushed": steady[0][1].pushed})) for h, p in steady]  # fmt: skip
    other = made_up(np.full(5000, 0.05), workers=2, seed=1)[20:]
    found, _ = profiles(repeated + other)
    (note,) = make_plan(found, links(), COUNTS).notes
    assert "a worker's steps overlap by 0.5" in note
    assert "unions may be larger" in note
    alike = [(Header(rank=rank, workers=2), push) for rank in range(2) for _, push in steady]
    (note,) = make_plan(profiles(alike)[0], links(), COUNTS).notes
    assert re.fullmatch(
        r"'table': a worker's steps overlap by 0\.0\d, workers by 1\.00; "
        "steps stand in for workers beyond 2, whose unions may be smaller",
        note,
    )
    alone, _ = profiles(steady)
    assert make_plan(alone, links(), COUNTS, ["lr"]).notes == [
        "only one worker was recorded; its steps stand in for other workers",
        "pushed in fewer than half of the steps: lr",
    ]


@pytest.mark.parametrize(
    ("elements", "share", "says_so"),
    [(65_540, 0.25, True), (65_536, 0.25, False), (65_540, 0.5, False), (65_540, 1.0, False)],
)
def test_a_note_says_that_a_dense_gradient_is_mostly_zeros(
    elements: int, share: float, says_so: bool, made_up: Any
) -> None:
    rows = made_up(np.full(80_000, 0.01), columns=1)
    found, _ = profiles([*rows, *dense(rows, elements, round(elements * share))])
    said = [note for note in make_plan(found, links(), COUNTS).notes if "elements are zero" in note]
    expected = (
        "'bucket' is dense, but 75% of its elements are zero: is there an embedding without sparse=True?"
    )
    assert said == [expected] * says_so


# ── the file ────────────────────────────────────────────────────────────────────────────────────


def test_a_file_keeps_what_else_it_says(tmp_path: Path) -> None:
    file = tmp_path / "zenps.toml"
    file.write_text('# ours\n[cluster]\nworkers = 4  # four\n\n[sync]\nscheme = "byteps"\ncodec = "coo"\n')
    assert write_settings(file, {"scheme": "zenps", "granule": 8}) == {"scheme": "byteps"}
    text = file.read_text()
    assert text == (
        '# ours\n[cluster]\nworkers = 4  # four\n\n[sync]\nscheme = "zenps"\ncodec = "coo"\ngranule = 8\n'
    )
    assert load(file=file, environ={}).config.sync.scheme == "zenps"


def test_a_file_keeps_its_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "zenps.toml"
    file.write_bytes(b'\xef\xbb\xbf[sync]\r\nscheme = "byteps"\r\ncodec = "coo"\r\n')
    assert write_settings(file, {"scheme": "zenps"}) == {"scheme": "byteps"}
    assert file.read_bytes() == b'[sync]\r\nscheme = "zenps"\r\ncodec = "coo"\r\n'


def test_a_file_is_unchanged_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "zenps.toml"
    file.write_text("[cluster]\nworkers = 4\n")
    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(ConfigError, match="No space left"):
        write_settings(file, {"scheme": "zenps"})
    assert file.read_text() == "[cluster]\nworkers = 4\n"


def test_a_linked_file_stays_linked_and_may_become_shorter(tmp_path: Path) -> None:
    file, link = tmp_path / "zenps.toml", tmp_path / "link.toml"
    file.write_text('[sync]\nscheme = "hierarchical-centralization"\n')
    link.symlink_to(file)
    write_settings(link, {"scheme": "zen"})
    assert link.is_symlink()
    assert file.read_text() == '[sync]\nscheme = "zen"\n'


@pytest.mark.parametrize("before", [None, "", "[cluster]\nworkers = 2\n"])
def test_a_file_without_a_scheme_gets_one(tmp_path: Path, before: str | None) -> None:
    file = tmp_path / "zenps.toml"
    if before is not None:
        file.write_text(before)
    assert write_settings(file, {"scheme": "zen"}) == {}
    assert tomllib.loads(file.read_text()) == {**tomllib.loads(before or ""), "sync": {"scheme": "zen"}}


AMONG_WORKERS = {scheme.name for scheme in fixed_schemes() if scheme.engine == "peers"}
AGAINST = {
    "security.keys": ('[security]\nkeys = "keys.toml"\n', AMONG_WORKERS),
    "cluster.on_worker_loss": ('[cluster]\non_worker_loss = "continue"\n', AMONG_WORKERS),
    "sync.levels": ("[sync]\nlevels = 2\n", AMONG_WORKERS),
    "sync.values": ('[sync]\nvalues = "int8"\n', AMONG_WORKERS | {"omnireduce"}),
}


@pytest.mark.parametrize("setting", AGAINST)
def test_what_a_file_rules_out_is_not_written_into_it(tmp_path: Path, setting: str) -> None:
    file, (text, schemes) = tmp_path / "zenps.toml", AGAINST[setting]
    file.write_text(text)
    assert check_settings(file) == dict.fromkeys(schemes, setting)
    assert ruled_out(file=file, environ={}) == dict.fromkeys(schemes, setting)
    for scheme in SCHEMES:
        file.write_text(text)
        if scheme not in schemes:
            write_settings(file, {"scheme": scheme})
            assert load(file=file, environ={}).config.sync.scheme == scheme
            continue
        with pytest.raises(ConfigError, match=setting):
            write_settings(file, {"scheme": scheme})
        assert file.read_text() == text


def test_nothing_rules_out_a_scheme_where_nothing_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ruled_out(environ={}) == {}
    assert check_settings(tmp_path / "new.toml") == {}
    assert not (tmp_path / "new.toml").exists()


@pytest.mark.parametrize("text", ["[sync", "[sinc]\n", "sync = 3\n", "[sync]\nscheme = 'none'\n", "\xff"])
def test_a_file_that_is_no_configuration_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "zenps.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        write_settings(file, {"scheme": "zenps"})
    with pytest.raises(ConfigError):
        check_settings(file)
    assert file.read_bytes() == text.encode("latin-1")
