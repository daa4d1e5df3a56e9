"""Authorization: which messages the owner of a key may send to the scheduler."""

from __future__ import annotations

import msgspec

from zenps.errors import ProtocolError
from zenps.keys import node_name
from zenps.wire.scheduler_messages import Drain, Ended, Register, StatusRequest, ToScheduler


def authorize(message: ToScheduler, owner: str, registered: str) -> ToScheduler:
    """Returns the message; a registration for any rank gets the rank of the key.

    Args:
        message: as it was received.
        owner: whose key the sender has, such as ``worker-3``; empty if there are no keys.
        registered: the name under which the sender has registered; empty if it has not.

    Raises:
        ProtocolError: the message is for another key to send.
    """
    if not owner or isinstance(message, StatusRequest):
        return message
    if isinstance(message, Drain | Ended):
        if owner != "operator":
            what = f"drain of server {message.rank}"
            if isinstance(message, Ended):
                what = f"end of {message.role} {message.rank}"
            raise ProtocolError("key", f"{what} by {owner}; expected operator")
        return message
    if not isinstance(message, Register):
        if owner in ("operator", "scheduler"):
            raise ProtocolError("key", f"a node's message by {owner}; expected a worker or server")
        if registered not in ("", owner):
            raise ProtocolError("key", f"a message of {registered} by {owner}")
        return message
    role, _, rank = owner.partition("-")
    if message.rank < 0 and message.role == role:
        return msgspec.structs.replace(message, rank=int(rank))
    claimed = node_name(message.role, message.rank if message.rank >= 0 else None)
    if claimed != owner:
        raise ProtocolError("key", f"this node registers as {claimed}, but its key is that of {owner}")
    return message
