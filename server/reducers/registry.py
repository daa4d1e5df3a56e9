"""Registry of reducers, by the ``kind`` of a push."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from zenps.kernels.factory import Backend, make_kernels
from zenps.wire.fields import Kind

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


def make_reducers(
    memory: ResultMemory, max_message_bytes: int, backend: Backend = "auto", threads: int = 1
) -> Mapping[Kind, Reducer[Any]]:
    """One reducer of each kind, all of which take their buffers from ``memory``.

    ``backend`` and ``threads`` are those of :func:`make_kernels`.

    ``Any``: a round's payloads come from the reducer that they are given to, because its pushes agree in
    kind.
    """
    kernels = make_kernels(memory.pool, backend, threads)
    return {kind: reducer(kernels, memory, max_message_bytes) for kind, reducer in REDUCERS.items()}
