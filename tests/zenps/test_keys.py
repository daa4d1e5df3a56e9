"""Key files: how they are made, and which of them are refused."""

from __future__ import annotations

import os
import re
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from zenps import keys as key_files
from zenps.config.settings import SecurityConfig
from zenps.errors import ConfigError
from zenps.keys import LIST_NAME, Keys, Player, generate, load_keys, read_owners


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Keys of two workers and a server."""
    generate(tmp_path / "keys", workers=2, servers=1)
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def load(directory: Path, role: Player, rank: int | None = None, secret: str = "") -> Keys:
    security = SecurityConfig(keys=str(directory / LIST_NAME), secret=str(directory / secret))
    keys = load_keys(security, role, rank)
    assert keys is not None
    return keys


def refused(directory: Path, *arguments: str | int | None, secret: str = "worker-0.secret") -> str:
    """The one line with which a worker's keys are refused."""
    with pytest.raises(ConfigError) as caught:
        load(directory, "worker", secret=secret, *arguments)  # type: ignore[arg-type,misc]  # noqa: B026
    text = str(caught.value)
    assert "\n" not in text
    return text


# ── keygen ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_right_after_a_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = key_files._create

    def create_and_interrupt(path: Path, text: str) -> Path:
        made = create(path, text)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # another thread would not hold it back
        return made

    monkeypatch.setattr(key_files, "_create", create_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "keys", workers=1, servers=1)
    assert not [*tmp_path.glob("keys/*")]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_right_after_the_list_is_written_leaves_all_that_it_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def replace_and_interrupt(path: Path, target: Path) -> Path:
        replaced = replace(path, target)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return replaced

    monkeypatch.setattr(Path, "replace", replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "keys", workers=1, servers=1)
    assert load(tmp_path / "keys", "worker", 0).name == "worker-0"
    assert generate(tmp_path / "keys", workers=1, servers=1) == []


def test_a_secret_that_does_not_fit_on_the_disk_is_not_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            generate(tmp_path / "keys", workers=1, servers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.glob("keys/*")]
    assert len(generate(tmp_path / "keys", workers=1, servers=1)) == 4


@pytest.mark.usefixtures("umask")
def test_files_are_their_owner_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    generate(tmp_path / "keys", workers=1, servers=1)
    assert mode(tmp_path / "keys") == 0o700
    files = list((tmp_path / "keys").iterdir())
    assert len(files) == 5
    assert {mode(file) for file in files} == {0o600}


def test_every_node_has_a_pair_of_its_own(directory: Path) -> None:
    names = ["scheduler", "operator", "server-0", "worker-0", "worker-1"]
    owners = read_owners(directory / LIST_NAME)
    assert list(owners.values()) == names
    assert {file.name for file in directory.iterdir()} == {LIST_NAME, *(f"{name}.secret" for name in names)}
    for public, name in owners.items():
        keys = load(directory, "operator", secret=f"{name}.secret")
        assert (keys.name, keys.public, keys.public_of(name)) == (name, public, public)
        assert zmq.curve_public(keys.secret) == public


def test_nothing_is_overwritten_and_what_lacks_is_added(directory: Path) -> None:
    before = {file: file.read_text() for file in directory.iterdir()}
    assert generate(directory, workers=2, servers=1) == []
    assert {file: file.read_text() for file in directory.iterdir()} == before
    assert generate(directory, workers=3, servers=1) == ["worker-2"]
    after = {file: file.read_text() for file in directory.iterdir()}
    assert after[directory / LIST_NAME].startswith(before.pop(directory / LIST_NAME))
    assert {file: after[file] for file in before} == before
    assert load(directory, "worker", 2).name == "worker-2"
    assert mode(directory / LIST_NAME) == 0o600


def test_a_list_that_was_edited_may_lack_its_last_line_end(directory: Path) -> None:
    file = directory / LIST_NAME
    file.write_text(file.read_text().rstrip("\n"))
    assert generate(directory, workers=3, servers=1) == ["worker-2"]
    assert [load(directory, "worker", rank).name for rank in (1, 2)] == ["worker-1", "worker-2"]


def test_secret_of_a_revoked_node_is_not_overwritten(directory: Path) -> None:
    revoke(directory, "worker-1")
    before = {file: file.read_text() for file in directory.iterdir()}
    with pytest.raises(ConfigError, match=r"DIR = .*worker-1\.secret\); nothing is overwritten"):
        generate(directory, workers=4, servers=3)
    assert {file: file.read_text() for file in directory.iterdir()} == before  # nor anything half made
    (directory / "worker-1.secret").unlink()
    assert generate(directory, workers=2, servers=1) == ["worker-1"]


def test_directory_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="closed to others, not mode 0755: chmod 700"):
        generate(tmp_path, workers=1, servers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write into such a directory")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory, link = tmp_path / "keys", tmp_path / "link"
    directory.mkdir(mode=0o700)
    os.chown(directory, 1234, 1234)
    link.symlink_to(directory)
    for given in (directory, link):
        with pytest.raises(ConfigError, match=r"of the user 0, who writes .* not of the user 1234$"):
            generate(given, workers=1, servers=1)
    assert list(directory.iterdir()) == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """It was advised to change the file's mode."""
    (tmp_path / "keys").write_text("")
    with pytest.raises(ConfigError, match=r"DIR = '.*/keys': expected a directory, not another file$"):
        generate(tmp_path / "keys", workers=1, servers=1)


def test_link_in_the_place_of_a_secret_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / "scheduler.secret").symlink_to(target)
    with pytest.raises(ConfigError, match="File exists"):
        generate(tmp_path / "keys", workers=1, servers=1)
    assert not target.exists()


def test_without_curve_keys_are_refused_with_the_reason(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    before = {*directory.iterdir()}
    with pytest.raises(ConfigError, match="libzmq was built without CURVE"):
        generate(directory, workers=3, servers=1)
    assert {*directory.iterdir()} == before
    assert "libzmq was built without CURVE" in refused(directory)


# ── loading ─────────────────────────────────────────────────────────────────────────────────────


def revoke(directory: Path, name: str) -> None:
    file = directory / LIST_NAME
    lines = [line for line in file.read_text().splitlines() if not line.startswith(name)]
    file.write_text("\n".join(lines))


def test_no_keys() -> None:
    assert load_keys(SecurityConfig(), "worker", 0) is None


@pytest.mark.parametrize("given", ["keys", "secret"])
def test_half_of_the_settings_is_refused(given: str) -> None:
    missing = {"keys": "secret", "secret": "keys"}[given]
    with pytest.raises(ConfigError, match=rf"^security\.{missing} = '': .*because security\.{given} is set"):
        load_keys(SecurityConfig(**{given: "x"}), "worker", 0)


def test_directory_has_each_node_s_secret(directory: Path) -> None:
    assert load(directory, "scheduler").name == "scheduler"
    assert load(directory, "server", 0).name == "server-0"
    assert load(directory, "worker", 1).name == "worker-1"
    assert load(directory, "operator").name == "operator"
    assert "or set RANK" in refused(directory, secret="")


def test_file_is_enough_without_a_rank(directory: Path) -> None:
    assert load(directory, "worker", secret="worker-1.secret").name == "worker-1"


def test_other_roles_and_ranks_are_refused(directory: Path) -> None:
    assert "the key of worker-1; it is worker-0's" in refused(directory, 1)
    assert "the key of worker; it is server-0's" in refused(directory, secret="server-0.secret")
    with pytest.raises(ConfigError, match="the key of scheduler; it is operator's"):
        load(directory, "scheduler", secret="operator.secret")
    assert load(directory, "operator", secret="worker-1.secret").name == "worker-1"  # status, by any node


@pytest.mark.parametrize("bits", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001], ids=oct)
def test_secret_that_is_open_to_others_is_refused(directory: Path, bits: int) -> None:
    (directory / "worker-0.secret").chmod(0o600 | bits)
    assert f"mode {0o600 | bits:04o}: chmod 600" in refused(directory)


@pytest.mark.parametrize("bits", [0o020, 0o002], ids=oct)
def test_list_that_others_can_write_to_is_refused(directory: Path, bits: int) -> None:
    (directory / LIST_NAME).chmod(0o600 | bits)
    assert f"mode {0o600 | bits:04o}: chmod go-w" in refused(directory)


def test_list_may_be_read_by_others(directory: Path) -> None:
    (directory / LIST_NAME).chmod(0o644)
    assert load(directory, "worker", 0).name == "worker-0"


@pytest.mark.parametrize("name", [LIST_NAME, "worker-0.secret"])
def test_missing_file_is_refused(directory: Path, name: str) -> None:
    (directory / name).unlink()
    assert f"{name}': expected a readable file (No such file or directory)" in refused(directory)


def test_revoked_key_is_refused(directory: Path) -> None:
    revoke(directory, "worker-0")
    assert "is it revoked?" in refused(directory)


GOOD = "k" * 40
MALFORMED = {
    "no TOML": ("worker-0 =", "TOML as zenps keygen writes it"),
    "nested too deep": ("a=" + "[" * 9999, "TOML as zenps keygen writes it"),
    "a rank that is too large": (f'server-65536 = "{GOOD}"', "not 'server-65536'"),
    "no UTF-8": (b"\xff\xfe", "TOML as zenps keygen writes it"),
    "unknown name": (f'boss = "{GOOD}"', "not 'boss'"),
    "rank with a zero": (f'worker-01 = "{GOOD}"', "not 'worker-01'"),
    "short key": ('worker-0 = "abc"', "a key of 40 characters (Z85) for worker-0"),
    "no Z85": (f'worker-0 = "{"é" * 40}"', "a key of 40 characters (Z85) for worker-0"),
    "backslashes": (f"worker-0 = '{chr(92) * 40}'", "a key of 40 characters (Z85) for worker-0"),
    "too large for Z85": (f'worker-0 = "{"#" * 40}"', "a key of 40 characters (Z85) for worker-0"),
    "no text": ("worker-0 = 5", "a key of 40 characters (Z85) for worker-0"),
    "one key for two": (
        f'worker-0 = "{GOOD}"\nworker-1 = "{GOOD}"',
        "for worker-1, not that of worker-0",
    ),
    "one name twice": (f'worker-0 = "{GOOD}"\nworker-0 = "{GOOD}"', "TOML as zenps keygen writes it"),
}


@pytest.mark.parametrize(("content", "why"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_list_is_refused(directory: Path, content: str | bytes, why: str) -> None:
    (directory / LIST_NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert why in refused(directory)


@pytest.mark.parametrize("content", ["", 'secret = "abc"', "secret = 1", f'secret = "{GOOD}"\nx = 1', "junk"])
def test_malformed_secret_is_refused_and_not_shown(directory: Path, content: str) -> None:
    (directory / "worker-0.secret").write_text(content)
    text = refused(directory)
    assert "security.secret" in text
    assert re.search("expected (one line|TOML as zenps keygen writes it)", text)
    assert GOOD not in text


def test_secret_is_in_no_representation(directory: Path) -> None:
    keys = load(directory, "worker", 0)
    assert keys.secret.decode() not in f"{keys!r} {keys}"


def test_key_that_is_not_listed(directory: Path) -> None:
    expected = "a list that has the public key of server-9: copy it to this machine before server-9 joins"
    with pytest.raises(ConfigError, match=expected):
        load(directory, "worker", 0).public_of("server-9")


# ── a list that changes ─────────────────────────────────────────────────────────────────────────


def test_key_of_a_peer_is_that_of_the_list_as_it_is_now(directory: Path) -> None:
    keys, file = load(directory, "worker", 0), directory / LIST_NAME
    generate(directory, workers=2, servers=2)
    first = keys.public_of("server-1")
    assert first == load(directory, "server", 1).public
    lines = [line for line in file.read_text().splitlines() if not line.startswith("server-1 ")]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="a list that has the public key of server-1"):
        keys.public_of("server-1")
    (directory / "server-1.secret").unlink()
    generate(directory, workers=2, servers=2)
    assert keys.public_of("server-1") == load(directory, "server", 1).public != first


def test_list_that_cannot_be_read_leaves_the_keys_as_they_were(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, file = load(directory, "worker", 0), directory / LIST_NAME
    public, text = keys.public_of("server-0"), file.read_text()
    file.write_text("server-")
    for _ in range(2):
        assert keys.public_of("server-0") == public
    (line,) = caplog.messages
    assert line.startswith(f"the keys stay as they were: security.keys = '{file}'")
    file.write_text(text.replace("server-0", "server-7"))
    assert keys.public_of("server-7") == public


@pytest.mark.parametrize(
    "kept",
    ["", "# The public keys of one job\n", f'worker-0 = "{"k" * 40}"\n'],
    ids=["nothing", "a comment", "a worker"],
)
def test_list_that_is_being_replaced_in_place_revokes_nobody(
    directory: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys, file = load(directory, "worker", 0), directory / LIST_NAME
    owners, text = keys.listed.owners, file.read_text()
    file.write_text(kept)
    keys.listed.read_again()
    assert keys.listed.owners == owners
    (line,) = caplog.messages
    assert "expected a whole list, with a key of the scheduler" in line
    file.write_text(text.replace("server-0", "server-7"))
    keys.listed.read_again()
    assert "server-7" in keys.listed.owners.values()


def test_key_of_the_scheduler_is_rotated_as_any_other(directory: Path) -> None:
    revoke(directory, "scheduler")
    (directory / "scheduler.secret").unlink()
    assert generate(directory, workers=2, servers=1) == ["scheduler"]
    assert load(directory, "worker", 0).public_of("scheduler") == load(directory, "scheduler").public


def test_list_is_read_only_when_its_file_has_changed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks a key up for each server of a new view."""
    reads = []

    def counted(file: Path) -> dict[bytes, str]:
        reads.append(file)
        return read_owners(file)

    keys = load(directory, "worker", 0)
    monkeypatch.setattr(key_files, "read_owners", counted)
    for _ in range(3):
        keys.public_of("server-0")
    assert len(reads) == 1, "at the first look-up: the file may have changed while it was read before"
