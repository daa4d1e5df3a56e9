"""Unix sockets between processes of one host and one user: descriptors of memory travel by them.

Their names are abstract: they vanish with the process, and are seen in the same network namespace alone.
"""

from __future__ import annotations

import hashlib
import os
import socket as net
import struct

OFFSET = struct.Struct("<Q")
"""By which a worker says that it has dropped what lay there."""

_CREDENTIALS = struct.Struct("3i")


def name_of(address: str) -> bytes:
    """Where the server whose data socket has ``address``, ``tcp://host:port``, listens for its own host.

    A name may have 107 bytes, and a host's 253.
    """
    return b"\0zenps/" + hashlib.blake2b(address.encode(), digest_size=16).hexdigest().encode()


def check_user(socket: net.socket) -> None:
    """Refuses the processes of others: whoever may list the sockets of a machine knows their names.

    Raises:
        PermissionError: the other side runs as another user.
    """
    _, user, _ = _CREDENTIALS.unpack(socket.getsockopt(net.SOL_SOCKET, net.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user}, expected {os.geteuid()}")
