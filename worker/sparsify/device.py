"""Selection on a device: gradient and residual stay there, and only selected elements are copied to the host.

A kernel passes over all elements, adds the gradient to the residual and finds the selected elements
(:mod:`zenps.kernels.gpu.threshold_compact`). PyTorch handles the selected elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zenps.errors import DeadlineError, TensorError, ZenPSError
from zenps.kernels.gpu.threshold_compact import greatest, threshold_compact
from zenps.sparsifiers.base import Above, Sparsifier, Sums

from ..encode.accelerator import Accelerator, DeviceStream
from .selection import Gradient, blaming, kind_of

# The initial capacity for selected elements: FEW, plus the larger of 1/PART of the searched elements and
# SURPLUS times the most that are wanted.
FEW, PART, SURPLUS = 4096, 16, 2


class Found(NamedTuple):
    """The selected elements, on the device.

    Attributes:
        indices: int64 ``[n]``, ascending.
        values: float32 ``[n]``, the sums there.
    """

    indices: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class DeviceGradient(Gradient):
    """A gradient that is sparsified in one step, on a device.

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
            indices = self.gpu.to_host(self._with_exact(found.indices))
        return self._sorted(indices)[0]

    def select_and_take(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        gradient, gpu = self._following(tensor), self.gpu
        with self._enqueued(gpu.pushing):
            found = self._find(gradient)
            taken = self._with_exact(found.indices)
            sums = self.residual[taken] if self.exact else found.values
            pushed, rounding = self._rounded(sums)
            indices = gpu.to_host(taken)
            values = gpu.to_host(pushed)
            is_finite = gpu.to_host(sums.isfinite().all())
        indices, origin = self._sorted(indices)
        if origin is not None:
            values = values[origin]
        self._remove(taken, is_finite, rounding)
        return indices, values

    def take(self, indices: Tensor) -> Tensor:
        residual, gpu = self.residual, self.gpu
        with self._enqueued(gpu.pulling):
            taken = indices.to(gpu.device)
            values = residual[taken]
            pushed, rounding = self._rounded(values)
            on_host = gpu.to_host(pushed)
            is_finite = gpu.to_host(values.isfinite().all())
        self._remove(taken, is_finite, rounding)
        return on_host

    def put_back(self, indices: Tensor, pushed: Tensor) -> None:
        with self._enqueued(self.gpu.pulling):
            super().put_back(indices.to(self.gpu.device), pushed.to(self.gpu.device))

    def keep_rounding(self, indices: Tensor, errors: Tensor) -> None:
        with self._enqueued(self.gpu.pulling):
            self.residual[indices.to(self.gpu.device)] += errors.to(self.gpu.device)

    def count(self) -> object:
        with self._enqueued(self.gpu.pulling):
            return super().count()

    def spread(self, indices: Tensor, values: Tensor, selected: int) -> Tensor:
        self.note_spread(selected, len(indices))
        gpu, feedback = self.gpu, self.feedback
        norm = None
        with self._enqueued(gpu.pulling):
            if feedback.is_norm_due:
                norm = gpu.to_host(self.residual.norm())
            total = torch.zeros(len(self.residual), dtype=values.dtype, device=gpu.device)
            total[indices.to(gpu.device)] = values.to(gpu.device)
        if norm is not None:
            feedback.note_norm(norm)
        gpu.pulling.hand_over(total)
        return total.view(self.shape)

    def _following(self, tensor: Tensor) -> Tensor:
        """Returns the gradient, flat; the stream of pushes waits for it."""
        gradient = tensor.detach().resolve_neg().reshape(-1).contiguous()
        self.gpu.pushing.follow(gradient)
        return gradient

    @contextlib.contextmanager
    def _enqueued(self, stream: DeviceStream) -> Iterator[None]:
        """Context for work on a stream; at its end, waits for it, also after an error.

        Assign each copy to the host to a variable as soon as it is made: this keeps its memory until then.

        Raises:
            TensorError: the device has failed, for example for lack of memory.
            DeadlineError: the device has not finished in time.
        """
        try:
            try:
                with stream.current():
                    yield
            except DeadlineError:  # of a wait
                raise
            except BaseException:
                # Copies to pinned memory may be under way, and its pool lends it again after the error.
                with contextlib.suppress(Exception):
                    self.gpu.wait_for(stream.mark())
                raise
            self.gpu.wait_for(stream.mark())
        except ZenPSError:
            raise
        except Exception as error:  # of any class: CuPy also compiles kernels, and writes them to files
            raise TensorError(f"tensor {self.name!r} on {self.gpu.device}: {error}") from error

    def _find(self, gradient: Tensor) -> Found:
        """Adds the gradient to the residual, and selects from the elements that are not exact."""
        with self._exact_apart(gradient):
            return self._select(self._sums(gradient))

    def _select(self, sums: Sums) -> Found:
        """Selects from the elements that are not exact; the gradient is added to the residual."""
        sparsifier = self.sparsifier
        with blaming(sparsifier, "accumulate or select"):
            selection: object = sparsifier.select_on_device(sums, self.step)
            if not isinstance(selection, Above):
                got = kind_of(selection)
                raise TypeError(f"expected Above of select_on_device, got {got}")
            bounds = selection.bounds(len(sums.residual))
        most = selection.most
        thresholds = selection.thresholds()
        found = self._above(sums, next(thresholds), bounds, most or 0)
        for threshold in thresholds:
            if len(found.indices) >= selection.least:
                break
            found = self._above(Sums(sums.residual, None), threshold, bounds, most or 0)
        if most is not None and len(found.indices) > most:
            chosen = greatest(found.values, most)
            return Found(found.indices[chosen], found.values[chosen])
        return found

    def _sums(self, gradient: Tensor) -> Sums:
        """Returns gradient and residual without the exact elements."""
        residual, size = self.residual, len(self.residual)
        rest = self._yet_to_add(gradient)
        self._hide_exact()
        if len(self.exact) == 1 and self.exact[0][1] == size:  # they are at the end, as in a bucket
            size = self.exact[0][0]
        elif self.exact and rest is not None:
            rest = rest.clone()
            for begin, end in self.exact:
                rest[begin:end] = 0
        return Sums(residual[:size], None if rest is None else rest[:size])

    def _yet_to_add(self, gradient: Tensor) -> Tensor | None:
        """Returns the gradient if the kernel adds it to the residual; None if the residual has it already."""
        if self.feedback.added_step == self.step.number:  # an earlier push of this step has failed
            return None
        if type(self.sparsifier).accumulate is Sparsifier.accumulate:
            return gradient
        with blaming(self.sparsifier, "accumulate or select"):
            self.sparsifier.accumulate(self.residual, gradient)
        self._note_added()
        return None

    def _note_added(self) -> None:
        self.feedback.added_step = self.step.number

    def _above(self, sums: Sums, threshold: float | Tensor, bounds: tuple[int, int], most: int) -> Found:
        """Returns the sums within ``bounds`` of a magnitude of at least ``threshold``."""
        launcher, (start, stop) = self.gpu.launcher, bounds
        capacity = min(stop - start, FEW + max((stop - start) // PART, SURPLUS * most))
        rows = threshold_compact(launcher, *sums, threshold, bounds, capacity, on_added=self._note_added)
        on_host = self.gpu.to_host(rows.count)
        self.gpu.wait_for(self.gpu.pushing.mark())
        count = int(on_host)
        if count <= capacity:
            return Found(rows.positions[:count], rows.values[:count, 0])
        behind = int(rows.positions[-1]) + 1, stop  # positions ascend, so the rest lies there
        more = threshold_compact(launcher, sums.residual, None, threshold, behind, count - capacity)
        indices = torch.cat([rows.positions, more.positions])
        return Found(indices, torch.cat([rows.values, more.values])[:, 0])

    def _with_exact(self, indices: Tensor) -> Tensor:
        exact = [torch.arange(*bounds, device=indices.device) for bounds in self.exact]
        return torch.cat([*exact, indices]) if exact else indices

    def _sorted(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sorts the indices of :meth:`_with_exact`.

        If too few elements are not zero, the sparsifier may have selected exact elements, which are zeros to
        it. Of two equal indices the first is kept, and exact ones come first.

        Returns:
            the indices, ascending and unique; and the place that each had, None if they were sorted already.
        """
        if not self.exact:
            return indices, None
        ascending, origin = np.unique(indices.numpy(), return_index=True)
        return torch.from_numpy(ascending), torch.from_numpy(origin)

    def _remove(self, taken: Tensor, is_finite: Tensor, rounding: Tensor) -> None:
        """Removes what is pushed from the residual, as on the CPU.

        A selection ends with this: if anything fails before, the elements are pushed next time.

        Args:
            taken: the indices of all pushed elements.
            is_finite: on the host: whether all pushed elements are finite.
            rounding: their rounding errors, which stay in the residual.
        """
        with self._enqueued(self.gpu.pulling):
            with blaming(self.sparsifier, "sent"):
                self.sparsifier.sent(taken)
            # One operation, so that a lack of memory cannot remove the elements without their errors. An
            # exact element may be there twice, see _sorted, with equal errors.
            self.residual[taken] = rounding
            if not bool(is_finite):
                self.residual.nan_to_num_(0, 0, 0)
        self.feedback.added_step = None
