"""Where a node listens, and how others find it."""

from __future__ import annotations

import socket as net
import time
from typing import Any

import pytest

from zenps.errors import ConfigError
from zenps.wire.addresses import bindable, find_host, is_reached_by_ipv4, why_unreachable
from zenps.wire.sockets import bind_router, context

Found = list[tuple[Any, ...]]


def found(*addresses: str) -> Found:
    """What getaddrinfo returns for a name."""
    return [
        (net.AF_INET6 if ":" in address else net.AF_INET, net.SOCK_STREAM, 6, "", (address, 0))
        for address in addresses
    ]


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("", (), "*"),
        ("0.0.0.0", (), "*"),
        ("::", (), "*"),
        ("127.0.0.1", ("127.0.0.1",), "127.0.0.1"),
        ("localhost", ("127.0.0.1",), "127.0.0.1"),
        ("localhost", ("127.0.0.1", "127.0.0.2"), "127.0.0.1"),
        # Debian's /etc/hosts has the machine's own name so; others find its real address.
        ("node1", ("127.0.1.1",), "*"),
        # Others may come by any of them.
        ("node1", ("127.0.0.1", "::1"), "*"),
        # 0.0.0.0 stands for an address that this machine has, and others reach.
        ("node1", ("0.0.0.0", "192.0.2.1"), "*"),
        ("node1", ("0.0.0.0",), "0.0.0.0"),
        # What is before us: NAT, or a service's virtual address.
        ("192.0.2.1", ("192.0.2.1",), "*"),
        ("node1", ("192.0.2.1",), "*"),
    ],
)
def test_where_a_node_listens(
    host: str, addresses: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "getaddrinfo", lambda *_, **__: found(*addresses))
    assert bindable(host) == expected


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [(("192.0.2.1", "2001:db8::1"), True), (("2001:db8::1", "192.0.2.1"), False), (("192.0.2.1",), True)],
)
def test_the_family_is_that_of_the_best_address(
    addresses: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "getaddrinfo", lambda *_, **__: found(*addresses))
    assert is_reached_by_ipv4("node1") is expected


def test_only_a_name_that_nobody_knows_yet_is_waited_for() -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"^cluster\.scheduler = '\[fe80::1\]:5': expected .* route"):
        find_host("[fe80::1]:5", timeout_seconds=60.0)  # link-local, and of no interface
    assert time.monotonic() - begin < 30


def unknown(*_: object, **__: object) -> Found:
    raise net.gaierror(net.EAI_NONAME, "Name or service not known")


def test_a_name_that_nobody_knows_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "getaddrinfo", unknown)
    assert is_reached_by_ipv4("node1") is False
    with pytest.raises(ConfigError, match=r"^cluster\.scheduler = 'node1:9100': expected .*not known"):
        find_host("node1:9100")


def test_a_name_that_is_known_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zenps.wire.addresses.RESOLVE_SECONDS", 0.01)
    known_at = time.monotonic() + 0.1

    def resolve(host: str, *_: object, **__: object) -> Found:
        if time.monotonic() < known_at:
            unknown()
        return [(net.AF_INET, net.SOCK_DGRAM, 0, "", ("127.0.0.1", 9100))]

    monkeypatch.setattr(net, "getaddrinfo", resolve)
    assert find_host("node1:9100", timeout_seconds=20.0) == "127.0.0.1"


def test_a_link_local_address_is_of_no_use_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probe:
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, target: object) -> None: ...

        def getsockname(self) -> tuple[str, int, int, int]:
            return ("fe80::2", 0, 0, 2)

    monkeypatch.setattr(net, "getaddrinfo", lambda *_, **__: found("fe80::1"))
    monkeypatch.setattr(net, "socket", lambda *_: Probe())
    with pytest.raises(ConfigError, match=r"^cluster\.host = '': expected .* fe80::2, which is link-local"):
        find_host("[fe80::1%eth-0.7]:9100")


def test_why_an_address_cannot_be_reached() -> None:
    with context() as ctx:
        _, address = bind_router(ctx, "127.0.0.1", 0, 1 << 16)
        assert why_unreachable(address) == ""
    assert why_unreachable(address) == "Connection refused"
