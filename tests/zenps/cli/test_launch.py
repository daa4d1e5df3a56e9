"""Local launcher: whole clusters on this machine, their ends, signals and output."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import LEASE_SECONDS
from tests.waiting import eventually
from tests.zenps.conftest import PATIENT_SECONDS, PATIENT_ZENPS
from zenps.cli.supervisor import GRACE_SECONDS, MAX_SCHEDULER_DEATHS
from zenps.keys import generate

PYTHON = [sys.executable, "-S", "-c"]
KEYS = ("--set", "security.keys=keys/keys.toml", "--set", "security.secret=keys")
SLEEP = [*PYTHON, "import time; time.sleep(600)"]


@pytest.fixture
def sleepers(zenps: Any) -> Iterator[subprocess.Popen[str]]:
    """A cluster of two servers and two workers with a child each, beside an unrelated process."""
    script = "echo started; sleep 601 & exec sleep 600"
    bystander = subprocess.Popen(["sleep", "600"], env=os.environ)
    popen = zenps.start("launch", "--workers", "2", "--servers", "2", "--", "sh", "-c", script)
    for _ in range(2):
        assert "started" in popen.stdout.readline()
    yield popen
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def assert_nothing_is_left(zenps: Any) -> None:
    assert zenps.processes() == {}


# ── the end of the workers ──────────────────────────────────────────────────────────────────────


def test_success(zenps: Any) -> None:
    begin = time.monotonic()
    done = zenps("launch", "--workers", "2", "--", *PYTHON, "print('done')", program=PATIENT_ZENPS)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["worker 0  | done", "worker 1  | done"]
    assert "does CMD call zenps.init()?" in done.stderr
    assert "sending" not in done.stderr
    assert time.monotonic() - begin < PATIENT_SECONDS + 15
    assert_nothing_is_left(zenps)


def test_joined_cluster_ends_by_itself(zenps: Any) -> None:
    """Infinities are summed without a warning."""
    script = (
        "import torch, zenps as zps; zps.init(); values = torch.tensor([float('inf'), 3e38]);"
        "values[0] *= 1 - 2 * zps.rank(); total = zps.push_pull(values, 'a', average=False).tolist();"
        "print(zps.rank(), zps.size(), total); zps.shutdown()"
    )
    command = (sys.executable, "-c", script)
    done = zenps("launch", "--workers", "2", "--servers", "2", "--", *command, program=PATIENT_ZENPS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"worker {r}  | {r} 2 [nan, inf]" for r in range(2)]
    assert "Warning" not in done.stderr
    assert re.search(r"scheduler e\d+( s\d+)?: stopped", done.stderr)
    assert "launch    | zenps status --set cluster.scheduler=" in done.stderr
    assert done.stderr.count("launch ") == 1  # its only line
    assert_nothing_is_left(zenps)


@pytest.mark.long
def test_secured_cluster_ends_by_itself(zenps: Any, tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=2, servers=1)
    script = (
        "import os, subprocess, sys, zenps as zps; zps.init(); zps.barrier()\n"
        "status = [sys.executable, '-m', 'zenps.cli', 'status']\n"
        "show = zps.rank() == 0 and subprocess.run(status, capture_output=True, text=True).stdout\n"
        "if show: print(show.split()[2])\n"
        "zps.barrier(); zps.shutdown()"
    )
    done = zenps("launch", "--workers", "2", "--servers", "1", *KEYS, "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["worker 0  | running"]
    assert "refused" not in done.stderr


def test_secured_workers_that_never_join_are_noticed(zenps: Any, tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=1, servers=1)
    done = zenps("launch", "--workers", "1", *KEYS, "--", "true")
    assert done.returncode == 0
    assert "does CMD call zenps.init()?" in done.stderr


def test_exit_code_of_the_first_failure_is_passed_on(zenps: Any) -> None:
    script = "import os, sys, time; time.sleep(600 * (os.environ['RANK'] == '0')); sys.exit(7)"
    done = zenps("launch", "--workers", "2", "--", *PYTHON, script)
    assert done.returncode == 7
    assert "launch    | worker 1 failed: exit code 7; ending the others" in done.stderr
    assert done.stderr.count("failed") == 1
    assert_nothing_is_left(zenps)


def test_an_elastic_job_continues_only_once_all_have_joined(zenps: Any) -> None:
    script = "import os, sys, time; time.sleep(600 * (os.environ['RANK'] == '0')); sys.exit(7)"
    elastic = ("--set", "cluster.on_worker_loss=continue")
    done = zenps("launch", "--workers", "2", *elastic, "--", *PYTHON, script)
    assert done.returncode == 7
    assert "launch    | worker 1 failed: exit code 7; ending the others" in done.stderr
    assert_nothing_is_left(zenps)


def test_worker_killed_by_a_signal(zenps: Any) -> None:
    done = zenps("launch", "--workers", "1", "--", *PYTHON, "import os; os.kill(os.getpid(), 11)")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "worker 0 failed: killed by signal 11" in done.stderr
    assert_nothing_is_left(zenps)


def test_what_a_worker_leaves_behind_ends_with_it(zenps: Any) -> None:
    done = zenps("launch", "--", "sh", "-c", "sleep 600 & exit 0")
    assert done.returncode == 0
    assert_nothing_is_left(zenps)


def test_program_that_cannot_be_started(zenps: Any, tmp_path: Any) -> None:
    script = tmp_path / os.fsdecode(b"tr\xe4in")  # not UTF-8
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = zenps("launch", "--", str(script), errors="surrogateescape")
    assert done.returncode == 126
    assert f"worker 0 cannot be started: {script}: No such file or directory\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_is_left(zenps)


def test_scheduler_that_fails_at_once(zenps: Any) -> None:
    done = zenps("launch", "--set", "metrics.host=192.0.2.1", "--", *SLEEP)
    assert done.returncode == 2
    assert "scheduler | zenps: metrics.host" in done.stderr
    assert "scheduler failed: exit code 2" in done.stderr
    assert_nothing_is_left(zenps)


# ── crashes and signals ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("server", r".* zenps\.cli server"),
        pytest.param("worker", "sleep 600", marks=pytest.mark.long),
    ],
)
def test_crash_of_a_role_ends_all_before_the_cluster_is_complete(
    zenps: Any, sleepers: Any, role: str, line: str
) -> None:
    victims = [pid for pid, command in zenps.processes().items() if re.match(line, command)]
    os.kill(victims[0], signal.SIGKILL)
    _, err = sleepers.communicate(timeout=60)
    assert sleepers.returncode == 128 + signal.SIGKILL
    assert re.search(rf"launch    \| {role}( \d)? failed: killed by signal 9 \(Killed\)", err)
    assert err.count("failed") == 1
    assert_nothing_is_left(zenps)


TRAIN = """
import itertools, os, sys, time, torch, zenps
zenps.init()
print("started", flush=True)
steps_after = 0
for step in itertools.count():
    total = zenps.push_pull(torch.full((50_000,), 1.0), "x", average=False)
    assert torch.equal(total, torch.full((50_000,), 2.0)), step
    if step % 20 == 0:
        zenps.barrier()
    crashed = torch.tensor([int(os.path.exists(sys.argv[1]))])
    steps_after += bool(zenps.push_pull(crashed, "crashed", average=False))  # the same on all ranks
    if steps_after == 20:
        break
    time.sleep(0.05)
zenps.shutdown()
"""


SAYS = {
    "server": r"server \d ended: killed by signal 9 \(Killed\); server \d will take its slots",
    "scheduler": r"scheduler ended: killed by signal 9 \(Killed\); starting it again",
}


@pytest.mark.long
@pytest.mark.parametrize("roles", [["server"], ["scheduler"], ["scheduler", "server"]], ids=" and ".join)
def test_training_continues_after_crashes(zenps: Any, tmp_path: Path, roles: list[str]) -> None:
    crashed = tmp_path / "crashed"
    counts = ("--workers", "2", "--servers", "2", "--set", f"cluster.lease_seconds={LEASE_SECONDS}")
    popen = zenps.start("launch", *counts, "--", sys.executable, "-c", TRAIN, str(crashed))
    for _ in range(2):
        assert "started" in popen.stdout.readline()
    for role in roles:
        victims = [pid for pid, command in zenps.processes().items() if f"zenps.cli {role}" in command]
        os.kill(victims[0], signal.SIGKILL)
    crashed.touch()
    _, err = popen.communicate(timeout=60)
    assert popen.returncode == 0, err
    for role in roles:
        assert re.search(rf"launch    \| {SAYS[role]}", err)
    assert "Traceback" not in err
    assert_nothing_is_left(zenps)


ALONE = """
import os, sys, time, torch, zenps
way, code, may_end = sys.argv[1:]
zenps.init()
print("started", os.getpid(), flush=True)
steps_alone = 0
while steps_alone < 3 or not os.path.exists(may_end):
    total = zenps.push_pull(torch.full((50_000,), 1.0), "x", average=False)
    steps_alone += total[0] == 1
    if zenps.rank() == 1 and way == "raise":
        raise RuntimeError("the user's own")
    time.sleep(0.05)
sys.exit(int(code))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "how", "code"),
    [("kill", r"killed by signal 9 \(Killed\)", 0), ("raise", "exit code 1", 0), ("kill", "", 7)],
)
def test_training_continues_without_a_worker(
    zenps: Any, tmp_path: Path, way: str, how: str, code: int
) -> None:
    sets = ("--set", f"cluster.lease_seconds={LEASE_SECONDS}", "--set", "cluster.on_worker_loss=continue")
    # After an exception an interpreter may take longer to end than a few steps alone do.
    may_end = tmp_path / "may-end"
    train = (sys.executable, "-c", ALONE, way, str(code), str(may_end))
    popen = zenps.start("launch", "--workers", "2", *sets, "--", *train, program=PATIENT_ZENPS)
    pids = dict(re.findall(r"worker (\d).*started (\d+)", popen.stdout.readline() + popen.stdout.readline()))
    if way == "kill":
        os.kill(int(pids["1"]), signal.SIGKILL)
    said = next((line for line in popen.stderr if "the others continue" in line), "nothing of it")
    assert re.search(rf"launch    \| worker 1 ended: {how}.*; the others continue without it", said)
    may_end.touch()
    err = popen.stderr.read()
    assert popen.wait(timeout=60) == code, err
    assert ("launch    | worker 0 failed: exit code 7; ending the others" in err) == (code == 7)
    assert "sending" not in err
    assert_nothing_is_left(zenps)


@pytest.mark.long
def test_a_server_that_has_replaced_a_stopped_one_stays(zenps: Any, tmp_path: Path) -> None:
    counts = ("--workers", "1", "--servers", "2", "--set", f"cluster.lease_seconds={LEASE_SECONDS}")
    script = (
        "import os, time, zenps as zps; zps.init(); zps.barrier(); print('started', flush=True)\n"
        "while not os.path.exists('stop'): time.sleep(0.05)\n"
        "zps.shutdown()"
    )
    popen = zenps.start("launch", *counts, "--", sys.executable, "-c", script)
    assert "started" in popen.stdout.readline()

    def servers() -> list[tuple[str, int]]:
        status = json.loads(zenps("status", "--json").stdout)
        return [(node["state"], node["pid"]) for node in status["nodes"] if node["role"] == "server"]

    (_, kept), (_, stopped) = servers()
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: ("present", stopped) not in servers())
    address = json.loads(zenps("status", "--json").stdout)["nodes"][0]["address"]
    zenps.start("server", "--set", f"cluster.scheduler={address}")
    eventually(lambda: [state for state, _ in servers()] == ["present", "present"])
    os.kill(stopped, signal.SIGKILL)
    said = next((line for line in popen.stderr if "killed by signal 9" in line), "nothing of it")
    assert "launch    | server 1 ended" in said
    assert [state for state, _ in servers()] == ["present", "present"]
    assert servers()[0][1] == kept
    (tmp_path / "stop").touch()
    popen.communicate(timeout=60)
    assert popen.returncode == 0


@pytest.mark.long
def test_training_that_went_well_ends_well_without_the_operator_s_key(zenps: Any, tmp_path: Path) -> None:
    """The key was revoked meanwhile."""
    generate(tmp_path / "keys", workers=1, servers=1)
    script = (
        "import pathlib, zenps as zps; zps.init(); keys = pathlib.Path('keys/keys.toml')\n"
        "lines = [line for line in keys.read_text().splitlines() if not line.startswith('operator')]\n"
        "keys.write_text('\\n'.join(lines)); zps.shutdown()"
    )
    done = zenps("launch", "--workers", "1", *KEYS, "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "launch    | the scheduler cannot be asked: " in done.stderr


def test_a_scheduler_that_is_killed_again_and_again_ends_all(zenps: Any, sleepers: Any) -> None:
    for _ in range(MAX_SCHEDULER_DEATHS + 1):
        os.kill(zenps.pid_of("zenps.cli scheduler"), signal.SIGKILL)
        time.sleep(0.5)
    _, err = sleepers.communicate(timeout=60)
    assert sleepers.returncode == 128 + signal.SIGKILL
    assert err.count("starting it again") == MAX_SCHEDULER_DEATHS
    assert_nothing_is_left(zenps)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM, signal.SIGHUP]
)
def test_signal_ends_all(zenps: Any, sleepers: Any, number: signal.Signals) -> None:
    sleepers.send_signal(number)
    out, err = sleepers.communicate(timeout=60)
    assert sleepers.returncode == 128 + number
    assert "Traceback" not in out + err
    assert "failed" not in err
    assert_nothing_is_left(zenps)


@pytest.mark.parametrize(
    ("ignored", "others"),
    [([signal.SIGHUP], "SIGTERM or SIGINT"), ([signal.SIGHUP, signal.SIGINT], "SIGTERM")],
    ids=["nohup", "nohup in the background of a script"],
)
def test_signals_that_are_ignored_stay_so(zenps: Any, ignored: list[signal.Signals], others: str) -> None:
    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    script = "import time; print('up', flush=True); time.sleep(600)"
    popen = zenps.start("launch", "--", *PYTHON, script, preexec_fn=ignore)
    assert "up" in popen.stdout.readline()
    for pid in (popen.pid, zenps.pid_of("zenps.cli scheduler"), zenps.pid_of("zenps.cli server")):
        for number in ignored:
            os.kill(pid, number)
    with pytest.raises(subprocess.TimeoutExpired):
        popen.wait(0.5)
    popen.terminate()
    _, err = popen.communicate(timeout=60)
    assert popen.returncode == 143
    how = f"the job goes on; {others} to launch ends it"
    assert f"launch    | SIGHUP is ignored, as under nohup: {how}\n" in err
    assert_nothing_is_left(zenps)


def test_signal_while_starting(zenps: Any) -> None:
    popen = zenps.start("launch", "--", *SLEEP)
    zenps.pid_of("zenps.cli scheduler")
    popen.send_signal(signal.SIGINT)
    popen.communicate(timeout=60)
    assert popen.returncode == 130
    assert_nothing_is_left(zenps)


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("told"))
print("up")
while True:
    signal.pause()
"""


def test_stubborn_process_is_killed(zenps: Any) -> None:
    popen = zenps.start("launch", "--", *PYTHON, STUBBORN)
    assert "up" in popen.stdout.readline()
    popen.send_signal(signal.SIGTERM)
    _, err = popen.communicate(timeout=60)
    assert popen.returncode == 143
    assert "worker 0: not ended after 4 s; sending SIGKILL" in err
    assert_nothing_is_left(zenps)


def test_second_signal_kills_at_once(zenps: Any) -> None:
    popen = zenps.start("launch", "--", *PYTHON, STUBBORN)
    assert "up" in popen.stdout.readline()
    popen.send_signal(signal.SIGINT)
    assert "told" in popen.stdout.readline(), "else two signals may become one"
    assert popen.poll() is None
    popen.send_signal(signal.SIGINT)
    _, err = popen.communicate(timeout=60)
    assert "not ended after" not in err, "it waited for the end of the grace"
    assert popen.returncode == 130
    assert_nothing_is_left(zenps)


SAVING = """
import pathlib, signal, sys, time
def save(number, frame):
    print("saving", flush=True)
    time.sleep(1.0)
    pathlib.Path(sys.argv[1]).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        pytest.param([signal.SIGTERM], marks=pytest.mark.long),
        [
            signal.SIGHUP,
            signal.SIGHUP,
        ],  # the shell of a terminal that is closed sends it, and the kernel does
    ],
)
def test_a_worker_within_a_shell_may_save_its_state(
    zenps: Any, tmp_path: Path, numbers: list[signal.Signals]
) -> None:
    """The shell that waits for it ends at once."""
    saved = tmp_path / "saved"
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *PYTHON, SAVING, str(saved)]
    popen = zenps.start("launch", "--", *shell, program=PATIENT_ZENPS)
    assert "up" in popen.stdout.readline()
    popen.send_signal(numbers[0])
    assert "saving" in popen.stdout.readline()
    for number in numbers[1:]:
        popen.send_signal(number)
    _, err = popen.communicate(timeout=60)
    assert saved.exists()
    assert "not ended after" not in err
    assert popen.returncode == 128 + numbers[0]
    assert_nothing_is_left(zenps)


SHARING = """
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.resource_tracker import _resource_tracker as tracker
import os, re, signal, time
memory = SharedMemory(create=True, size=1 << 20)
ignored = 0
while not ignored & 2:  # the tracker ignores Ctrl-C once it runs
    ignored = int(re.search("SigIgn:(.*)", open(f"/proc/{tracker._pid}/status").read())[1], 16)
print(memory.name, flush=True)
"""


@pytest.mark.parametrize("end", ["os._exit(3)", "signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
def test_shared_memory_of_a_worker_that_crashes_is_unlinked(zenps: Any, end: str) -> None:
    """Python's resource tracker does so, in a process of the worker's group."""
    popen = zenps.start("launch", "--", *PYTHON, SHARING + end)
    name = popen.stdout.readline().rpartition("| ")[2].strip()
    assert name
    if end.startswith("signal"):
        popen.terminate()
    popen.communicate(timeout=60)
    assert not Path("/dev/shm", name).exists()
    assert_nothing_is_left(zenps)


def test_launch_itself_is_killed(zenps: Any, sleepers: Any) -> None:
    sleepers.kill()
    sleepers.wait(timeout=30)
    until = time.monotonic() + 20
    while zenps.processes() and time.monotonic() < until:
        time.sleep(0.02)
    assert_nothing_is_left(zenps)


def test_reader_of_the_output_leaves(zenps: Any) -> None:
    script = "while True: print('x' * 1000)"
    popen = zenps.start("launch", "--", *PYTHON, script)
    popen.stdout.readline()
    popen.stdout.close()
    popen.stdout = None
    popen.communicate(timeout=60)
    assert popen.returncode == 128 + signal.SIGPIPE
    assert_nothing_is_left(zenps)


@pytest.mark.long
def test_output_that_nobody_reads_delays_no_end(zenps: Any, tmp_path: Path) -> None:
    script = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open('up', 'w')\n"
        "while True: print('x' * 1000)"
    )
    popen = zenps.start("launch", "--", *PYTHON, script)
    eventually((tmp_path / "up").exists)
    time.sleep(1)  # now all pipes are full
    popen.send_signal(signal.SIGTERM)
    assert popen.wait(timeout=GRACE_SECONDS + 10) == 143
    assert_nothing_is_left(zenps)


def test_full_disk_ends_all(zenps: Any, tmp_path: Path) -> None:
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('told to end', file=open('told', 'w'))))\n"
        "print('x', flush=True)\n"
        "signal.pause()"
    )
    with open("/dev/full", "w", encoding="utf-8") as full:
        popen = zenps.start("launch", "--", *PYTHON, script, stdout=full)
        _, err = popen.communicate(timeout=60)
    assert popen.returncode == 1
    assert err.count("zenps: output cannot be written: No space left on device\n") == 1
    assert "Traceback" not in err
    assert (tmp_path / "told").read_text() == "told to end\n"
    assert_nothing_is_left(zenps)


# ── output ──────────────────────────────────────────────────────────────────────────────────────


def test_output_is_prefixed_by_stream_and_process(zenps: Any) -> None:
    script = (
        "import os, sys\nrank = os.environ['RANK']\n"
        "print('out', rank)\nprint('err', rank, file=sys.stderr)\n"
        "print('1%\\r2%\\r3%')\nsys.stdout.write('no end')"
    )
    done = zenps("launch", "--workers", "2", "--", *PYTHON, script)
    for rank in "01":
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"worker {rank}")]
        prefix = f"worker {rank}  | "
        assert lines == [f"{prefix}out {rank}", f"{prefix}3%", f"{prefix}no end"]
        assert f"{prefix}err {rank}\n" in done.stderr
    assert "scheduler | " in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_the_last_line_is_shown_while_a_daemon_holds_the_pipe(zenps: Any) -> None:
    script = (
        "import subprocess, sys\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "sys.stdout.write('final result: 0.5')"
    )
    done = zenps("launch", "--", *PYTHON, script)
    assert done.stdout == "worker 0  | final result: 0.5\n"
    os.kill(zenps.pid_of("sleep 600"), signal.SIGKILL)
    eventually(lambda: zenps.processes() == {})


def on_a_terminal(zenps: Any, script: str, cues: dict[bytes, Path] | None = None, **environment: str) -> str:
    """Returns what a terminal of 100 columns receives from a launch with two workers.

    Makes a file of ``cues`` once its key is received: the script waits for it.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    arguments = ("launch", "--workers", "2", "--", *PYTHON, script)
    popen = zenps.start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    received = b""
    try:
        while data := os.read(ours, 65536):
            received += data
            for cue, path in (cues or {}).items():
                if cue in received:
                    path.touch()
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert popen.wait(timeout=60) == 0
    return received.decode()


BAR = """
import os, shutil, sys, time
def await_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)
if os.environ["RANK"] == "1":
    await_file("begun")
    sys.exit(print("terminal:", sys.stdout.isatty()))
print("terminal:", sys.stdout.isatty(), shutil.get_terminal_size().columns)
for step, path in ((10, "interrupted"), (20, "continued")):
    sys.stdout.write(f"\\r\\x1b[2K{step}%")
    sys.stdout.flush()
    await_file(path)
print()
"""


def test_progress_of_rank_0_can_be_watched(zenps: Any, tmp_path: Path) -> None:
    cues = {b"10%": "begun", b"terminal: False\r\n": "interrupted", b"20%": "continued"}
    files = {cue: tmp_path / name for cue, name in cues.items()}
    received = on_a_terminal(zenps, BAR, files, COLUMNS="200")
    plain = re.sub(r"\x1b\[\d*m", "", received)
    assert "worker 0  | terminal: True 88\r\n" in plain
    assert "\r\x1b[Kworker 0  | 10%" in plain
    # A line of another process is written above the bar, which is drawn again.
    assert "\r\x1b[Kworker 1  | terminal: False\r\nworker 0  | 10%" in plain
    assert "worker 0  | 20%\r\n" in plain
    assert "\x1b[2K" not in received
    assert re.search(r"\x1b\[\d+mworker 1  \| \x1b\[0mterminal", received)


def test_no_color(zenps: Any) -> None:
    received = on_a_terminal(zenps, "print('x')", NO_COLOR="1")
    assert "worker 0  | x\r\n" in received
    assert not re.search(r"\x1b\[\d+m", received)


# ── a timeline ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_one_timeline_of_all_processes(zenps: Any, tmp_path: Path) -> None:
    script = "import torch, zenps as zps; zps.init(); zps.push_pull(torch.ones(3), 'a'); zps.shutdown()"
    done = zenps("launch", "--workers", "2", "--set", "sync.trace=t.json", "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert {"scheduler", "server 0", "worker 0", "worker 1"} <= set(names)
    assert {"push a", "aggregate a"} <= {event["name"] for event in events}
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_timeline_that_cannot_be_written_is_refused(zenps: Any) -> None:
    done = zenps("launch", "--set", "sync.trace=missing/t.json", "--", *PYTHON, "print('done')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "sync.trace = 'missing/t.json': expected a file in a directory" in done.stderr
