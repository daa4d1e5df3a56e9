"""Selection on a device: gradient and residual stay there, and what is selected comes to the host.

The pass over all elements, which adds the gradient to the residual and finds what is selected, is a kernel
(:mod:`zenps.kernels.gpu.threshold_compact`). What concerns the selected elements alone is done by PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zenps.errors import TensorError, ZenPSError
from zenps.kernels.gpu.threshold_compact import greatest, threshold_compact
from zenps.sparsifiers.base import Above, Sparsifier, Sums

from ..encode.accelerator import Accelerator, Lane
from .selection import Gradient, blaming, kind_of

# The initial capacity for selected elements: FEW, plus the larger of 1/PART of the searched elements and
# SURPLUS times the most that are wanted.
FEW, PART, SURPLUS = 4096, 16, 2


class Found(NamedTuple):
    """What was selected, on the device.

    Attributes:
        indices: int64 ``[n]``, ascending.
        values: float32 ``[n]``, the sums there.
    """

    indices: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class DeviceGradient(Gradient):
    """What is sparsified in one step, on a device.

    Every method returns when the device has done its work: then another stream may use the residual.

    Attributes:
        gpu: the device.
    """

    on_device: ClassVar[bool] = True

    gpu: Accelerator

    def select(self, tensor: Tensor) -> Tensor:
        gradient = self._following(tensor)
        with self._enqueued(self.gpu.pushing):
            found = self._find(gradient)
            for begin, end in self.exact:
                self.residual[begin:end] = gradient[begin:end]
            indices = self.gpu.to_host(self._with_exact(found.indices))
        return self._unique(indices)[0]

    def select_and_take(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        gradient = self._following(tensor)
        with self._enqueued(self.gpu.pushing):
            found = self._find(gradient)
            pushed = found.values.to(self.dtype)
            left = (found.values - pushed).nan_to_num_(0, 0, 0)
            exact = [gradient[begin:end] for begin, end in self.exact]
            is_finite = torch.cat([*exact, found.values]).isfinite().all()
            taken = self._with_exact(found.indices)
            indices = self.gpu.to_host(taken)
            values = self.gpu.to_host(torch.cat([*exact, pushed]))
            told = self.gpu.to_host(is_finite)
        indices, first = self._unique(indices)
        if first is not None:
            values = values[first]
        self._clean_up(taken, told, found.indices, left)
        return indices, values

    def take(self, indices: Tensor) -> Tensor:
        residual, gpu = self.residual, self.gpu
        with self._enqueued(gpu.pulling):
            there = indices.to(gpu.device)
            values = residual[there]
            pushed = values.to(self.dtype)
            left = (values - pushed).nan_to_num_(0, 0, 0)
            taken, told = gpu.to_host(pushed), gpu.to_host(values.isfinite().all())
        self._clean_up(there, told, there, left)
        return taken

    def keep_rounding(self, indices: Tensor, errors: Tensor) -> None:
        with self._enqueued(self.gpu.pulling):
            self.residual[indices.to(self.gpu.device)] += errors.to(self.gpu.device)

    def count(self) -> object:
        with self._enqueued(self.gpu.pulling):
            counts = super().count()
            return counts.cpu() if isinstance(counts, Tensor) else counts

    def spread(self, indices: Tensor, values: Tensor, selected: int) -> Tensor:
        self.note_spread(selected, len(indices))
        gpu = self.gpu
        with self._enqueued(gpu.pulling):
            total = torch.zeros(len(self.residual), dtype=values.dtype, device=gpu.device)
            total[indices.to(gpu.device)] = values.to(gpu.device)
        gpu.pulling.hand_over(total)
        return total.view(self.shape)

    def _following(self, tensor: Tensor) -> Tensor:
        """Returns the gradient, flat; the stream of pushes waits for it."""
        gradient = tensor.detach().reshape(-1)
        self.gpu.pushing.follow(gradient)
        return gradient

    @contextlib.contextmanager
    def _enqueued(self, lane: Lane) -> Iterator[None]:
        """Context for work on a stream; at its end, waits for it.

        Raises:
            TensorError: the device has failed, such as for want of memory.
            DeadlineError: the device has not finished in time.
        """
        try:
            with lane.current():
                yield
            self.gpu.wait_for(lane.mark())
        except ZenPSError:
            raise
        except RuntimeError as error:
            raise TensorError(f"tensor {self.name!r} on {self.gpu.device}: {error}") from error

    def _find(self, gradient: Tensor) -> Found:
        """Adds the gradient to the residual, and selects of the elements that are not exact."""
        sums, sparsifier = self._sums(gradient), self.sparsifier
        with blaming(sparsifier, "accumulate or select"):
            selection: object = sparsifier.select_on_device(sums, self.step)
            if not isinstance(selection, Above):
                got = kind_of(selection)
                raise TypeError(f"expected Above of select_on_device, got {got}")
            bounds = selection.bounds(len(sums.residual))
        most = selection.most
        thresholds = selection.thresholds()
        indices, values = self._above(sums, next(thresholds), bounds, most or 0)
        for threshold in thresholds:
            if len(indices) >= selection.least:
                break
            indices, values = self._above(Sums(sums.residual, None), threshold, bounds, most or 0)
        if most is not None and len(indices) > most:
            chosen = greatest(values, most)
            indices, values = indices[chosen], values[chosen]
        return Found(indices, values)

    def _sums(self, gradient: Tensor) -> Sums:
        """Returns gradient and residual without the exact elements, which the sparsifier must not choose."""
        residual, size = self.residual, len(self.residual)
        added: Tensor | None = gradient
        if self.feedback.added_step == self.step.number:  # an earlier push of this step has failed
            added = None
        elif type(self.sparsifier).accumulate is not Sparsifier.accumulate:
            with blaming(self.sparsifier, "accumulate or select"):
                self.sparsifier.accumulate(residual, gradient)
            self._note_added()
            added = None
        for begin, end in self.exact:
            residual[begin:end] = 0
        if len(self.exact) == 1 and self.exact[0][1] == size:  # those of a bucket, which need no copy
            size = self.exact[0][0]
        elif self.exact and added is not None:
            added = added.clone()
            for begin, end in self.exact:
                added[begin:end] = 0
        return Sums(residual[:size], None if added is None else added[:size])

    def _note_added(self) -> None:
        self.feedback.added_step = self.step.number

    def _above(
        self, sums: Sums, threshold: float | Tensor, bounds: tuple[int, int], most: int
    ) -> tuple[Tensor, Tensor]:
        """Returns indices and values of the sums of a magnitude of at least ``threshold``."""
        launcher, (start, stop) = self.gpu.launcher, bounds
        room = min(stop - start, FEW + max((stop - start) // PART, SURPLUS * most))
        rows = threshold_compact(launcher, *sums, threshold, bounds, room, on_added=self._note_added)
        told = self.gpu.to_host(rows.count)
        self.gpu.wait_for(self.gpu.pushing.mark())
        count = int(told)
        if count <= room:
            return rows.positions[:count], rows.values[:count, 0]
        rest = int(rows.positions[-1]) + 1, stop  # in order, so the others lie behind
        more = threshold_compact(launcher, sums.residual, None, threshold, rest, count - room)
        return torch.cat([rows.positions, more.positions]), torch.cat([rows.values, more.values])[:, 0]

    def _with_exact(self, indices: Tensor) -> Tensor:
        exact = [torch.arange(*bounds, device=indices.device) for bounds in self.exact]
        return torch.cat([*exact, indices]) if exact else indices

    def _unique(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sorts the indices of :meth:`_with_exact`, drops duplicates, and returns where each index came from.

        If too few elements are not zero, the sparsifier may have selected exact elements, which are zeros to
        it. Of two equal indices the first is kept, and exact ones come first.
        """
        if not self.exact:
            return indices, None
        ascending, first = np.unique(indices.numpy(), return_index=True)
        return torch.from_numpy(ascending), torch.from_numpy(first)

    def _clean_up(self, taken: Tensor, is_finite: Tensor, where: Tensor, left: Tensor) -> None:
        """Ends a selection as on the CPU.

        Elements leave the residual at the very end: if anything fails before, they are pushed next time.

        Args:
            taken: the indices of all pushed elements.
            is_finite: on the host: whether all pushed elements are finite.
            where: the indices of the pushed elements that are not exact.
            left: their rounding errors, which stay in the residual.
        """
        with self._enqueued(self.gpu.pulling):
            if not bool(is_finite):
                self.residual.nan_to_num_(0, 0, 0)
            with blaming(self.sparsifier, "sent"):
                self.sparsifier.sent(taken)
            self.residual[where] = left
