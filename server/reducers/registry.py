"""From the ``kind`` of a push to the reducer of its round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from zenps.kernels.factory import make_kernels
from zenps.wire.messages import Kind

from .base import Reducer, ResultMemory
from .blocks import BlocksReducer
from .dense import DenseReducer
from .sparse import SparseReducer

REDUCERS: Final[Mapping[Kind, type[Reducer[Any]]]] = {
    "dense": DenseReducer,
    "sparse": SparseReducer,
    "blocks": BlocksReducer,
}
assert tuple(REDUCERS) == get_args(Kind)


def make_reducers(memory: ResultMemory, max_message_bytes: int) -> Mapping[Kind, Reducer[Any]]:
    """One reducer of each kind, all of which take their buffers from ``memory``.

    ``Any``: a round's payloads come from the reducer that they are given to, for its pushes agree in kind.
    """
    kernels = make_kernels(memory.pool)
    return {kind: reducer(kernels, memory, max_message_bytes) for kind, reducer in REDUCERS.items()}
