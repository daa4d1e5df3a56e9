"""Routing identities: the one that a node has at the scheduler, and the one that a worker has at servers.

With ``ROUTER_HANDOVER``, whoever knows the identity of a peer can take over its connection. The scheduler
has to tell servers which identity pushes for which rank. So workers have another one there, from which nobody
can compute the one that they have at the scheduler.
"""

from __future__ import annotations

import functools
import hashlib
import uuid

from zenps.config.settings import MOST_WORKERS

from .messages import Role


def new_identity(role: Role) -> bytes:
    """A node's identity at the scheduler: a secret between the two."""
    return f"{role}-{uuid.uuid4().hex}".encode()


@functools.lru_cache(maxsize=2 * MOST_WORKERS)
def identity_at_servers(identity: bytes) -> bytes:
    """The identity at all servers of the worker that has ``identity`` at the scheduler."""
    return (
        b"worker-" + hashlib.blake2b(identity, digest_size=16, person=b"zenps-servers").hexdigest().encode()
    )
