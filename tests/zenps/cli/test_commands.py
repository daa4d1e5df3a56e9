"""Subcommands of ``zenps``: arguments, settings, exit codes and one-line errors."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zenps.cli.commands import main
from zenps.keys import generate
from zenps.observe.trace import open_trace

ROOT = Path(__file__).parents[3]
SHOW = (
    "import json; from zenps.config.sources import load, describe; "
    "print(json.dumps([*map(list, describe(load()))]))"
)


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The exit code is 2, and stderr is one line that contains ``parts``."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zenps: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    for part in parts:
        assert part in done.stderr


SUBCOMMANDS = [
    "launch",
    "scheduler",
    "server",
    "worker",
    "status",
    "drain",
    "config",
    "doctor",
    "keygen",
    "health",
    "trace",
    "plan",
]

BAD_SETTINGS = {
    "misspelt key": ("sync.partitoin=balanced", ["sync.partitoin", "sync.partition"]),
    "unknown strategy": ("sync.partition=balancd", ["sync.partition", "'balancd'", "centralized"]),
    "port out of range": ("cluster.server_port=65536", ["cluster.server_port", "'65536'", "65535"]),
    "scheduler's port out of range": (
        "cluster.scheduler=h:70000",
        ["cluster.scheduler", "'h:70000'", "65535"],
    ),
    "no value": ("sync.codec", ["--set", "section.field=value"]),
    "line breaks": ("sync.\nzenps: fine\n=1", ["unknown key"]),
}


@pytest.mark.parametrize(("setting", "parts"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_setting_is_refused_in_one_line(zenps: Any, setting: str, parts: list[str]) -> None:
    assert_refused(zenps("config", "--set", setting), *parts)


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_every_subcommand_refuses_a_bad_setting(zenps: Any, subcommand: str) -> None:
    operands = {
        "launch": ["--", "true"],
        "worker": ["--", "true"],
        "drain": ["0"],
        "keygen": ["keys"],
        "health": ["--role", "server"],
        "trace": ["out", "part"],
        "plan": ["--trace", "file"],
    }
    done = zenps(subcommand, "--set", "log.level=loud", *operands.get(subcommand, []))
    assert_refused(done, "log.level", "'loud'", "debug, info")


def test_missing_file_is_refused(zenps: Any) -> None:
    assert_refused(zenps("config", "--config", "nowhere.toml"), "nowhere.toml")


@pytest.mark.parametrize("subcommand", ["launch", "worker"])
def test_a_file_that_cannot_be_read_again_is_refused(zenps: Any, subcommand: str) -> None:
    """The processes that are started would find it empty, or wait for its writer."""
    reader, writer = os.pipe()
    os.write(writer, b"[sync]\ngranule = 64\n")
    os.close(writer)
    file = f"/dev/fd/{reader}"
    assert_refused(zenps(subcommand, "--config", file, "--", "true", pass_fds=[reader]), "--config", file)
    os.close(reader)


def test_no_settings_of_a_file(zenps: Any) -> None:
    assert zenps("worker", "--config", "/dev/null", "--", "true").returncode == 0


def test_number_of_workers_is_checked(zenps: Any) -> None:
    assert_refused(
        zenps("launch", "--workers", "0", "--", "true"), "cluster.workers", "'0'", "from 1 to 4096"
    )


@pytest.mark.parametrize("subcommand", ["launch", "worker"])
def test_command_that_does_not_exist_is_refused(zenps: Any, subcommand: str) -> None:
    assert_refused(zenps(subcommand, "--", "no-such-program", "x"), "no-such-program")


@pytest.mark.parametrize(
    "arguments", [["server"], ["status"], ["drain", "0"], ["health", "--role", "server"]], ids=lambda a: a[0]
)
def test_scheduler_is_required(zenps: Any, arguments: list[str]) -> None:
    how = "by --set, ZENPS_CLUSTER_SCHEDULER or zenps.toml"
    assert_refused(zenps(*arguments), "cluster.scheduler", "host:port", how)


def test_a_rank_that_no_server_can_have(zenps: Any) -> None:
    done = zenps("drain", "65536", "--set", "cluster.scheduler=127.0.0.1:1")
    assert_refused(done, "RANK", "65536", "0 to 65535")


@pytest.mark.parametrize(
    "arguments", ["", "drain", "drain first", "launch", "launch --", "config -- true", "config --st", "conf"]
)
def test_wrong_usage(zenps: Any, arguments: str) -> None:
    done = zenps(*arguments.split())
    assert done.returncode == 2
    assert done.stderr.startswith("usage: zenps")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("launch --workers 2 python train.py", "arguments: python train.py; CMD stands after --"),
        ("plan train.py", "arguments: train.py; CMD stands after --"),
        ("launch --worker-count 2 -- true", "arguments: --worker-count 2"),
        ("status now", "arguments: now"),
    ],
)
def test_arguments_that_a_subcommand_does_not_know(zenps: Any, arguments: str, said: str) -> None:
    done = zenps(*arguments.split())
    name = arguments.split()[0]
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: zenps {name} [options]")
    assert done.stderr.endswith(f"zenps {name}: error: unrecognized {said}\n")


@pytest.mark.parametrize("seconds", ["inf", "1e300", "nan", "-1", "0", "604801", "soon"])
def test_an_impossible_timeout_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["status", "--timeout-seconds", seconds])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"--timeout-seconds: {seconds!r}: expected seconds, above 0 and up to 604800")


@pytest.mark.parametrize(
    "module", ["zenps.cli.commands", "zenps.cli.launch", "zenps.cli.status", "zenps.cli.printing"]
)
def test_starts_without_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


INTERRUPTED = """
import configparser, importlib, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "zenps.keys":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
parsed = configparser.ConfigParser()
parsed.read("setup.cfg")
module, function = parsed["options.entry_points"]["console_scripts"].partition("=")[2].strip().split(":")
sys.exit(getattr(importlib.import_module(module), function)())
"""


def test_ctrl_c_while_modules_are_imported_ends_it_without_a_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED, "config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


# ── keys ────────────────────────────────────────────────────────────────────────────────────────


def test_keygen_makes_missing_keys(zenps: Any, tmp_path: Path) -> None:
    done = zenps("keygen", "keys", "--workers", "2", "--servers", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("5 new key(s) in keys: scheduler, operator, server-0, worker-0, worker-1\n")
    assert (tmp_path / "keys" / "worker-1.secret").stat().st_mode & 0o777 == 0o600
    assert zenps("keygen", "keys", "--workers", "2").stdout.startswith("0 new key(s) in keys\n")
    assert zenps("keygen", "keys", "--workers", "3").stdout.startswith("1 new key(s) in keys: worker-2\n")


def test_keygen_that_is_told_to_end_leaves_nothing_behind(zenps: Any, tmp_path: Path) -> None:
    many = ("keygen", "keys", "--workers", "4096", "--servers", "1024")
    popen = zenps.start(*many)
    while not [*tmp_path.glob("keys/worker-*.secret")]:
        assert popen.poll() is None
    popen.send_signal(signal.SIGTERM)
    popen.communicate(timeout=60)
    assert popen.returncode == 128 + signal.SIGTERM
    assert not [*tmp_path.glob("keys/*")]


def test_keygen_refuses_a_directory_of_others(zenps: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert_refused(zenps("keygen", "."), "DIR = '.'", "chmod 700")


SECURED = ["launch", "scheduler", "server", "worker", "status"]


@pytest.mark.parametrize(
    ("subcommand", "damage"),
    [
        *((name, "open to others") for name in SECURED),
        ("launch", "missing"),
        ("launch", "malformed"),
        *(
            pytest.param(name, damage, marks=pytest.mark.long)
            for name in SECURED[1:]
            for damage in ("missing", "malformed")
        ),
    ],
)
def test_bad_secret_is_refused_in_one_line(zenps: Any, tmp_path: Path, subcommand: str, damage: str) -> None:
    generate(tmp_path / "keys", workers=1, servers=1)
    for secret in (tmp_path / "keys").glob("*.secret"):
        match damage:
            case "open to others":
                secret.chmod(0o644)
            case "missing":
                secret.unlink()
            case "malformed":
                secret.write_text("secret = 'x'")
    settings = ["security.keys=keys/keys.toml", "security.secret=keys", "cluster.scheduler=127.0.0.1:1"]
    sets = [word for setting in settings for word in ("--set", setting)]
    command = ["--", "true"] if subcommand in ("launch", "worker") else []
    done = zenps(subcommand, *sets, *command, env={"RANK": "0"})
    why = {"open to others": "chmod 600", "missing": "No such file", "malformed": "of 40 characters"}
    assert_refused(done, "security.secret = 'keys/", why[damage])


# ── config ──────────────────────────────────────────────────────────────────────────────────────


def test_config_shows_values_and_sources(zenps: Any, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[sync]\nchunk_bytes = '1MiB'\ncodec = 'coo'\n")
    environment = {"ZENPS_SYNC_CODEC": "bitmap", "ZENPS_METRICS_PORT": "9100"}
    done = zenps("config", "--config", "my.toml", "--set", "metrics.port=9200", env=environment)
    assert done.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if "." in line}
    assert rows["sync.chunk_bytes"] == ['"1MiB"', "my.toml"]
    assert rows["sync.codec"] == ['"bitmap"', "ZENPS_SYNC_CODEC"]
    assert rows["metrics.port"] == ["9200", "--set"]
    assert rows["cluster.workers"] == ["1", "default"]


def test_config_json(zenps: Any) -> None:
    settings = json.loads(zenps("config", "--json", "--set", "sync.granule=64").stdout)
    (granule,) = (setting for setting in settings if setting["name"] == "sync.granule")
    assert granule["value"] == 64
    assert granule["source"] == "--set"
    assert "power of two" in granule["description"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [["--json"], []])
def test_reader_that_leaves_is_no_error(zenps: Any, options: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    popen = zenps.start("config", *options, stdout=writer, env={"PYTHONUNBUFFERED": unbuffered})
    os.close(writer)
    _, err = popen.communicate(timeout=60)
    assert err == ""
    assert popen.returncode == 128 + signal.SIGPIPE


def test_output_that_cannot_be_written(zenps: Any) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        popen = zenps.start("config", stdout=full)
        _, err = popen.communicate(timeout=60)
    assert popen.returncode == 1
    assert err == "zenps: [Errno 28] No space left on device\n"


def test_a_refusal_that_cannot_be_written_keeps_its_exit_code(zenps: Any) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert zenps("config", "--set", "x=1", stderr=full).returncode == 2


def test_output_that_is_closed_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m zenps.cli config >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr_takes_nothing_of_what_is_read_by_programs() -> None:
    command = f"{shlex.quote(sys.executable)} -m zenps.cli config --json --set log.level=warning 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)
    launch = f"{shlex.quote(sys.executable)} -m zenps.cli launch --workers 1 --servers 1 -- true 2>&-"
    assert subprocess.run(["sh", "-c", launch], timeout=60, check=False).returncode == 0


def test_a_path_that_is_not_utf_8_is_shown_with_replacements(zenps: Any, tmp_path: Path) -> None:
    file = Path(os.fsdecode(b"x\xff.toml"))
    (tmp_path / file).write_text("[sync]\ngranule = 64\n")
    done = zenps("config", "--json", "--config", file)
    assert done.returncode == 0, done.stderr
    sources = {row["name"]: row["source"] for row in json.loads(done.stdout)}
    assert sources["sync.granule"] == "x\N{REPLACEMENT CHARACTER}.toml"


def test_an_encoding_that_lacks_a_character(zenps: Any) -> None:
    setting = ("config", "--set", "cluster.job=γ→")
    done = zenps(*setting, env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stderr
    assert '"??"' in done.stdout


# ── worker ──────────────────────────────────────────────────────────────────────────────────────


def test_worker_passes_settings_on(zenps: Any, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[sync]\ngranule = 64\ncodec = 'coo'\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    show = f"cd {elsewhere} && {shlex.join([sys.executable, '-c', SHOW])}"
    options = ["--config", "my.toml", "--set", "sync.codec=bitmap", "--set", "sync.chunk_bytes=1MiB"]
    environment = {"ZENPS_SYNC_CODEC": "coo", "ZENPS_LOG_LEVEL": "debug"}
    done = zenps("worker", *options, "--", "sh", "-c", show, env=environment)
    assert done.returncode == 0, done.stderr
    found = {name: (value, source) for name, value, source, _ in json.loads(done.stdout)}
    assert found["sync.codec"] == ("bitmap", "ZENPS_SYNC_CODEC")
    assert found["sync.chunk_bytes"] == (1 << 20, "ZENPS_SYNC_CHUNK_BYTES")
    assert found["sync.granule"] == (64, str(tmp_path / "my.toml"))
    assert found["log.level"] == ("debug", "ZENPS_LOG_LEVEL")
    assert found["sync.seed"][1] == "default"


def test_worker_s_command_may_be_ended_by_a_pipe_that_nobody_reads(zenps: Any) -> None:
    """Python ignores the signal that tells of it, and a command inherits what is ignored."""
    done = zenps("worker", "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_worker_ends_as_its_command(zenps: Any) -> None:
    assert zenps("worker", "--", "sh", "-c", "exit 7").returncode == 7


def test_worker_that_cannot_be_started(zenps: Any, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("exit 0\n")
    script.chmod(0o755)
    done = zenps("worker", "--", str(script))
    assert done.returncode == 126
    assert done.stderr == f"zenps: {script} cannot be started: Exec format error\n"


def test_one_of_several_workers_needs_a_scheduler(zenps: Any) -> None:
    done = zenps("worker", "--", "true", env={"WORLD_SIZE": "2"})
    assert_refused(done, "cluster.scheduler", "WORLD_SIZE=2")


# ── scheduler and server ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_scheduler_ends_on_a_signal(zenps: Any, number: signal.Signals, code: int) -> None:
    reader, writer = os.pipe()
    popen = zenps.start("scheduler", "--print-address", str(writer), pass_fds=(writer,))
    os.close(writer)
    with open(reader, encoding="ascii") as stream:
        host, _, port = stream.read().strip().rpartition(":")
    with socket.create_connection((host, int(port)), 5):
        popen.send_signal(number)
        _, err = popen.communicate(timeout=30)
    assert popen.returncode == code
    assert "Traceback" not in err


def test_scheduler_goes_on_under_nohup_and_says_what_ends_it(zenps: Any) -> None:
    popen = zenps.start("scheduler", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    line = popen.stderr.readline()
    assert (
        "SIGHUP is ignored, as under nohup: this process ends with its job, or by SIGTERM or SIGINT" in line
    )
    popen.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        popen.wait(0.3)
    popen.terminate()
    popen.communicate(timeout=30)
    assert popen.returncode == 143


def test_a_scheduler_without_an_address_says_who_can_join(zenps: Any) -> None:
    popen = zenps.start("scheduler")
    line = popen.stderr.readline()
    assert "warning scheduler: cluster.scheduler is not set: on loopback, only this machine can join" in line
    popen.terminate()
    popen.communicate(timeout=30)


def test_server_ends_on_sigterm(zenps: Any, scheduler: str) -> None:
    popen = zenps.start("server", "--set", f"cluster.scheduler={scheduler}")
    status = ("status", "--json", "--set", f"cluster.scheduler={scheduler}")
    until = time.monotonic() + 30
    while len(json.loads(zenps(*status).stdout)["nodes"]) < 2:
        assert time.monotonic() < until
    popen.terminate()
    _, err = popen.communicate(timeout=30)
    assert popen.returncode == 143
    assert "Traceback" not in err


def test_failed_job_is_one_line_and_exit_code_1(zenps: Any) -> None:
    done = zenps("scheduler", "--set", "cluster.rendezvous_seconds=0.2", "--set", "log.level=error")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "error scheduler: rendezvous: missing" in done.stderr


def test_taken_port_is_refused(zenps: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = zenps("scheduler", "--set", f"cluster.scheduler={address}")
        assert_refused(done, f"cluster.scheduler = '{address}'")


@pytest.mark.parametrize("descriptor", ["77", str(1 << 32)])
def test_descriptor_that_is_not_open_is_refused(zenps: Any, descriptor: str) -> None:
    done = zenps("scheduler", "--print-address", descriptor)
    assert_refused(done, "--print-address", descriptor)


def test_trace_merges_parts(zenps: Any, tmp_path: Path) -> None:
    for role in ("scheduler", "server"):
        part = open_trace(str(tmp_path / "trace.json"), role)
        part.epoch(1, 1, 1)
        part.close()
    parts = [str(path) for path in tmp_path.glob("trace.*.*.json")]
    done = zenps("trace", "trace.json", *parts)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 process(es)" in done.stdout
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 2


def test_trace_refuses_files_that_are_no_timeline(zenps: Any, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("one\ntwo\n")
    assert_refused(zenps("trace", "trace.json", "notes"), "PART", "notes")
    assert_refused(zenps("trace", "trace.json", "missing"), "PART", "missing")
    assert_refused(zenps("trace", "missing/trace.json", "notes"), "PART", "notes")


def test_a_role_that_logs_json_is_refused_in_json(zenps: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = zenps("scheduler", "--set", "log.format=json", "--set", f"cluster.scheduler={address}")
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["level"], line["role"], line["rank"]) == (2, "error", "scheduler", None)
    assert "Address already in use" in line["message"]
