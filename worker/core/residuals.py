"""Residuals of error feedback: what was not pushed of each gradient, until its next push."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zenps.errors import TensorError
from zenps.sparsifiers.base import Sparsifier


@dataclass
class Feedback:
    """The residual of one gradient, and what selects from it.

    Attributes:
        residual: ``[elements]``, float32 or float64, on the CPU.
        sparsifier: of this tensor; None before its first push.
    """

    residual: Tensor
    sparsifier: Sparsifier | None = None


class Residuals:
    """The residuals of an optimizer's tensors. They live as long as the optimizer, which keeps this object.

    Thread-safe; only the one round in flight of a tensor uses its residual. A residual is as large as the
    tensor, in float32. Keeping only the rows that were ever pushed would soon save little memory, and would
    need a search in each step.
    """

    def __init__(self) -> None:
        self._tables: dict[str, Tensor] = {}
        self._feedback: dict[str, Feedback] = {}
        self._lock = threading.Lock()

    def feedback(self, name: str, elements: int, dtype: torch.dtype) -> Feedback:
        """Returns the residual of a dense gradient that is sparsified, with its sparsifier.

        Raises:
            TensorError: there is no memory for the residual.
        """
        table = self.of(name, elements, 1, dtype)
        with self._lock:
            feedback = self._feedback.get(name)
            if feedback is None or feedback.residual.data_ptr() != table.data_ptr():
                feedback = self._feedback[name] = Feedback(table.view(-1))
            return feedback

    def of(self, name: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the residual of a tensor, ``[rows, columns]``; zeros if it is new or changed shape.

        Raises:
            TensorError: there is no memory for the residual.
        """
        with self._lock:
            table = self._tables.get(name)
            if table is None or table.shape != (rows, columns) or table.dtype != dtype:
                try:
                    # NumPy's zeros come from calloc, untouched; torch would write each page.
                    zeros = np.zeros((rows, columns), str(dtype).removeprefix("torch."))
                except MemoryError:
                    raise TensorError(
                        f"tensor {name!r}: no memory for the residuals of {rows} × {columns} values; "
                        "set sync.values to same and sync.sparsifier to none, on all workers"
                    ) from None
                table = self._tables[name] = torch.from_numpy(zeros)
            return table
