"""CURVE authentication with real sockets; each trap of CURVE in libzmq and pyzmq has a test."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from tests.dealer import connect_dealer
from zenps.config.settings import SecurityConfig
from zenps.errors import ConfigError, ProtocolError
from zenps.keys import LIST_NAME, Keys, Player, generate, load_keys
from zenps.observe.metrics import Refusal
from zenps.wire.connections import Connections
from zenps.wire.curve import Authenticator, Handshakes, warn_if_open
from zenps.wire.sockets import (
    MAX_UNREAD_MESSAGES,
    Socket,
    bind_router,
    context,
    open_dealer,
    receive_frames,
)

SECONDS = 20.0


def keys_of(directory: Path, role: Player, rank: int | None = None) -> Keys:
    security = SecurityConfig(keys=str(directory / LIST_NAME), secret=str(directory))
    keys = load_keys(security, role, rank)
    assert keys is not None
    return keys


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    generate(tmp_path / "keys", workers=2, servers=1)
    return tmp_path / "keys"


@pytest.fixture
def unlisted(tmp_path: Path, directory: Path) -> Keys:
    """Keys of another job, whose owner knows the public keys of this one."""
    generate(tmp_path / "unlisted", workers=1, servers=1)
    own, known = keys_of(tmp_path / "unlisted", "worker", 0), keys_of(directory, "worker", 0)
    return replace(known, public=own.public, secret=own.secret)


class Scheduler:
    """A ROUTER behind a gate, driven by the test."""

    def __init__(
        self,
        ctx: zmq.Context[Socket],
        keys: Keys | None,
        with_authenticator: bool = True,
        max_unread: int = MAX_UNREAD_MESSAGES,
    ) -> None:
        self.ctx = ctx
        self.refused: list[Refusal] = []
        self._dealers: list[Socket] = []  # one that is dropped would linger
        self.authenticator = Authenticator(ctx, keys if with_authenticator else None, self.refused.append)
        self.router, self.address = bind_router(ctx, "127.0.0.1", 0, 1 << 20, keys, max_unread)
        self.authenticator.watch(Connections(self.router, 1 << 20))

    def dealer(self, keys: Keys | None, identity: bytes = b"x", peer: str = "scheduler") -> Socket:
        """A peer that has sent a message."""
        socket = connect_dealer(self.ctx, self.address, identity, 1 << 20, keys, peer)
        self._dealers.append(socket)
        socket.send(b"hello")
        return socket

    def attend_until(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < until, f"in vain; refused: {self.refused}"
            self.authenticator.attend()
            self.router.poll(5)

    def owner_of_next(self) -> str:
        self.attend_until(lambda: self.router.poll(0))
        _, frame = receive_frames(self.router)
        return self.authenticator.owner(frame)

    def hears_nothing(self) -> bool:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            self.authenticator.attend()
            if self.router.poll(5):
                return False
        return True


@pytest.fixture
def ctx() -> Iterator[zmq.Context[Socket]]:
    with context() as ctx:
        yield ctx
        ctx.destroy(linger=0)


@pytest.fixture
def scheduler(ctx: zmq.Context[Socket], directory: Path) -> Scheduler:
    return Scheduler(ctx, keys_of(directory, "scheduler"))


def rewrite(directory: Path, edit: Callable[[list[str]], list[str]]) -> None:
    file = directory / LIST_NAME
    file.write_text("\n".join(edit(file.read_text().splitlines())))


def without(name: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line for line in lines if not line.startswith(f"{name} ")]


# ── who gets in ─────────────────────────────────────────────────────────────────────────────────


def test_message_has_the_name_of_its_key(scheduler: Scheduler, directory: Path) -> None:
    scheduler.dealer(keys_of(directory, "worker", 1))
    assert scheduler.owner_of_next() == "worker-1"
    assert scheduler.refused == []


def test_frames_of_any_size_have_it(scheduler: Scheduler, directory: Path) -> None:
    dealer = scheduler.dealer(keys_of(directory, "worker", 1))
    scheduler.owner_of_next()
    for size in (0, 33, 70_000, 1 << 19):
        dealer.send(bytes(size))
        assert scheduler.owner_of_next() == "worker-1"


def test_a_queue_of_one_message_never_stops(ctx: zmq.Context[Socket], directory: Path) -> None:
    scheduler = Scheduler(ctx, keys_of(directory, "scheduler"), max_unread=1)
    dealer = scheduler.dealer(keys_of(directory, "worker", 1))
    for _ in range(20):
        dealer.send(bytes(1000))
    for _ in range(21):
        assert scheduler.owner_of_next() == "worker-1"


def test_check_binds_a_message_to_a_name(scheduler: Scheduler, directory: Path) -> None:
    scheduler.dealer(keys_of(directory, "worker", 1))
    scheduler.attend_until(lambda: scheduler.router.poll(0))
    _, frame = receive_frames(scheduler.router)
    scheduler.authenticator.check(frame, "worker", 1)
    with pytest.raises(ProtocolError, match=r"^key: a message of worker-0 by worker-1$"):
        scheduler.authenticator.check(frame, "worker", 0)


def test_unknown_key(scheduler: Scheduler, unlisted: Keys, caplog: pytest.LogCaptureFixture) -> None:
    scheduler.dealer(unlisted)
    scheduler.dealer(unlisted, identity=b"y")
    scheduler.attend_until(lambda: len(scheduler.refused) >= 2)
    assert scheduler.hears_nothing()
    assert set(scheduler.refused) == {"unknown_key"}
    (line,) = caplog.messages
    assert line.startswith(f"refused a connection from 127.0.0.1: {unlisted.public.decode()} is not in ")


def test_plaintext(scheduler: Scheduler) -> None:
    scheduler.dealer(None)
    scheduler.attend_until(lambda: scheduler.refused)
    assert scheduler.hears_nothing()
    assert set(scheduler.refused) == {"handshake"}


def test_peer_that_means_another_server(scheduler: Scheduler, directory: Path) -> None:
    """It says nothing to one that has not the key that it expects there."""
    scheduler.dealer(keys_of(directory, "worker", 1), peer="server-0")
    scheduler.attend_until(lambda: scheduler.refused)
    assert scheduler.hears_nothing()
    assert set(scheduler.refused) == {"handshake"}


def test_nobody_is_admitted_while_nobody_answers(ctx: zmq.Context[Socket], directory: Path) -> None:
    """Without a ZAP domain, libzmq would let every key in here."""
    scheduler = Scheduler(ctx, keys_of(directory, "scheduler"), with_authenticator=False)
    scheduler.dealer(keys_of(directory, "worker", 1))
    assert scheduler.hears_nothing()


def test_without_keys_nothing_is_asked(ctx: zmq.Context[Socket]) -> None:
    scheduler = Scheduler(ctx, None)
    scheduler.dealer(None)
    assert scheduler.owner_of_next() == ""
    assert scheduler.authenticator.sockets == []


# ── a list that changes ─────────────────────────────────────────────────────────────────────────


def test_revoked_key_loses_its_connection_s_worth(scheduler: Scheduler, directory: Path) -> None:
    dealer = scheduler.dealer(keys_of(directory, "worker", 1))
    assert scheduler.owner_of_next() == "worker-1"
    rewrite(directory, without("worker-1"))
    scheduler.authenticator.attend()
    dealer.send(b"hello again")
    with pytest.raises(ProtocolError, match="key: its key is no longer listed"):
        scheduler.owner_of_next()


def test_revoked_key_gets_no_new_connection(scheduler: Scheduler, directory: Path) -> None:
    keys = keys_of(directory, "worker", 1)
    rewrite(directory, without("worker-1"))
    scheduler.dealer(keys)
    scheduler.attend_until(lambda: scheduler.refused)
    assert scheduler.hears_nothing()


def test_key_that_was_added_is_admitted(scheduler: Scheduler, directory: Path) -> None:
    generate(directory, workers=3, servers=1)
    scheduler.dealer(keys_of(directory, "worker", 2))
    assert scheduler.owner_of_next() == "worker-2"


def test_new_key_of_a_node_is_not_mistaken_for_the_old(scheduler: Scheduler, directory: Path) -> None:
    dealer = scheduler.dealer(keys_of(directory, "worker", 1))
    assert scheduler.owner_of_next() == "worker-1"
    rewrite(directory, without("worker-1"))
    (directory / "worker-1.secret").unlink()
    generate(directory, workers=2, servers=1)
    scheduler.authenticator.attend()
    dealer.send(b"by the old key")
    with pytest.raises(ProtocolError, match="no longer listed"):
        scheduler.owner_of_next()
    scheduler.dealer(keys_of(directory, "worker", 1), identity=b"new")
    assert scheduler.owner_of_next() == "worker-1"


@pytest.mark.parametrize("damage", ["malformed", "gone", "writable"])
def test_damaged_list_leaves_the_keys_as_they_were(
    scheduler: Scheduler, directory: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys, file = keys_of(directory, "worker", 1), directory / LIST_NAME
    match damage:
        case "malformed":
            file.write_text("worker-")
        case "gone":
            file.unlink()
        case "writable":
            file.chmod(0o666)
    scheduler.authenticator.attend()
    scheduler.dealer(keys)
    assert scheduler.owner_of_next() == "worker-1"
    # One line of each node: the worker also looks the scheduler's key up again.
    assert sum("the keys stay as they were: security.keys" in line for line in caplog.messages) == 2


def test_a_list_is_read_again_once_the_process_has_a_free_descriptor(
    ctx: zmq.Context[Socket], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a key that was revoked in that moment would stay valid for good."""
    keys = keys_of(directory, "scheduler")
    scheduler = Scheduler(ctx, keys)
    scheduler.dealer(keys_of(directory, "worker", 1))
    assert scheduler.owner_of_next() == "worker-1"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rewrite(directory, without("worker-1"))
    free = os.open(directory, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        for _ in range(3):
            scheduler.authenticator.attend()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "worker-1" in keys.listed.owners.values()
    assert sum("Too many open files" in line for line in caplog.messages) == 1
    scheduler.authenticator.attend()
    assert "worker-1" not in keys.listed.owners.values()


# ── what a node is told ─────────────────────────────────────────────────────────────────────────


def refusal(scheduler: Scheduler, keys: Keys | None) -> str:
    """With what a node's wait for the scheduler ends."""
    dealer = open_dealer(scheduler.ctx, b"x", 1 << 20, keys)
    handshakes = Handshakes(dealer)
    dealer.connect(scheduler.address)
    texts: list[str] = []

    def told() -> bool:
        try:
            handshakes.raise_for(keys, "host:1")
        except ConfigError as error:
            texts.append(str(error))
        return bool(texts)

    scheduler.attend_until(told)
    handshakes.close()
    return texts[0]


def test_node_is_told_that_its_key_is_not_listed(scheduler: Scheduler, unlisted: Keys) -> None:
    expected = "security.secret = 'worker-0': expected a key that the scheduler at host:1 lists"
    assert refusal(scheduler, unlisted).startswith(expected)


def test_node_is_told_that_keys_are_needed(scheduler: Scheduler) -> None:
    expected = "security.keys = '': expected a list, as the scheduler at host:1 has"
    assert refusal(scheduler, None).startswith(expected)


def test_node_is_told_that_there_are_no_keys(ctx: zmq.Context[Socket], directory: Path) -> None:
    keys = keys_of(directory, "worker", 0)
    expected = f"security.keys = '{keys.listed.file}': expected none, as the scheduler at host:1 has"
    assert refusal(Scheduler(ctx, None), keys).startswith(expected)


def test_node_gets_a_hint_where_libzmq_gives_no_reason(scheduler: Scheduler, directory: Path) -> None:
    """It expects the key of another node there, as of another job."""
    keys = keys_of(directory, "worker", 0)
    dealer = open_dealer(scheduler.ctx, b"x", 1 << 20, keys, "server-0")
    handshakes = Handshakes(dealer)

    def hint() -> str:
        handshakes.raise_for(keys, "host:1")
        return handshakes.hint

    assert hint() == ""
    dealer.connect(scheduler.address)
    scheduler.attend_until(hint)
    assert hint() == "; handshakes failed: check that the keys here and there are of one job"
    for _ in range(2):
        handshakes.close()
        assert list(handshakes.failures()) == []


def test_socket_goes_on_when_nobody_watches_any_more(scheduler: Scheduler, directory: Path) -> None:
    dealer = scheduler.dealer(keys_of(directory, "worker", 0))
    handshakes = Handshakes(dealer)
    assert scheduler.owner_of_next() == "worker-0"
    handshakes.close()
    dealer.send(b"again")
    assert scheduler.owner_of_next() == "worker-0"


# ── a warning where there are no keys ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("address", ["10.0.0.1:9100", "tcp://0.0.0.0:1", "[2001:db8::1]:1", "no.invalid:1"])
def test_address_on_a_network_is_warned_of(
    address: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(keys_of(directory, "worker", 0), address)
    assert caplog.records == []
    warn_if_open(None, address)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{address} is not a loopback address, and there are no keys" in record.message


@pytest.mark.parametrize("address", ["127.0.0.1:9100", "127.8.8.8:1", "tcp://localhost:1", "[::1]:1"])
def test_loopback_is_not_warned_of(address: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_open(None, address)
    assert caplog.records == []
