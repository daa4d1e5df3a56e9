"""Residuals of error feedback: the part of each gradient that was not pushed, until its next push."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from zenps.errors import TensorError, UsageError
from zenps.sparsifiers.base import Exchange, Sparsifier

CPU: Final = torch.device("cpu")

NORM_SECONDS: Final = 5.0
"""How long the norm of a residual counts as known: measuring it again reads the whole residual."""


@dataclass
class Feedback:
    """The residual of one gradient, and what selects from it.

    Attributes:
        residual: ``[elements]``, float32 or float64, on the CPU; or float32 on the gradient's device.
        sparsifier: of this tensor; None before its first push.
        counts: for the sparsifier's next step.
        first_step: the number of the sparsifier's step in which the tensor had step 0 in this job.
        next_step: of the sparsifier.
        added_step: the step whose gradient is whole in the residual, because its push has failed or has yet
            to begin; None if there is none. Another push of this step does not add it again.
        norm: of the residual, when it was measured last; 0 before that.
    """

    residual: Tensor
    sparsifier: Sparsifier | None = None
    counts: Tensor | None = None
    first_step: int = 0
    next_step: int = 0
    added_step: int | None = None
    norm: float = 0.0
    _norm_until: float = 0.0

    @property
    def is_norm_due(self) -> bool:
        """True once the norm is to be measured again."""
        return time.monotonic() >= self._norm_until

    def note_norm(self, norm: Tensor) -> None:
        """Notes the norm of the residual.

        Args:
            norm: on the CPU.
        """
        self.norm, self._norm_until = float(norm), time.monotonic() + NORM_SECONDS

    def state_dict(self) -> dict[str, Any]:
        """Returns everything for a checkpoint, with references to tensors on the CPU and copies of others."""
        assert self.sparsifier is not None
        return {
            "residual": self.residual.cpu(),
            "sparsifier": dict(self.sparsifier.state_dict()),
            "counts": self.counts,
            "step": self.next_step,
        }

    def shared_state(self) -> dict[str, Any]:
        """Returns what all ranks have in common, with references to tensors."""
        assert self.sparsifier is not None
        shared = {"elements": len(self.residual), "step": self.next_step}
        if self.sparsifier.exchange != "agreed":
            return shared
        return shared | {"sparsifier": dict(self.sparsifier.state_dict()), "counts": self.counts}

    def adopt(self, shared: Mapping[str, Any]) -> None:
        """Continues from the :meth:`shared_state` of another rank, in the tensor's step 0."""
        assert self.sparsifier is not None
        self.first_step = shared["step"]
        if self.sparsifier.exchange == "agreed":
            self.sparsifier.load_state_dict(shared["sparsifier"])
            self.counts = shared["counts"]

    def load_state_dict(self, name: str, state: Mapping[str, Any], step: int) -> None:
        """Continues the tensor ``name`` from a state in its step ``step`` of this job.

        Raises:
            UsageError: the tensor has another size or dtype, or ``state`` is not one of a sparsifier.
        """
        assert self.sparsifier is not None
        try:
            given, inner, counts = state["residual"], state["sparsifier"], state["counts"]
            first_step = state["step"] - step
            if given.shape == self.residual.shape and given.dtype == self.residual.dtype:
                self.sparsifier.load_state_dict(inner)
                self.residual.copy_(given)
                self.counts, self.first_step, self.added_step = counts, first_step, None
                return
            got = f"{len(given)} elements of {given.dtype}"
        except Exception as error:
            reason = "expected what sparsifier_state_dict() has returned under the same settings"
            kind = type(self.sparsifier).__name__
            raise UsageError(f"sparsifier state of tensor {name!r}: {kind}: {error!r}; {reason}") from error
        raise UsageError(
            f"sparsifier state of tensor {name!r}: {got}, expected {len(self.residual)} of "
            f"{self.residual.dtype}; load that of the same model and settings, in whose first step the same "
            "parameters had gradients"
        )


def shared_part(state: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
    """Returns the part of a saved state of a tensor that :meth:`Feedback.adopt` takes.

    Raises:
        KeyError, TypeError: ``state`` is not one that :meth:`Feedback.state_dict` has returned.
    """
    shared = {"elements": len(state["residual"]), "step": state["step"]}
    if exchange != "agreed":
        return shared
    return shared | {"sparsifier": state["sparsifier"], "counts": state["counts"]}


class Residuals:
    """The residuals of an optimizer's tensors. They live as long as the optimizer, which keeps this object.

    Thread-safe: a tensor has at most one round in flight, and only that round uses its residual. A residual
    is as large as the tensor, in float32. Keeping only rows that were pushed before would soon save little
    memory, and cost a search in each step.
    """

    def __init__(self) -> None:
        self._tables: dict[str, Tensor] = {}
        self._feedback: dict[str, Feedback] = {}
        self._lock = threading.Lock()

    def feedback(self, name: str, elements: int, dtype: torch.dtype, device: torch.device = CPU) -> Feedback:
        """Returns the residual of a dense gradient that is sparsified, with its sparsifier.

        Raises:
            TensorError: there is no memory for the residual.
        """
        table = self.of(name, elements, 1, dtype, device)
        with self._lock:
            feedback = self._feedback.get(name)
            if feedback is None or feedback.residual.data_ptr() != table.data_ptr():
                feedback = self._feedback[name] = Feedback(table.view(-1))
            return feedback

    def forget(self, name: str) -> None:
        """Forgets the residuals of a bucket, of all its rounds: another bucket has its name from now on."""
        with self._lock:
            for each in [*self._tables]:
                _, _, own = each.partition("/")
                if own.partition("@")[0] == name:  # a leader's has a suffix
                    del self._tables[each]
                    self._feedback.pop(each, None)

    def end_step(self) -> None:
        """Begins a step: none of its gradients has been added to a residual yet."""
        with self._lock:
            for feedback in self._feedback.values():
                feedback.added_step = None

    def peek(self, name: str) -> Tensor | None:
        """Returns the residual of a tensor, ``[rows, columns]``; None if it has none yet."""
        return self._tables.get(name)

    def of(
        self,
        name: str,
        rows: int,
        columns: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> Tensor:
        """Returns the residual of a tensor, ``[rows, columns]``; zeros if it is new or changed shape.

        Raises:
            TensorError: there is no memory for the residual.
        """
        with self._lock:
            table = self._tables.get(name)
            known = None if table is None else (table.shape, table.dtype, table.device)
            if table is None or known != ((rows, columns), dtype, device):
                try:
                    table = self._tables[name] = _zeros(rows, columns, dtype, device)
                except (MemoryError, torch.OutOfMemoryError):
                    raise TensorError(
                        f"tensor {name!r}: no memory for the residuals of {rows} × {columns} values; "
                        "set sync.values to same and sync.sparsifier to none, on all workers"
                    ) from None
            return table


@dataclass
class Rounding:
    """Takes the rounding errors of one push, instead of a residual. Nothing is added to the push.

    Attributes:
        errors: float32 ``[n, columns]``; None if nothing was rounded.
        rows: of the errors, int64 ``[n]``; None if they are those of a dense tensor, in order.
    """

    errors: Tensor | None = None
    rows: Tensor | None = None


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros((rows, columns), dtype=dtype, device=device)
    # NumPy's zeros come from calloc, untouched; torch would write each page.
    return torch.from_numpy(np.zeros((rows, columns), str(dtype).removeprefix("torch.")))
