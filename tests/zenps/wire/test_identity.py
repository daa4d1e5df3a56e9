"""Routing identities: which of them tell what of others."""

from __future__ import annotations

from zenps.wire.identity import identity_at, new_identity, public_identity, public_part


def test_a_worker_has_another_identity_at_each_peer_and_one_public_part() -> None:
    secret = new_identity("worker")
    at_servers = [identity_at(server, secret) for server in range(300)]
    assert len({secret, public_identity(secret), *at_servers}) == 302
    assert {public_part(identity) for identity in at_servers} == {public_identity(secret)}
    assert public_identity(secret) != public_identity(new_identity("worker"))
    assert identity_at(7, secret) == at_servers[7]
    assert all(len(identity) <= 255 for identity in at_servers)


def test_what_has_no_public_part_is_nobody_s() -> None:
    assert public_part(b"") == public_part(b"nobody") == b""
