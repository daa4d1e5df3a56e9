"""Recorder of pushed rows for ``zenps plan``: writes them to a file, then ends the training."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from zenps.observe.recording import Header, Push, encode, keep

from .encode.sparse import row_numbers

logger = logging.getLogger("zenps.plan")


class Recorder:
    """Records the first pushes of each tensor; then ends the process.

    All workers end at the same push, so no worker waits for its answer.

    Args:
        file: to be written.
        header: describes this worker.
        steps: how many pushes of each tensor are recorded.
    """

    def __init__(self, file: Path, header: Header, steps: int) -> None:
        self._file = file.open("wb", buffering=0)
        self._most = steps
        self._steps: dict[str, int] = {}
        self._lock = threading.Lock()
        self._write(header)

    def note(self, tensor: Tensor, name: str) -> None:
        """Records which rows of ``tensor``, dense or sparse COO, are pushed.

        Integer tensors are skipped: they are messages between ranks, not gradients.

        Raises:
            SystemExit: the tensor has been recorded in all ``steps``; the exit code is 0.
        """
        if not tensor.is_floating_point():
            return
        with self._lock:
            step = self._steps.get(name, 0)
            if step >= self._most:
                logger.info("%d steps are recorded; this training ends here", step)
                raise SystemExit(0)
            self._steps[name] = step + 1
            self._write(_as_push(tensor.detach(), name, step))

    def _write(self, item: Header | Push) -> None:
        self._file.write(encode(item))


def open_recorder(rank: int, workers: int, environ: Mapping[str, str] = os.environ) -> Recorder | None:
    """Opens a recorder if ``zenps plan`` has set ``ZENPS_PLAN_TRACE``, a folder, and ``ZENPS_PLAN_STEPS``."""
    folder = environ.get("ZENPS_PLAN_TRACE")
    if not folder:
        return None
    header = Header(rank=rank, workers=workers)
    return Recorder(Path(folder) / f"worker{rank}", header, int(environ["ZENPS_PLAN_STEPS"]))


def _as_push(tensor: Tensor, name: str, step: int) -> Push:
    shape, item_bytes = tuple(tensor.shape), tensor.dtype.itemsize
    if not tensor.is_sparse:
        pushed = int(tensor.count_nonzero())
        return Push(tensor=name, step=step, shape=shape, sparse_dims=0, item_bytes=item_bytes, pushed=pushed)
    dims = tensor.sparse_dim()
    numbers = row_numbers(tensor._indices(), shape[:dims])
    rows = torch.unique(numbers).cpu().numpy()
    halvings, kept = keep(rows)
    return Push(
        tensor=name, step=step, shape=shape, sparse_dims=dims, item_bytes=item_bytes,
        pushed=len(rows), halvings=halvings, rows=kept,
    )  # fmt: skip
