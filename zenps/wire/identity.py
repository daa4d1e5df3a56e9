"""Routing identities: the one that a node has at the scheduler, and those that a worker has at servers.

With ``ROUTER_HANDOVER``, whoever knows a peer's routing identity can take over its connection. So each
connection has an identity of its own, which only its two ends know. A worker's identities at servers all
begin with its public identity, which views contain: so a server knows whose connection it is. It learns the
rest from the first message that the worker's key has authenticated.
"""

from __future__ import annotations

import functools
import hashlib
import uuid

from zenps.config.settings import MAX_WORKERS

from .fields import Role


def new_identity(role: Role) -> bytes:
    """A node's identity at the scheduler: a secret between the two."""
    return f"{role}-{uuid.uuid4().hex}".encode()


@functools.lru_cache(maxsize=2 * MAX_WORKERS)
def public_identity(identity: bytes) -> bytes:
    """The public identity of the worker that has ``identity`` at the scheduler."""
    digest = hashlib.blake2b(identity, digest_size=16, person=b"zenps-servers")
    return b"worker-" + digest.hexdigest().encode()


def identity_at(server: int, identity: bytes) -> bytes:
    """The identity at the server of rank ``server``: a secret between it and the worker."""
    digest = hashlib.blake2b(b"%d" % server, key=identity, digest_size=16)
    return public_identity(identity) + b"-" + digest.hexdigest().encode()


def public_part(identity: bytes) -> bytes:
    """The public identity of the worker that has ``identity`` at a server."""
    return identity.rpartition(b"-")[0]
