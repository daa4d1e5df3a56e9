"""Plain data as MessagePack: None, bool, int, float, str, bytes, lists and dicts. Nothing is pickled."""

from __future__ import annotations

from typing import Any, Final

import msgpack
import torch
from torch import Tensor

from zenps.errors import ProtocolError, UsageError

MAX_OBJECT_BYTES: Final = 1 << 31
"""The length of a packed object comes over the network and decides how much memory is allocated."""

MAX_REASON: Final = 4096
"""Characters of the reason why a rank has no object, which travels in place of one."""


def pack_object(value: object) -> bytes:
    """Encodes plain data.

    Raises:
        UsageError: ``value`` is not plain data, or takes more than 2 GiB.
    """
    try:
        data: bytes = msgpack.packb(value)
        _check_keys(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"cannot send {type(value).__name__}: {error}; expected plain data: None, bool, int, float, str, "
            "bytes, and lists and dicts of these"
        ) from None
    if len(data) > MAX_OBJECT_BYTES:
        raise UsageError(f"an object of {len(data)} bytes: expected at most {MAX_OBJECT_BYTES}; use tensors")
    return data


def _check_keys(value: object) -> None:
    """Refuses tuples as keys, which MessagePack writes as lists: no rank could read them."""
    values = [value]
    while values:
        each = values.pop()
        if isinstance(each, dict):
            if wrong := [key for key in each if isinstance(key, tuple)]:
                raise TypeError(f"a dict has the key {wrong[0]!r:.100}, and a key must be a scalar")
            values += each.values()
        elif isinstance(each, list | tuple):
            values += each


def pack_reason(error: Exception) -> bytes:
    """Encodes why a rank has no object."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON].encode(errors="replace")


def unpack_object(data: bytes) -> Any:
    """Decodes plain data.

    Raises:
        ProtocolError: ``data`` is not MessagePack.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    # ValueError covers msgpack's own; TypeError comes from keys that cannot be hashed.
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError("payload", f"no packed object: {error!s:.200}") from None


def check_size(size: int) -> None:
    """Checks the length of a packed object that another rank has announced.

    Raises:
        ProtocolError: it is longer than any can be.
    """
    if size > MAX_OBJECT_BYTES:
        raise ProtocolError("payload", f"an object of {size} bytes, at most {MAX_OBJECT_BYTES} are allowed")


def as_tensor(data: bytes) -> Tensor:
    """Copies at least one byte: uint8 ``[len(data)]`` on the CPU."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
