from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zenps as zps
from zenps.config import sizes
from zenps.config import sources as config_module
from zenps.config.settings import FIELDS, MIB, PARTITIONS, SPARSIFIERS, Config
from zenps.config.shared import differing_settings, server_settings, shared_settings
from zenps.config.sources import (
    check_partition,
    describe,
    load,
    local_rank_from_environment,
    local_size_from_environment,
    rank_from_environment,
    require_cluster,
    restarts_from_environment,
    variable_of,
)
from zenps.config.values import checked, format_address, format_bytes, parse_address
from zenps.errors import ConfigError, UnknownKeyError
from zenps.partition.strategies.registry import strategy_names
from zenps.sparsifiers.registry import sparsifier_names


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(**sources: object) -> str:
    """The one line with which ``load`` refuses these sources."""
    with pytest.raises(ConfigError) as caught:
        load(**{"environ": {}, **sources})  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_without_sources_all_is_default() -> None:
    loaded = load(environ={})
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {"default"}


def test_defaults_obey_their_own_bounds() -> None:
    msgspec.convert(msgspec.to_builtins(Config()), Config)
    for row in describe(load(environ={})):
        assert checked(row.name, row.value, "test") == row.value


def test_the_tree_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().sync.granule = 64  # type: ignore[misc]


# Each source overrides the ones before it.
LADDER: list[tuple[str, dict[str, object]]] = [
    ("zenps.toml", {}),
    ("WORLD_SIZE", {"WORLD_SIZE": "3"}),
    ("DMLC_NUM_WORKER", {"DMLC_NUM_WORKER": "4"}),
    ("ZENPS_CLUSTER_WORKERS", {"ZENPS_CLUSTER_WORKERS": "5"}),
]


@pytest.mark.parametrize("height", range(len(LADDER)))
def test_precedence(tmp_path: Path, height: int) -> None:
    (tmp_path / "zenps.toml").write_text("[cluster]\nworkers = 2\n")
    environ = {key: str(value) for _, layer in LADDER[: height + 1] for key, value in layer.items()}
    loaded = load(environ=environ)
    assert loaded.config.cluster.workers == height + 2
    assert loaded.sources["cluster.workers"] == LADDER[height][0]
    loaded = load(environ=environ, sets=["cluster.workers=9", "cluster.workers=10"])
    assert (loaded.config.cluster.workers, loaded.sources["cluster.workers"]) == (10, "--set")


def test_every_field_can_be_set_by_its_variable() -> None:
    other = {"sync.partition": "parallel", "sync.codec": "coo", "log.level": "debug", "log.format": "json"}
    other |= {"cuda.compaction": "bitmap", "cluster.on_worker_loss": "continue"}
    other |= {
        "cluster.same_host": "tcp",
        "sparsifier.controller": "published",
        "sparsifier.mask_momentum": "off",
        "sync.consistency": "ssp",
    }
    other |= {"kernels.backend": "torch", "sync.scheme": "zen", "sync.values": "int8", "sync.density": "0.5"}
    other |= {"cluster.host": "fe80::1%br-lan.7"}
    for name, field in FIELDS.items():
        text = other.get(name) or ("h:1" if field.kind is str else "16777216" if "_bytes" in name else "2")
        variable = "ZENPS_" + name.replace(".", "_").upper()
        loaded = load(environ={variable: text})
        section, _, attribute = name.partition(".")
        assert str(getattr(getattr(loaded.config, section), attribute)) in {text, f"{text}.0"}
        assert [key for key, source in loaded.sources.items() if source == variable] == [name]


class TestFile:
    def test_given_file_before_variable_before_working_directory(self, tmp_path: Path) -> None:
        for number, name in enumerate(("zenps.toml", "variable.toml", "given.toml"), start=1):
            (tmp_path / name).write_text(f"[cluster]\nservers = {number}\n")
        environ = {"ZENPS_CONFIG": "variable.toml"}
        assert load(environ={}).config.cluster.servers == 1
        assert load(environ=environ).config.cluster.servers == 2
        loaded = load(environ=environ, file=Path("given.toml"))
        assert (loaded.config.cluster.servers, loaded.sources["cluster.servers"]) == (3, "given.toml")

    def test_a_file_may_begin_with_a_byte_order_mark(self, tmp_path: Path) -> None:
        (tmp_path / "zenps.toml").write_text("[cluster]\nworkers = 3\n", encoding="utf-8-sig")
        assert load(file=tmp_path / "zenps.toml", environ={}).config.cluster.workers == 3

    def test_named_file_must_exist(self) -> None:
        assert refusal(file=Path("absent.toml")).startswith(
            "file = 'absent.toml': expected a readable TOML file"
        )
        assert "absent.toml" in refusal(environ={"ZENPS_CONFIG": "absent.toml"})

    @pytest.mark.parametrize(
        "content",
        [b"[cluster", b"\xff\xfe", b"workers == 2", b"a=" + b"[" * 9999],
        ids=["open", "no UTF-8", "two signs", "nested too deep"],
    )
    def test_not_toml(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "zenps.toml").write_bytes(content)
        assert refusal().startswith("file = 'zenps.toml': expected TOML: ")

    def test_a_working_directory_that_may_not_be_searched(self) -> None:
        script = (
            "import os; from zenps.config.sources import load; from zenps.errors import ConfigError\n"
            "os.chmod('.', 0)\n"
            "if os.geteuid() == 0: os.seteuid(65534)\n"
            "try: load(environ={})\n"
            "except ConfigError as error: print(error)"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        said = "file = 'zenps.toml': expected a readable TOML file (Permission denied)\n"
        assert (run.stdout, run.stderr) == (said, "")

    def test_directory(self, tmp_path: Path) -> None:
        assert "directory" in refusal(file=tmp_path)

    @pytest.mark.parametrize(
        ("content", "line"),
        [
            (
                "[sync]\npartitoin = 'x'",
                "sync.partitoin: unknown key; did you mean sync.partition? (sync has: ",
            ),
            (
                "[snyc]\n",
                "snyc: unknown key; did you mean sync? "
                "(sections: cluster, sync, sparsifier, kernels, cuda, security, metrics, status, log)",
            ),
            (
                "workers = 2",
                "workers: unknown key; "
                "sections: cluster, sync, sparsifier, kernels, cuda, security, metrics, status, log",
            ),
            ("sync = 3", "sync = 3: expected a table, [sync] (set by zenps.toml)"),
            (
                "[cluster]\nworkers = true",
                "cluster.workers = True: expected an integer from 1 to 4096 (set by z",
            ),
            ("[cluster]\nworkers = 2.5", "cluster.workers = 2.5: expected an integer from 1 to 4096"),
            ("[cluster]\nworkers = [2]", "cluster.workers = [2]: expected an integer from 1 to 4096"),
            ("[log]\nlevel = 1", "log.level = 1: expected one of debug, info, warning, error"),
        ],
    )
    def test_refused_content(self, tmp_path: Path, content: str, line: str) -> None:
        (tmp_path / "zenps.toml").write_text(content)
        assert refusal().startswith(line)

    def test_sizes_as_text_or_number(self, tmp_path: Path) -> None:
        (tmp_path / "zenps.toml").write_text('[sync]\nchunk_bytes = "4 MiB"\nbucket_bytes = 65536\n')
        sync = load(environ={}).config.sync
        assert (sync.chunk_bytes, sync.bucket_bytes) == (4 << 20, 65536)


def test_a_number_may_begin_with_its_point() -> None:
    assert load(environ={"ZENPS_SYNC_DENSITY": ".25"}).config.sync.density == 0.25
    for text in (".", "..5", ".x", "-.5"):
        assert "expected a number above 0 and up to 1" in refusal(sets=[f"sync.density={text}"])
    assert "expected an integer" in refusal(sets=["cluster.workers=.5"])


class TestUnknownKeys:
    def test_in_set(self) -> None:
        assert refusal(sets=["sync.partitoin=x"]) == (
            "sync.partitoin: unknown key; did you mean sync.partition? "
            "(sync has: scheme, partition, codec, values, chunk_bytes, bucket_bytes, granule, block, fusion, "
            "bandwidth_mbit, latency_us, sparsifier, density, consistency, staleness, group, levels, "
            "table_bytes, seed, trace)"
        )
        sections = "cluster, sync, sparsifier, kernels, cuda, security, metrics, status, log"
        assert refusal(sets=["zzz=x"]) == f"zzz: unknown key; sections: {sections}"

    def test_in_environment(self) -> None:
        line = refusal(environ={"ZENPS_SYNC_PARTITOIN": "x"})
        assert line.startswith(
            "ZENPS_SYNC_PARTITOIN: unknown key; did you mean ZENPS_SYNC_PARTITION? (sync has: "
        )

    def test_is_an_error_of_its_own(self) -> None:
        with pytest.raises(UnknownKeyError):
            load(environ={"ZENPS_ZZZ": ""})

    def test_other_programs_variables_pass(self) -> None:
        assert load(environ={"ZENPSX": "1", "DMLC_ROLE": "worker", "RANK": "x"}).config == Config()


REACHABLE = (
    "a name of ASCII letters, digits and .-_, or an IP address without brackets, by which others reach this "
    "machine, or '' to find one"
)


@pytest.mark.parametrize(
    ("item", "allowed"),
    [
        ("metrics.port=65536", "an integer from -1 to 65535"),
        ("metrics.port=-2", "an integer from -1 to 65535"),
        ("cluster.server_port=http", "an integer from 0 to 65535"),
        ("cluster.workers=0", "an integer from 1 to 4096"),
        ("cluster.workers=", "an integer from 1 to 4096"),
        ("cluster.lease_seconds=0.09", "a number from 0.1 to 604800"),
        ("cluster.lease_seconds=nan", "a number from 0.1 to 604800"),
        ("cluster.rendezvous_seconds=0", "a number above 0 and up to 604800"),
        ("cluster.deadline_seconds=inf", "a number from 0 to 604800"),
        ("cluster.max_message_bytes=4GiB", "an integer from 64KiB to 2GiB, such as 8388608 or '8MiB'"),
        ("cluster.max_message_bytes=1 parsec", "an integer from 64KiB to 2GiB, such as 8388608 or '8MiB'"),
        ("cluster.job=", "a string of 1 to 64 printable characters"),
        ("cluster.job=a\x1b[2Jb", "a string of 1 to 64 printable characters"),
        ("cluster.host=0.0.0.0", REACHABLE),
        ("cluster.host=::", REACHABLE),
        ("cluster.host=n..lan", REACHABLE),
        ("cluster.host=*", REACHABLE),
        ("cluster.host=[::1]", REACHABLE),
        ("cluster.host=a:80", REACHABLE),
        ("cluster.host=tcp://a", REACHABLE),
        ("cluster.host=ü.de", REACHABLE),
        ("cluster.host=fe80::1%ü", REACHABLE),
        ("metrics.host=node..lan", "an address or name of this machine"),
        (f"status.host={'x' * 64}.lan", "an address or name of this machine"),
        ("sync.granule=48", "a power of two from 1 to 256"),
        ("sync.granule=512", "a power of two from 1 to 256"),
        ("sync.codec=zip", "one of auto, coo, bitmap, delta, blocks, dense"),
        (
            "sync.partition=alphabetical",
            "one of balanced, centralized, parallel, or the dotted path of a strategy",
        ),
        (
            "sync.sparsifier=top",
            "one of none, dgc, exdyna, micro, randomk, threshold, topk, or the dotted path of a sparsifier",
        ),
        ("log.format=xml", "one of text, json"),
    ],
)
def test_refused_value(item: str, allowed: str) -> None:
    name, _, value = item.partition("=")
    assert refusal(sets=[item]) == f"{name} = {value!r}: expected {allowed} (set by --set)"


def test_refused_value_names_the_variable_that_set_it() -> None:
    assert refusal(environ={"WORLD_SIZE": "many"}).endswith("(set by WORLD_SIZE)")


def test_set_needs_an_equals_sign() -> None:
    assert refusal(sets=["sync.granule"]) == "--set = 'sync.granule': expected section.field=value"
    assert refusal(sets="sync.granule=8") == (
        """sets = 'sync.granule=8': expected a list of strings, such as ["sync.density=0.1"]"""
    )


def test_a_script_is_told_of_its_argument_not_of_an_option() -> None:
    for item, text in {"foo": r"sets = 'foo': expected", "sync.density=x": r"\(set by sets\)"}.items():
        with pytest.raises(ConfigError, match=text):
            zps.init(sets=[item])


@pytest.mark.parametrize(
    "sets", [None, 1, b"a=b", [b"a=b"], [1], [("sync.seed", 1)], {"sync.seed": 1}], ids=repr
)
def test_sets_are_strings(sets: object) -> None:
    assert refusal(sets=sets).endswith("""expected a list of strings, such as ["sync.density=0.1"]""")


@pytest.mark.parametrize(
    "name", ["cluster.host", "metrics.host", "sync.trace", "security.keys", "sync.partition"]
)
def test_a_nul_character_is_refused(name: str) -> None:
    """Sockets and files raise ValueError: embedded null byte."""
    assert (
        refusal(sets=[f"{name}=a.b\0c"]) == f"{name} = 'a.b\\x00c': expected no NUL character (set by --set)"
    )


def test_chunk_must_fit_a_message() -> None:
    line = refusal(sets=["cluster.max_message_bytes=4MiB"])
    assert line == "sync.chunk_bytes = 8388608: expected at most cluster.max_message_bytes = 4MiB"


@pytest.mark.parametrize(
    ("workers", "chunk_bytes"), [(1, 8 * MIB), (16, 8 * MIB), (17, 4 * MIB), (32, 4 * MIB), (4096, 32 << 10)]
)
def test_chunks_are_smaller_where_many_workers_share_a_budget(workers: int, chunk_bytes: int) -> None:
    sets = [f"cluster.workers={workers}", "cluster.server_budget_bytes=1GiB"]
    config = load(sets=sets, environ={}).config
    assert (sizes.chunk_bytes(config), sizes.message_bytes(config)) == (chunk_bytes, 2 * chunk_bytes)
    assert shared_settings(config)["sync.chunk_bytes"] == chunk_bytes
    assert server_settings(config) == {
        "cluster.max_message_bytes": 256 * MIB,
        "cluster.workers": workers,
        "sync.chunk_bytes": chunk_bytes,
    }


@pytest.mark.parametrize(
    ("sets", "needs_workers"),
    [
        ([], False),
        (["cluster.on_worker_loss=continue"], True),
        (["sync.sparsifier=topk"], True),
    ],
    ids=["neither", "elastic", "sparsifier"],
)
def test_workers_need_the_number_of_workers_where_they_compute_with_it(
    sets: list[str], needs_workers: bool
) -> None:
    config = load(sets=[*sets, "cluster.workers=3"], environ={}).config
    assert shared_settings(config).get("cluster.workers") == (3 if needs_workers else None)


def test_codecs_that_cut_tables_otherwise_must_be_equal() -> None:
    here, there = (
        shared_settings(load(sets=[f"sync.codec={codec}"], environ={}).config) for codec in ("auto", "bitmap")
    )
    assert differing_settings(here, there) == ["sync.codec"]


def test_two_chunks_are_no_more_than_half_a_message() -> None:
    config = load(sets=["cluster.max_message_bytes=8MiB"], environ={}).config
    assert (sizes.chunk_bytes(config), sizes.message_bytes(config)) == (8 * MIB, 4 * MIB)


def test_a_budget_too_small_for_the_least_chunks_of_all_workers_is_refused() -> None:
    sets = ["cluster.server_budget_bytes=1MiB", "cluster.workers=33"]
    line = refusal(sets=sets)
    assert line == "cluster.server_budget_bytes = 1048576: expected at least 1056KiB for cluster.workers = 33"
    load(sets=[sets[0], "cluster.workers=32"], environ={})


@pytest.mark.parametrize("scheme", ["allreduce", "agsparse", "sparcml", "hierarchical-centralization"])
@pytest.mark.parametrize(
    ("item", "allowed"),
    [("cluster.on_worker_loss=continue", "fail, because"), ("security.keys=keys.toml", "no keys, because")],
)
def test_what_workers_among_themselves_cannot_do(scheme: str, item: str, allowed: str) -> None:
    name, _, value = item.partition("=")
    line = refusal(sets=[item, f"sync.scheme={scheme}"])
    assert line.startswith(f"{name} = {value!r}: expected {allowed} sync.scheme = {scheme} exchanges among")
    load(sets=[item, "sync.scheme=byteps"], environ={})


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("sync.levels=2", "sync.levels = 2: expected 1, because sync.consistency = ds-sync averages models"),
        (
            "sync.sparsifier=topk",
            "sync.sparsifier = 'topk': expected none, because sync.consistency = ds-sync sends no gradients",
        ),
        (
            "sync.values=int8",
            "sync.values = 'int8': expected same, because sync.consistency = ds-sync sends no gradients",
        ),
        (
            "cluster.on_worker_loss=continue",
            "cluster.on_worker_loss = 'continue': expected fail, because sync.consistency = ds-sync needs",
        ),
        (
            "security.keys=keys.toml",
            "security.keys = 'keys.toml': expected no keys, because sync.consistency = ds-sync",
        ),
    ],
)
def test_averaging_models_excludes_what_is_done_to_gradients(item: str, expected: str) -> None:
    assert load(sets=["sync.consistency=ds-sync"], environ={})
    line = refusal(sets=["sync.consistency=ds-sync", item])
    assert line.startswith(expected)


@pytest.mark.parametrize("item", ["sync.scheme=agsparse", "cluster.on_worker_loss=continue"])
def test_what_two_levels_cannot_do(item: str) -> None:
    line = refusal(sets=["sync.levels=2", item])
    assert line.startswith(f"sync.levels = 2: expected 1, because {item.replace('=', ' = ')}")


@given(name=st.sampled_from(sorted(FIELDS)), text=st.text(max_size=30) | st.just("9" * 5000))
def test_any_text_is_a_value_or_refused_in_one_line(name: str, text: str) -> None:
    try:
        value = checked(name, text, "test")
    except ConfigError as error:
        line = str(error)
    else:
        line = ""
        assert checked(name, value, "test") == value
    assert len(line.splitlines()) <= 1


@given(st.integers(min_value=0, max_value=1 << 45))
def test_format_bytes_says_the_same_number(count: int) -> None:
    text = format_bytes(count)
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    assert (int(text[:-3]) * units[text[-3:]] if text.endswith("B") else int(text)) == count


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (1025, "1025"), (8 << 20, "8MiB"), (3 << 40, "3TiB")])
def test_format_bytes_takes_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_one_is_a_power_of_two() -> None:
    assert load(sets=["sync.granule=1", "sync.block=1"], environ={}).config.sync.granule == 1


class TestScheduler:
    @pytest.mark.parametrize(
        ("text", "host", "port", "plain"),
        [
            ("node7:9000", "node7", 9000, "node7:9000"),
            ("tcp://10.0.0.1:1", "10.0.0.1", 1, "10.0.0.1:1"),
            ("[::1]:65535", "::1", 65535, "[::1]:65535"),
            ("tcp://[fe80::1%eth0]:80", "fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
            ("my_node-7.lan.:80", "my_node-7.lan.", 80, "my_node-7.lan.:80"),
            ("[fe80::1%br-lan.7]:80", "fe80::1%br-lan.7", 80, "[fe80::1%br-lan.7]:80"),
        ],
    )
    def test_forms(self, text: str, host: str, port: int, plain: str) -> None:
        assert parse_address(text) == (host, port)
        assert format_address(host, port) == plain
        assert load(environ={"ZENPS_CLUSTER_SCHEDULER": text}).config.cluster.scheduler == plain

    @pytest.mark.parametrize(
        "text",
        [
            "node7",
            "node7:",
            "node..lan:9000",
            ":9000",
            "node7:0",
            "node7:65536",
            "::1:9000",
            "udp://h:1",
            "h:1/x",
            "h h:1",
            "h:９",
            "*:9000",
            "a,b:5",
            "a@b:5",
            "a'b:5",
            "-x:5",
            "_x:5",
            "ü.de:80",
            "٣:5",
            "[fe80::1%ü]:80",
        ],
    )
    def test_refused(self, text: str) -> None:
        line = refusal(sets=[f"cluster.scheduler={text}"])
        assert "expected 'host:port' with a port from 1 to 65535" in line
        assert "0.0.0.0: all of this machine" in line


class TestBytePSVariables:
    def test_all(self) -> None:
        loaded = load(
            environ={
                "DMLC_PS_ROOT_URI": "10.0.0.1",
                "DMLC_PS_ROOT_PORT": "9000",
                "DMLC_NUM_WORKER": "4",
                "DMLC_NUM_SERVER": "2",
            }
        )
        cluster = loaded.config.cluster
        assert (cluster.scheduler, cluster.workers, cluster.servers) == ("10.0.0.1:9000", 4, 2)
        assert loaded.sources["cluster.scheduler"] == "DMLC_PS_ROOT_URI"

    def test_ipv6(self) -> None:
        environ = {"DMLC_PS_ROOT_URI": "::1", "DMLC_PS_ROOT_PORT": "9000"}
        assert load(environ=environ).config.cluster.scheduler == "[::1]:9000"

    @pytest.mark.parametrize(
        ("host", "read"), [("[::1]", "[::1]"), ("tcp://h", "h"), ("tcp://[fe80::1]", "[fe80::1]")]
    )
    def test_a_host_as_in_an_address(self, host: str, read: str) -> None:
        environ = {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": "9000"}
        assert load(environ=environ).config.cluster.scheduler == f"{read}:9000"

    def test_half_an_address(self) -> None:
        assert refusal(environ={"DMLC_PS_ROOT_URI": "h"}).startswith("DMLC_PS_ROOT_PORT = ''")
        assert refusal(environ={"DMLC_PS_ROOT_PORT": "1"}).startswith("DMLC_PS_ROOT_URI = ''")

    def test_bad_port(self) -> None:
        line = refusal(environ={"DMLC_PS_ROOT_URI": "h", "DMLC_PS_ROOT_PORT": "0"})
        assert line.startswith("cluster.scheduler = 'h:0'")


class TestPartition:
    def test_builtin_names_are_the_registrys(self) -> None:
        assert set(PARTITIONS) == set(strategy_names())
        assert set(SPARSIFIERS) == set(sparsifier_names())

    @pytest.mark.parametrize("name", PARTITIONS)
    def test_builtin(self, name: str) -> None:
        config = load(environ={}, sets=[f"sync.partition={name}"]).config
        check_partition(config)

    def test_dotted_path_is_looked_up_only_by_the_check(self) -> None:
        config = load(environ={}, sets=["sync.partition=no_such_module:Strategy"]).config
        with pytest.raises(ConfigError, match="no_such_module"):
            check_partition(config)

    def test_entry_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugin = importlib.metadata.EntryPoint("mine", "my_module:Mine", "zenps.partition")
        installed = importlib.metadata.EntryPoints([plugin])
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: installed.select(group=group))
        assert load(environ={}, sets=["sync.partition=mine"]).config.sync.partition == "mine"
        assert "balanced, centralized, parallel, mine," in refusal(sets=["sync.partition=theirs"])


class TestRanks:
    def test_torchrun_before_byteps(self) -> None:
        assert rank_from_environment({}) is None
        assert rank_from_environment({"DMLC_WORKER_ID": "2"}) == 2
        assert rank_from_environment({"RANK": "0", "DMLC_WORKER_ID": "2"}) == 0

    @pytest.mark.parametrize("text", ["", "-1", "one", "1.0", "²", "1_0", "1" * 5000])
    def test_garbage(self, text: str) -> None:
        with pytest.raises(
            ConfigError, match=r"^RANK = .*: expected an integer from 0, of at most 10"
        ) as caught:
            rank_from_environment({"RANK": text})
        assert len(str(caught.value)) < 1100

    def test_local(self) -> None:
        environ = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
        assert (local_rank_from_environment(environ), local_size_from_environment(environ)) == (3, 4)
        assert (local_rank_from_environment({}), local_size_from_environment({})) == (0, 1)
        environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        assert (local_rank_from_environment(environ), local_size_from_environment(environ)) == (0, 1)

    @pytest.mark.parametrize(
        ("count", "most", "told"),
        [("0", "3", (0, 3)), ("2", "3", (2, 1)), ("4", "3", (4, 0)), ("0", "0", (0, 0))],
    )
    def test_restarts(self, count: str, most: str, told: tuple[int, int]) -> None:
        environ = {"TORCHELASTIC_RESTART_COUNT": count, "TORCHELASTIC_MAX_RESTARTS": most}
        assert restarts_from_environment(environ) == told

    def test_without_torchrun_nobody_restarts(self) -> None:
        assert restarts_from_environment({}) == (0, 0)
        with pytest.raises(ConfigError, match="TORCHELASTIC_RESTART_COUNT"):
            restarts_from_environment({"TORCHELASTIC_RESTART_COUNT": "-1"})
        with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
            local_size_from_environment({"LOCAL_WORLD_SIZE": "0"})


class TestRequireCluster:
    def test_alone(self) -> None:
        require_cluster(load(environ={}), {})

    @pytest.mark.parametrize("override", [[], ["cluster.workers=1"]])
    @pytest.mark.parametrize(
        "variable",
        [
            *("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
            "BYTEPS_LOCAL_SIZE",
        ],
    )
    def test_launchers_without_a_scheduler(self, variable: str, override: list[str]) -> None:
        environ = {variable: "4"}
        with pytest.raises(ConfigError) as caught:
            require_cluster(load(environ=environ, sets=override), environ)
        assert str(caught.value) == (
            "cluster.scheduler = '': expected 'host:port' of the scheduler, because "
            f"{variable}=4 says this is one of several workers; start them by zenps launch, or set it for "
            "all of them"
        )
        configured = environ | {"DMLC_PS_ROOT_URI": "h", "DMLC_PS_ROOT_PORT": "1"}
        require_cluster(load(environ=configured, sets=override), configured)
        require_cluster(load(environ={variable: "1"}), {variable: "1"})

    def test_one_process_in_the_shell_of_a_slurm_job(self) -> None:
        environ = {"SLURM_NTASKS": "4"}
        require_cluster(load(environ=environ), environ)

    def test_workers_without_a_scheduler(self) -> None:
        with pytest.raises(ConfigError, match=r"because cluster\.workers=2 says"):
            require_cluster(load(environ={}, sets=["cluster.workers=2"]), {})


def test_describe() -> None:
    rows = describe(load(environ={}, sets=["sync.granule=64"]))
    assert [row.name for row in rows] == list(FIELDS)
    assert all(row.description for row in rows)
    (granule,) = (row for row in rows if row.name == "sync.granule")
    assert (granule.value, granule.source) == (64, "--set")


def test_reserved_variables_are_no_settings() -> None:
    assert not config_module.RESERVED & set(map(variable_of, FIELDS))
