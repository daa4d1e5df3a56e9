"""Selection of the elements of a gradient and its residual, by a sparsifier.

Elements that are not selected stay in this rank's residual, which is added to its next gradient (error
feedback; Stich et al., https://arxiv.org/abs/1809.07599).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from zenps.errors import TensorError, UsageError
from zenps.sparsifiers.base import Above, Sparsifier, Step

from ..core.residuals import Feedback
from ..core.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Gradient:
    """A gradient that is sparsified in one step, on the CPU.

    Attributes:
        name: of the tensor.
        shape, dtype: of the tensor.
        exact: ranges of elements that are pushed in any case.
        are_flags: True if these are presence elements: no rounding error is added to them, because it could
            make an absent parameter present.
        sparsifier: selects from the others.
        feedback: the tensor's residual, and the sparsifier's counts and steps.
        step: the sparsifier's step of this tensor, with its density.
        statistics: count the elements.
        on_device: True if gradient and residual are on a device. The pushed elements are always on the CPU.
        is_withheld: True for a gradient that is thrown away. If those of all ranks are, nothing is learned
            from their exchange.
    """

    on_device: ClassVar[bool] = False
    is_withheld: ClassVar[bool] = False

    name: str
    shape: torch.Size
    dtype: torch.dtype
    exact: tuple[tuple[int, int], ...]
    are_flags: bool
    sparsifier: Sparsifier
    feedback: Feedback
    step: Step
    statistics: Statistics

    @property
    def residual(self) -> Tensor:
        """``[elements]``, float32 or float64."""
        return self.feedback.residual

    def select(self, tensor: Tensor) -> Tensor:
        """Adds the gradient to the residual; returns the indices to push, int64 ``[n]``, ascending.

        If it is called again in the same step, because the push has failed, it adds nothing.

        Raises:
            TensorError: there is no memory.
            UsageError: the sparsifier has raised an error, or has returned indices that it must not return.
        """
        residual, gradient = self.residual, tensor.detach().reshape(-1)
        with self._exact_apart(gradient), blaming(self.sparsifier, "accumulate or select"):
            if self.feedback.added_step != self.step.number:  # else an earlier push of this step has failed
                self.sparsifier.accumulate(residual, gradient)
                self.feedback.added_step = self.step.number
            self._hide_exact()
            selection = self.sparsifier.select(residual, self.step)
            indices = selection.indices(residual) if isinstance(selection, Above) else selection
        check_indices(type(self.sparsifier).__name__, indices, len(residual))
        if self.exact:
            indices = torch.from_numpy(np.union1d(indices.numpy(), self.exact_indices()))
        return indices

    @contextlib.contextmanager
    def _exact_apart(self, gradient: Tensor) -> Iterator[None]:
        """Context that may overwrite the residual's exact elements; at its end they are what is to be pushed.

        The gradient is added to them if the context has added it to the others: once in each step.
        """
        feedback, number = self.feedback, self.step.number
        was_added = feedback.added_step == number
        kept = [self.residual[begin:end].clone() for begin, end in self.exact]
        try:
            yield
        finally:
            is_added = feedback.added_step == number and not was_added
            for (begin, end), values in zip(self.exact, kept, strict=True):
                if self.are_flags:
                    values.copy_(gradient[begin:end])
                elif is_added:
                    values += gradient[begin:end]
                self.residual[begin:end] = values

    def _hide_exact(self) -> None:
        """Sets the exact elements to 0: the sparsifier must not choose these instead of others."""
        for begin, end in self.exact:
            self.residual[begin:end] = 0

    def select_and_take(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`select`, then :meth:`take`: returns indices and values."""
        indices = self.select(tensor)
        return indices, self.take(indices)

    def take(self, indices: Tensor) -> Tensor:
        """Returns the residual's values at ``indices``, in the gradient's dtype. Rounding errors stay there.

        No NaN or infinite element stays in the residual: it would come back in every later step.

        Raises:
            TensorError: there is no memory.
            UsageError: the sparsifier has raised an error.
        """
        values = self.residual[indices]
        pushed, rounding = self._rounded(values)
        with blaming(self.sparsifier, "sent"):  # if it fails, nothing has left the residual
            self.sparsifier.sent(indices)
        self.residual[indices] = rounding
        self.feedback.added_step = None
        if not bool(values.isfinite().all()):  # perhaps more of them than may be pushed
            self.residual.nan_to_num_(0, 0, 0)
        return pushed

    def _rounded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the values in the gradient's dtype, and the rounding errors, which stay in the residual."""
        pushed = values.to(self.dtype)
        if self.dtype != values.dtype:  # a finite sum may be beyond the greatest number
            most = torch.finfo(self.dtype).max
            pushed = torch.where(values.isfinite(), pushed.clamp(-most, most), pushed)
        return pushed, (values - pushed).nan_to_num_(0, 0, 0)

    def put_back(self, indices: Tensor, pushed: Tensor) -> None:
        """Undoes :meth:`take`, which has returned ``pushed``, because nothing was sent."""
        residual = self.residual
        # Values of a narrower dtype are not quantized, so only the errors of that dtype are there.
        is_whole = pushed.dtype == residual.dtype
        residual[indices] = pushed if is_whole else pushed + residual[indices]
        self.feedback.added_step = self.step.number

    def keep_rounding(self, indices: Tensor, errors: Tensor) -> None:
        """Adds the rounding errors of quantization to the residual at ``indices``."""
        self.residual[indices] += errors

    def count(self) -> object:
        """Returns what the sparsifier counts; a tensor on the CPU.

        Raises:
            TensorError: there is no memory.
            UsageError: the sparsifier has raised an error.
        """
        with blaming(self.sparsifier, "learn or count"):
            counts: object = self.sparsifier.count(self.residual, self.step)
        return counts.cpu() if isinstance(counts, Tensor) else counts

    def spread(self, indices: Tensor, values: Tensor, selected: int) -> Tensor:
        """Returns the sum as a strided tensor of the gradient's shape: 0 where no rank has pushed.

        Args:
            indices: of the union of all ranks.
            values: the sums there.
            selected: elements that this rank has selected.
        """
        self.note_spread(selected, len(indices))
        # A withheld gradient has left the residual as it was, perhaps on a device.
        if self.feedback.is_norm_due and not self.is_withheld:
            self.feedback.note_norm(self.residual.norm())
        total = torch.zeros(len(self.residual), dtype=values.dtype, device=values.device)
        total[indices] = values
        return total.view(self.shape)

    def note_spread(self, selected: int, union: int) -> None:
        """Counts the gradient's elements: all, those selected by this rank, and those in the union."""
        self.statistics.count_elements(whole=len(self.residual), selected=selected, union=union)

    def exact_indices(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The indices of all ``exact`` ranges, ascending."""
        return np.concatenate([np.arange(begin, end) for begin, end in self.exact])


class Withheld(Gradient):
    """A gradient that is thrown away, on the CPU: it takes part in the exchange, because other ranks wait for
    it. Nothing of the gradient or the residual is pushed, and the residual stays as it is. Its sparsifier
    counts and learns as others do, because the counts of all ranks must be of the same thresholds.
    """

    is_withheld: ClassVar[bool] = True

    def select(self, tensor: Tensor) -> Tensor:
        """Returns no index."""
        return torch.empty(0, dtype=torch.int64, device="cpu")

    def take(self, indices: Tensor) -> Tensor:
        """Returns zeros, for indices that other ranks have selected."""
        return torch.zeros(len(indices), dtype=self.dtype, device="cpu")

    def put_back(self, indices: Tensor, pushed: Tensor) -> None:
        """Does nothing: nothing was taken."""

    def keep_rounding(self, indices: Tensor, errors: Tensor) -> None:
        """Keeps nothing."""


@contextlib.contextmanager
def blaming(sparsifier: Sparsifier, where: str) -> Iterator[None]:
    """Context for calls of a sparsifier: its errors name its class.

    Raises:
        TensorError: there is no memory.
        UsageError: the sparsifier has raised another error.
    """
    name = type(sparsifier).__name__
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise TensorError(
            f"tensor {sparsifier.task.name!r}: no memory for {name} in {where}: {error}; free some, or set "
            "sync.sparsifier to none on all workers"
        ) from error
    except Exception as error:
        raise UsageError(f"{name}: {error!r} in {where}; correct the sparsifier") from error


def kind_of(thing: object) -> str:
    """Returns what a sparsifier has returned, in words."""
    if isinstance(thing, Tensor):
        return f"{thing.dtype} of shape {tuple(thing.shape)} on {thing.device}"
    return type(thing).__name__


def check_indices(name: str, indices: object, size: int) -> None:
    """Checks what the sparsifier ``name`` has selected of ``size`` elements.

    Raises:
        UsageError: they are not unique ascending indices.
    """
    if (
        not isinstance(indices, Tensor)
        or not indices.is_cpu
        or (indices.dtype, indices.dim()) != (torch.int64, 1)
    ):
        got = kind_of(indices)
    elif len(indices) and (indices[0] < 0 or indices[-1] >= size):
        got = f"indices from {int(indices[0])} to {int(indices[-1])}"
    elif bool((indices[1:] <= indices[:-1]).any()):
        got = "indices that are not ascending"
    else:
        return
    raise UsageError(
        f"{name}.select: expected unique ascending indices, int64 [n], below {size}; got {got}; "
        "correct the sparsifier"
    )
