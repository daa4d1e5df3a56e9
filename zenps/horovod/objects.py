"""Serialization without pickle: tuples, sets, NumPy scalars and dense tensors as plain data.

Horovod and BytePS pickle what ``broadcast_object`` and ``allgather_object`` carry. ZenPS does not: unpickling
bytes from the network would let any peer run code here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ProtocolError, UsageError
from zenps.worker.collectives.broadcast import DICTS
from zenps.worker.collectives.raw_bytes import DTYPES, as_bytes, from_bytes

_TAG: Final = "zenps.horovod"
"""The only key of a dict that stands for a value of a type that plain data lacks."""

_COLLECTIONS: Final[dict[str, type[Any]]] = {
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}

_DICTS: Final[dict[str, type[dict[Any, Any]]]] = {"dict": dict, **DICTS}


def to_plain(value: Any) -> Any:
    """Returns ``value`` as plain data, which :func:`from_plain` restores.

    A value without such a form, such as an object of the user's own class, is returned as it is:
    ``zenps.broadcast_object`` and ``zenps.allgather_object`` then raise UsageError on all ranks.

    Raises:
        UsageError: a tensor has no memory, such as one on the meta device; a list contains itself; or a
            collection, such as a namedtuple, is of a class that other ranks may lack.
    """
    try:
        return _plain(value)
    except RuntimeError as error:
        raise UsageError(f"cannot send {type(value).__name__}: {error}; expected plain data") from error


def _plain(value: Any) -> Any:
    match value:
        case Tensor() if value.layout == torch.strided and str(value.dtype) in DTYPES:
            data = as_bytes(value.detach()).numpy().tobytes()
            return {_TAG: ["tensor", str(value.dtype), list(value.shape), data]}
        case np.generic():
            return value.item()
        case list() if type(value) is list:
            return [_plain(item) for item in value]
        case tuple() | set() | frozenset() if kind := _name_in(_COLLECTIONS, value):
            return {_TAG: [kind, [_plain(item) for item in value]]}
        case dict() if type(value) is dict and all(map(_is_plain_key, value)):
            return {key: _plain(item) for key, item in value.items()}
        case dict() if kind := _name_in(_DICTS, value):
            return {_TAG: [kind, [[_plain(key), _plain(item)] for key, item in value.items()]]}
        case list() | tuple() | set() | frozenset() | dict():
            base = next(each for each in type(value).__mro__ if each.__module__ == "builtins").__name__
            raise UsageError(
                f"cannot send {type(value).__name__}: it would arrive as a {base}; pass {base}(…) of it, or "
                "a dict of its fields"
            )
        case _:
            return value


def _is_plain_key(key: object) -> bool:
    return isinstance(key, str | int) and key != _TAG


def _name_in(kinds: Mapping[str, type[Any]], value: object) -> str | None:
    """Returns the name of a value's class; None if it is none of these, but perhaps derived from one."""
    name = type(value).__name__
    return name if kinds.get(name) is type(value) else None


def from_plain(value: Any) -> Any:
    """Returns what :func:`to_plain` was given; a tensor on the CPU.

    Raises:
        ProtocolError: ``value`` does not come from :func:`to_plain`.
    """
    match value:
        case {"zenps.horovod": [str(kind), *content]}:
            try:
                return _restore(kind, *content)
            except (ValueError, TypeError, RuntimeError, KeyError) as error:
                raise ProtocolError("payload", f"no object of Horovod's interface: {error!s:.200}") from None
        case list():
            return [from_plain(item) for item in value]
        case dict():
            return {key: from_plain(item) for key, item in value.items()}
        case _:
            return value


def _restore(kind: str, content: Any, shape: Any = None, data: bytes = b"") -> Any:
    match kind:
        case "tensor":
            # frombuffer refuses an empty buffer.
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
            return from_bytes(flat, DTYPES[content], shape)
        case _ if kind in _COLLECTIONS:
            return _COLLECTIONS[kind]([from_plain(item) for item in content])
        case _ if kind in _DICTS:
            return _DICTS[kind]({from_plain(key): from_plain(item) for key, item in content})
        case _:
            raise ValueError(f"kind {kind!r:.60}")
