"""Serialization without pickle: tuples, sets, NumPy scalars and dense tensors as plain data.

Horovod and BytePS pickle what ``broadcast_object`` and ``allgather_object`` carry. ZenPS does not: unpickling
bytes from the network would let any peer run code here.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from zenps.errors import ProtocolError, UsageError
from zenps.worker.collectives.raw_bytes import DTYPES, as_bytes, from_bytes

_TAG: Final = "zenps.horovod"
"""The only key of a dict that stands for a value of a type that plain data lacks."""

_COLLECTIONS: Final[dict[str, type[Any]]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def to_plain(value: Any) -> Any:
    """Returns ``value`` as plain data, which :func:`from_plain` restores.

    A value without such a form, such as an object of the user's own class, is returned as it is:
    ``zenps.broadcast_object`` and ``zenps.allgather_object`` then raise UsageError on all ranks.

    Raises:
        UsageError: a tensor has no memory, such as one on the meta device; a list contains itself; or a tuple
            is a namedtuple, whose class other ranks may lack.
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
        case tuple() if hasattr(value, "_fields"):
            raise UsageError(
                f"cannot send {type(value).__name__}: a namedtuple would arrive as a tuple; pass its "
                "_asdict(), or make a tuple of it"
            )
        case tuple() | set() | frozenset():
            kind = next(kind for kind, restored in _COLLECTIONS.items() if isinstance(value, restored))
            return {_TAG: [kind, [_plain(item) for item in value]]}
        case list():
            return [_plain(item) for item in value]
        case dict() if all(isinstance(key, str | int) and key != _TAG for key in value):
            return {key: _plain(item) for key, item in value.items()}
        case dict():
            return {_TAG: ["dict", [[_plain(key), _plain(item)] for key, item in value.items()]]}
        case _:
            return value


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
        case "tuple" | "set" | "frozenset":
            return _COLLECTIONS[kind](from_plain(item) for item in content)
        case "dict":
            return {from_plain(key): from_plain(item) for key, item in content}
        case _:
            raise ValueError(f"kind {kind!r:.60}")
