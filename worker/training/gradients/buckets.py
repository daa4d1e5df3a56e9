"""Gradient buckets: small dense gradients are fused and pushed as one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from ...core.request import Parts


class Bucket:
    """Dense parameters of one dtype and device, whose gradients travel end to end in one tensor.

    After the gradients comes one presence element for each parameter: 1 if this rank has a gradient for it.
    A parameter that no rank used keeps ``grad = None``, so its optimizer does not change it.

    Args:
        name: unique among the buckets of an optimizer.
        parameters: of one dtype, on one device.
        run: elements that are quantized by a common scale. Each presence element begins a run, because
            beside larger values it could be rounded to 0.
        sparsifies: True if gradients are sparsified.

    Attributes:
        is_sparsifiable: False for parameters of one dimension, which are never thinned out.
        is_on_gpu: True if backward may compute gradients on several streams: see :meth:`note_stream`.
        parts: the parameters' gradients in the tensor, with their presence elements.
        exact: the ranges of the tensor that are never thinned out: the presence elements.
    """

    def __init__(
        self, name: str, parameters: Sequence[Parameter], run: int = 1, sparsifies: bool = False
    ) -> None:
        self.name = name
        self.parameters = parameters
        self.is_sparsifiable = sparsifies and parameters[0].dim() > 1
        ranges = list(pairwise(accumulate((each.numel() for each in parameters), initial=0)))
        begin = -(-ranges[-1][1] // run) * run
        flags = range(begin, begin + len(parameters) * run, run)
        self.parts = Parts(ranges, slice(flags.start, flags.stop, run))
        self.exact = ((flags.start, flags.stop),)
        self._places = list(zip(parameters, (slice(*each) for each in ranges), flags, strict=True))
        """The elements and the presence element of each parameter."""
        self.waiting_for = set(parameters)
        """Parameters whose gradient backward has not computed in this step."""
        self.is_on_gpu = parameters[0].is_cuda
        self._streams: set[torch.cuda.Stream] = set()
        """Those on which gradients were computed since the last push."""

    def note_stream(self) -> None:
        """Notes that a gradient was computed on the current stream. :meth:`fused` waits for it."""
        self._streams.add(torch.cuda.current_stream(self.parameters[0].device))

    def fused(self, scale: float = 1.0) -> Tensor:
        """Returns the gradients times ``scale``, padded to whole runs, then the presence elements."""
        if self._streams:
            self._follow_streams()
        first, flags = self.parameters[0], self.parts.flags
        flat = torch.zeros(flags.stop, dtype=first.dtype, device=first.device)
        for parameter, place, flag in self._places:
            if parameter.grad is not None:
                # Ranks agreed that it is dense: a table may have been tied to a dense layer at first.
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                flat[place].view(parameter.shape).copy_(gradient)
                flat[flag] = 1
        if scale != 1:
            flat[: flags.start] *= scale
        return flat

    def add_presence(self, fused: Tensor, residual: Tensor) -> None:
        """Makes parameters present that have a residual, which may be pushed in any step.

        Args:
            fused: the gradients and presence elements.
            residual: of this bucket, flat.
        """
        for parameter, place, flag in self._places:
            if parameter.grad is None and parameter.requires_grad and residual[place].any():
                fused[flag] = 1

    def _follow_streams(self) -> None:
        current = torch.cuda.current_stream(self.parameters[0].device)
        if others := self._streams - {current}:
            for stream in others:
                current.wait_stream(stream)
            for gradient in [each.grad for each in self.parameters if each.grad is not None]:
                # The allocator must not reuse its memory on its own stream before it is copied here.
                for part in (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,):
                    part.record_stream(current)
        self._streams.clear()

    def spread(self, flat: Tensor) -> None:
        """Makes the pulled tensor the parameters' gradients. Contiguous parameters' share its memory."""
        present = flat[self.parts.flags].tolist()
        for (parameter, place, _), is_present in zip(self._places, present, strict=True):
            gradient = flat[place].view(parameter.shape)
            parameter.grad = laid_out_as(parameter, gradient) if is_present else None


def fuse(
    prefix: str, parameters: Iterable[Parameter], limit_bytes: int, run: int, sparsifies: bool = False
) -> list[Bucket]:
    """Fills buckets of one dtype and device in the order given.

    Args:
        prefix: of the buckets' names.
        limit_bytes: of a bucket; a larger parameter gets a bucket of its own.
        run, sparsifies: as for :class:`Bucket`. Parameters of one dimension then get buckets of their own.
    """
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device, bool], tuple[list[Parameter], int]] = {}
    for parameter in parameters:
        size = parameter.numel() * parameter.dtype.itemsize
        kind = (parameter.dtype, parameter.device, sparsifies and parameter.dim() > 1)
        group, used = open_groups.get(kind, ([], limit_bytes))
        if used + size > limit_bytes:
            group, used = [], 0
            groups.append(group)
        group.append(parameter)
        open_groups[kind] = (group, used + size)
    return [Bucket(f"{prefix}/{index}", group, run, sparsifies) for index, group in enumerate(groups)]


def laid_out_as(parameter: Parameter, gradient: Tensor) -> Tensor:
    """Returns a contiguous gradient in the memory layout of its parameter, as autograd computes it.

    Fused optimizers on the CPU pair elements by their place in memory, whatever the strides are.
    """
    return gradient if parameter.is_contiguous() else torch.empty_like(parameter).copy_(gradient)


def clip_factor(buckets: Iterable[Bucket], most_norm: float) -> float:
    """Returns the factor, at most 1, that limits the norm of all gradients to ``most_norm``."""
    gradients = [each.grad for bucket in buckets for each in bucket.parameters if each.grad is not None]
    # A table that was tied to a dense layer at first may have a sparse one.
    values = [each.coalesce()._values() if each.is_sparse else each for each in gradients]
    norm = float(torch.nn.utils.get_total_norm(values)) if values else 0.0
    return min(1.0, most_norm / norm) if norm else 1.0
