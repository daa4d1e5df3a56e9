"""Residuals of error feedback: what quantization has lost of each gradient, until its next push."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from zenps.errors import TensorError


class Residuals:
    """The residuals of an optimizer's tensors. They live as long as the optimizer, which keeps this object.

    Thread-safe; only the one round in flight of a tensor uses its residual. A residual is as large as the
    tensor, in float32. Keeping only the rows that were ever pushed would soon save little memory, and would
    need a search in each step.
    """

    def __init__(self) -> None:
        self._tables: dict[str, Tensor] = {}
        self._lock = threading.Lock()

    def of(self, name: str, rows: int, columns: int) -> Tensor:
        """Returns the residual of a tensor, float32 ``[rows, columns]``; zeros if it is new or changed shape.

        Raises:
            TensorError: there is no memory for the residual.
        """
        with self._lock:
            table = self._tables.get(name)
            if table is None or table.shape != (rows, columns):
                try:
                    # NumPy's zeros come from calloc, untouched; torch would write each page.
                    zeros = np.zeros((rows, columns), np.float32)
                except MemoryError:
                    raise TensorError(
                        f"tensor {name!r}: no memory for the residuals of {rows} × {columns} values; "
                        "set sync.values to same, on all workers"
                    ) from None
                table = self._tables[name] = torch.from_numpy(zeros)
            return table
