from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from zenps.observe.recording import Header, Push, keep

Trace = list[tuple[Header, Push]]


@pytest.fixture
def made_up() -> Callable[..., Trace]:
    """A trace of one tensor whose rows are drawn by known chances."""

    def make(
        chances: NDArray[np.float64],
        *,
        workers: int = 2,
        steps: int = 20,
        columns: int = 16,
        name: str = "table",
        seed: int = 0,
    ) -> Trace:
        generator = np.random.default_rng(seed)

        def pushes() -> Iterator[tuple[Header, Push]]:
            for rank in range(workers):
                header = Header(rank=rank, workers=workers)
                for step in range(steps):
                    rows = np.flatnonzero(generator.random(len(chances)) < chances)
                    halvings, kept = keep(rows)
                    yield (
                        header,
                        Push(
                            tensor=name,
                            step=step,
                            shape=(len(chances), columns),
                            sparse_dims=1,
                            item_bytes=4,
                            pushed=len(rows),
                            halvings=halvings,
                            rows=kept,
                        ),
                    )

        return list(pushes())

    return make
