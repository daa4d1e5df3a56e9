"""Main function of the workers that ``trainings.py`` runs: decodes the case, trains, writes the result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

import zenps as zps

C = TypeVar("C", bound=msgspec.Struct)


def run_worker(
    kind: type[C], train: Callable[[C], msgspec.Struct], prepare: Callable[[C], None] = lambda case: None
) -> None:
    """Runs ``SCRIPT CASE FILE``; rank 0 writes what ``train`` returns.

    Args:
        kind: of the case, given as JSON.
        train: called between ``init()`` and ``shutdown()``.
        prepare: called before.
    """
    case = msgspec.json.decode(sys.argv[1], type=kind)
    torch.set_num_threads(1)
    prepare(case)
    zps.init()
    result = train(case)
    if zps.rank() == 0:
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(result))
    zps.shutdown()
