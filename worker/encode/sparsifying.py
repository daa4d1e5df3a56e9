"""Gradient sparsification: a dense gradient travels as the elements that a sparsifier selects.

What is not selected stays in this rank's residual and is added to its next gradient (error feedback; Stich et
al., https://arxiv.org/abs/1809.07599). If values are also quantized, the rounding errors are in the same
residual.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zenps.config.settings import Config
from zenps.errors import UsageError
from zenps.sparsifiers.base import Above, Sparsifier, Task
from zenps.sparsifiers.registry import sparsifier_class

from ..core.request import Options, Request
from ..core.statistics import Elements, Statistics
from ..core.transfer import Transform
from .sparse import as_sparse


def make_sparsification(
    config: Config, rank: int, world: int, statistics: Statistics
) -> Sparsification | None:
    """Returns what thins out the gradients of one worker; None if they are pushed whole.

    Args:
        config: all settings.
        rank, world: of this worker.
        statistics: count the elements.
    """
    kind = sparsifier_class(config.sync.sparsifier)
    # At a density of 1 nothing is left out, and a residual would turn -0.0 into 0.0.
    if kind is None or config.sync.density == 1:
        return None
    return Sparsification(kind, config, rank, world, statistics)


class Sparsification:
    """Makes the transforms of one worker's gradients, by ``sync.density``.

    Args:
        kind: of the sparsifiers.
        config: all settings.
        rank, world: of this worker.
        statistics: count the elements.
    """

    def __init__(
        self, kind: type[Sparsifier], config: Config, rank: int, world: int, statistics: Statistics
    ) -> None:
        self._kind = kind
        self._config = config
        self._rank, self._world = rank, world
        self._statistics = statistics

    def transform(self, request: Request, step: int) -> Sparsified | None:
        """Returns the transform of a gradient; None for a tensor that is pushed whole.

        Args:
            request: of which the tensor is on the CPU, or will be copied there before.
            step: of the tensor, from 0; the same on all ranks.

        Raises:
            TensorError: there is no memory for the residual.
        """
        tensor, name, options = request
        if options.residuals is None or not self._is_thinned(tensor, options):
            return None
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        feedback = options.residuals.feedback(name, tensor.numel(), dtype)
        if feedback.sparsifier is None:
            config = self._config
            task = Task(name, tensor.numel(), self._rank, self._world, config.sync.seed, config.sparsifier)
            feedback.sparsifier = self._kind(task)
        return Sparsified(
            tensor.shape,
            options.exact,
            feedback.sparsifier,
            feedback.residual,
            step,
            self._config.sync.density,
            self._statistics,
        )

    def _is_thinned(self, tensor: Tensor, options: Options) -> bool:
        return (
            options.is_sparsifiable
            and tensor.layout == torch.strided
            and tensor.dtype.is_floating_point
            and tensor.nbytes >= max(self._config.sparsifier.least_bytes, 1)
        )


class Sparsified(Transform):
    """Converts one dense gradient to the selected elements of the gradient and the residual.

    Args:
        shape: of the gradient.
        exact: ranges of elements that are selected in any case.
        sparsifier: selects.
        residual: ``[elements]``, float32 or float64, on the CPU; changed by :meth:`apply`.
        step: of the tensor.
        density: for the sparsifier.
        statistics: count the elements.
    """

    def __init__(
        self,
        shape: torch.Size,
        exact: Sequence[tuple[int, int]],
        sparsifier: Sparsifier,
        residual: Tensor,
        step: int,
        density: float,
        statistics: Statistics,
    ) -> None:
        self._shape = shape
        self._exact = exact
        self._sparsifier = sparsifier
        self._residual = residual
        self._step = step
        self._density = density
        self._statistics = statistics
        self._selected = 0

    def apply(self, tensor: Tensor) -> Tensor:
        """Returns the selected elements: sparse COO of one dimension, coalesced, of the gradient's dtype.

        Raises:
            UsageError: the sparsifier has returned indices that it must not return.
        """
        residual = self._residual
        gradient = tensor.detach().reshape(-1)
        residual += gradient
        for begin, end in self._exact:
            residual[begin:end] = 0  # the sparsifier must not choose these instead of others
        indices = self._select()
        if self._exact:
            ranges = [np.arange(begin, end) for begin, end in self._exact]
            indices = torch.from_numpy(np.union1d(indices.numpy(), np.concatenate(ranges)))
            for begin, end in self._exact:
                residual[begin:end] = gradient[begin:end]
        self._selected = len(indices)
        values = residual[indices]
        pushed = values.to(tensor.dtype)
        # NaN and infinite elements are pushed, but not kept: they would come back in every later step.
        residual[indices] = (values - pushed).nan_to_num_(0, 0, 0)
        return as_sparse(indices, pushed, torch.Size([len(residual)]), 1)

    def undo(self, result: Tensor) -> Tensor:
        """Returns the sum as a strided tensor: 0 where no rank has pushed."""
        indices, values = result._indices()[0], result._values()
        self._statistics.count_elements(Elements(len(self._residual), self._selected, len(indices)))
        total = torch.zeros(len(self._residual), dtype=values.dtype, device=values.device)
        total[indices] = values
        return total.view(self._shape)

    def _select(self) -> Tensor:
        selection = self._sparsifier.select(self._residual, self._step, self._density)
        if isinstance(selection, Above):
            return selection.indices(self._residual)
        self._check(selection)
        return selection

    def _check(self, indices: Tensor) -> None:
        name, size = type(self._sparsifier).__name__, len(self._residual)
        if indices.dtype != torch.int64 or indices.dim() != 1:
            got = f"{indices.dtype} of shape {tuple(indices.shape)}"
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
