"""What every scheme declares, and that a file of its own is all that a new one needs."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from zenps.codecs.base import CodecName
from zenps.config.settings import PARTITIONS, SPARSIFIERS
from zenps.config.sources import load
from zenps.config.values import choices
from zenps.errors import ConfigError
from zenps.schemes import builtin
from zenps.schemes.base import Engine, Keys, PeerAlgorithm, PullCodec, Scheme, WireForm
from zenps.schemes.costs import predict, predict_step
from zenps.schemes.refusals import AGREED_SPARSIFIERS
from zenps.schemes.registry import fixed_schemes, scheme_names, scheme_of, schemes
from zenps.schemes.traffic import Links, Tensor
from zenps.sparsifiers.registry import sparsifier_class

ROOT = Path(__file__).parents[3]
FOLDER = Path(builtin.__file__).parent
ALL = pytest.mark.parametrize("scheme", schemes(), ids=scheme_names())

SPARSE = Tensor(rows=10_000, columns=16, density=0.01, unions=(0.018, 0.03))
DENSE = Tensor(rows=10_000, is_sparse=False)
LINKS = Links(workers=4, bytes_per_second=1e9, latency_seconds=5e-5)

AGAINST = {
    "sync.values": ["same", "int8"],
    "sync.levels": ["1", "2"],
    "cluster.on_worker_loss": ["fail", "continue"],
    "security.keys": ["", "keys.toml"],
}


def test_every_file_is_a_scheme_and_every_scheme_a_file() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert files == {name.replace("-", "_") for name in scheme_names()}
    assert choices("sync.scheme") == scheme_names()


def test_declarations_load_neither_numpy_nor_torch() -> None:
    script = (
        "import sys; from zenps.config.sources import load; from zenps.schemes.registry import schemes; "
        "load(environ={}); schemes(); sys.exit(bool({'numpy', 'torch', 'cupy'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, timeout=60).returncode == 0


def test_what_runs_each() -> None:
    engines = {scheme.name: scheme.engine for scheme in schemes()}
    expected = {
        "zenps": "servers",
        "zen": "servers",
        "sparse-ps": "servers",
        "byteps": "servers",
        "omnireduce": "blocks",
        "allreduce": "peers",
        "agsparse": "peers",
        "sparcml": "peers",
        "hierarchical-centralization": "peers",
        "auto": "auto",
    }
    assert engines == engines | expected
    assert scheme_names()[: len(expected)] == (*expected,), "the order in which zenps plan lists them"


@ALL
def test_declaration_is_complete(scheme: Scheme) -> None:
    assert scheme_of(scheme.name) is scheme
    assert type(scheme).__module__ == f"{builtin.__name__}.{scheme.name.replace('-', '_')}"
    assert scheme.engine in get_args(Engine)
    assert type(scheme).__doc__
    assert type(scheme).cost.__doc__
    assert bool(scheme.candidates) == (scheme.engine == "auto")
    assert bool(scheme.spends) == (not scheme.candidates), "zenps plan says it of the second-best scheme"
    assert not scheme.spends.endswith("."), "it stands inside a sentence"
    assert f"`{scheme.name}`" in (ROOT / "docs/schemes.md").read_text("utf-8")


@ALL
def test_wire_form_names_what_exists(scheme: Scheme) -> None:
    wire = scheme.wire
    assert wire.keys in get_args(Keys)
    assert wire.partition in ("", *PARTITIONS)
    assert wire.push_codec in ("", *get_args(CodecName))
    assert wire.pull_codec in {name for part in get_args(PullCodec) for name in (get_args(part) or [part])}
    sums_sparse_rows = scheme.engine in ("peers", "auto") and wire.keys != "none"
    assert wire.peer_algorithm in (get_args(PeerAlgorithm) if sums_sparse_rows else [""])


@ALL
@pytest.mark.parametrize("tensor", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("servers", [0, 2])
def test_cost_is_a_number(scheme: Scheme, tensor: Tensor, servers: int) -> None:
    links = Links(workers=4, servers=servers, bytes_per_second=1e9, latency_seconds=5e-5)
    for cost in (predict(scheme.name, tensor, links), predict_step(scheme.name, [tensor], links)):
        assert 0 < cost.seconds < math.inf
        assert 0 < cost.busiest_bytes <= cost.serial_bytes < math.inf
        assert cost.rounds > 0


def test_auto_costs_what_the_better_of_its_candidates_does() -> None:
    auto = scheme_of("auto")
    candidates = [predict(scheme.name, SPARSE, LINKS) for scheme in auto.candidates]
    assert auto.cost(SPARSE, LINKS) == min(candidates, key=lambda cost: cost.seconds)
    assert predict("auto", DENSE, LINKS) == predict("zenps", DENSE, LINKS)


# ── settings ────────────────────────────────────────────────────────────────────────────────────


@ALL
@pytest.mark.parametrize("setting", AGAINST)
def test_refused_setting_is_named(scheme: Scheme, setting: str) -> None:
    item = f"{setting}={AGAINST[setting][1]}"
    error = scheme.refuse(load(sets=[item], environ={}).config.combination)
    if error is None:
        assert scheme.engine != "peers"
        load(sets=[f"sync.scheme={scheme.name}", item], environ={})
        return
    assert (error.field, str(error.value)) == (setting, AGAINST[setting][1])
    assert f", because sync.scheme = {scheme.name} " in error.allowed
    with pytest.raises(ConfigError, match=f"^{re.escape(str(error))}$"):
        load(sets=[f"sync.scheme={scheme.name}", item], environ={})


def test_blocks_refuse_the_sparsifiers_whose_ranks_agree_on_indices() -> None:
    kinds = {name: sparsifier_class(name) for name in SPARSIFIERS}
    agreed = {name for name, kind in kinds.items() if kind is not None and kind.exchange == "agreed"}
    assert {*AGREED_SPARSIFIERS} == agreed
    for name in SPARSIFIERS:
        sets = ["sync.scheme=omnireduce", f"sync.sparsifier={name}"]
        assert refusal(sets) == ("sync.sparsifier" if name in agreed else "")


@pytest.mark.parametrize("name", ["zenps", "omnireduce", "sparcml", "auto"])
def test_of_several_refused_settings_the_first_is_named(name: str) -> None:
    scheme = scheme_of(name)
    for values in product(*AGAINST.values()):
        settings = dict(zip(AGAINST, values, strict=True))
        changed = [setting for setting, value in settings.items() if value != AGAINST[setting][0]]
        refused = changed if scheme.engine == "peers" else []
        if scheme.engine == "blocks":
            refused = [setting for setting in changed if setting == "sync.values"]
        if {"sync.levels", "cluster.on_worker_loss"} <= {*changed}:  # under every scheme
            refused = refused or ["sync.levels"]
        sets = [f"{setting}={value}" for setting, value in settings.items()]
        assert refusal([f"sync.scheme={name}", *sets]) == (refused[0] if refused else "")


def refusal(sets: list[str]) -> str:
    """The setting that is refused; empty if none is."""
    try:
        load(sets=sets, environ={})
    except ConfigError as error:
        return error.field
    return ""


@pytest.mark.parametrize("setting", AGAINST)
def test_auto_takes_servers_where_workers_cannot_exchange(setting: str) -> None:
    auto = scheme_of("auto")
    usual, other = (
        load(sets=["sync.scheme=auto", f"{setting}={value}"], environ={}).config.combination
        for value in AGAINST[setting]
    )
    assert auto.fallback(usual) is None
    fallback = auto.fallback(other)
    assert fallback is not None
    instead, why = fallback
    assert (instead, why.field) == (scheme_of("zenps"), setting)
    assert all(scheme.fallback(other) is None for scheme in fixed_schemes())


@pytest.mark.parametrize("name", ["", "base", "__init__", "sparse_ps", "Zen", "zen.py", "../costs", "best"])
def test_unknown_scheme_is_refused_with_those_that_exist(name: str) -> None:
    allowed = re.escape(f"sync.scheme = {name!r}: expected one of {', '.join(scheme_names())}")
    with pytest.raises(ConfigError, match=f"^{allowed}$"):
        scheme_of(name)
    with pytest.raises(ConfigError, match=rf"^{allowed} \(set by --set\)$"):
        load(sets=[f"sync.scheme={name}"], environ={})


# ── a new scheme ────────────────────────────────────────────────────────────────────────────────

MINE = '''
from __future__ import annotations

from zenps.schemes import refusals
from zenps.schemes.base import Scheme, WireForm


class Mine(Scheme):
    """Rows as COO over servers, which everybody pushes twice."""

    name = "my-own"
    wire = WireForm(push_codec="coo")
    spends = "it pushes everything twice"

    def refuse(self, config):
        return refusals.values_unchanged(self.name, config)

    def cost(self, tensor, links):
        """2·f·COO of d, and f·COO of D."""
        push, pull = 2 * tensor.coo_bytes(tensor.density), tensor.coo_bytes(tensor.union)
        return links.served(push, pull, 1.0, 1.0, streams=True)


SCHEME = Mine()
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A scheme whose file lies beside the others."""
    (tmp_path / "my_own.py").write_text(MINE)
    monkeypatch.setattr(builtin, "__path__", [*builtin.__path__, str(tmp_path)])
    yield "my-own"
    scheme_of.cache_clear()
    sys.modules.pop(f"{builtin.__name__}.my_own", None)


def test_a_new_scheme_is_one_file(mine: str) -> None:
    assert scheme_names() == (*(name for name in choices("sync.scheme") if name != mine), mine)
    config = load(sets=[f"sync.scheme={mine}"], environ={}).config
    assert config.sync.scheme == mine
    assert (scheme_of(mine).engine, scheme_of(mine).wire) == ("servers", WireForm(push_codec="coo"))
    with pytest.raises(ConfigError, match=r"^sync\.values = 'int8': expected same"):
        load(sets=[f"sync.scheme={mine}", "sync.values=int8"], environ={})
    assert predict(mine, SPARSE, LINKS).seconds > predict("zenps", SPARSE, LINKS).seconds


def test_a_new_scheme_is_planned_for(mine: str) -> None:
    from zenps.cli.plan.planner import make_plan
    from zenps.cli.plan.written import ruled_out

    assert mine in {scheme.name for scheme in fixed_schemes()}
    assert ruled_out(["sync.values=int8"], environ={})[mine] == "sync.values"
    assert make_plan([], LINKS, [4]).predictions[-1].scheme == mine
