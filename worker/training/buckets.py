"""Small dense gradients, fused into buckets that are pushed as one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter


class Bucket:
    """Some dense parameters of one dtype and device; its tensor is their gradients, end to end.

    After them comes one element for each parameter that says whether this rank has a gradient for it,
    so that a parameter that no rank used keeps ``grad = None`` and its optimizer leaves it alone.

    Args:
        name: of the round.
        parameters: of one dtype, on one device.
        run: elements that are rounded by a common scale. Beside larger ones these could become 0, so each
            of them is the first of a run.
    """

    def __init__(self, name: str, parameters: Sequence[Parameter], run: int = 1) -> None:
        self.name = name
        self.parameters = parameters
        self._run = run
        self._present_from = -(-sum(parameter.numel() for parameter in parameters) // run) * run
        self.waiting_for = set(parameters)
        """Parameters whose gradient backward has not brought since the last push."""

    def fused(self) -> Tensor:
        """The gradients as they are now, filled up to whole runs, and what comes after them; else zeros."""
        first = self.parameters[0]
        length = self._present_from + len(self.parameters) * self._run
        flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        begin = 0
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                flat[begin : begin + parameter.numel()].view(parameter.shape).copy_(parameter.grad)
                flat[self._present_from + index * self._run] = 1
            begin += parameter.numel()
        return flat

    def spread(self, flat: Tensor) -> None:
        """Makes the pulled tensor the parameters' gradients; they share its memory."""
        present = flat[self._present_from :: self._run].tolist()
        begin = 0
        for index, parameter in enumerate(self.parameters):
            piece = flat[begin : begin + parameter.numel()].view(parameter.shape)
            parameter.grad = piece if present[index] else None
            begin += parameter.numel()


def fuse(prefix: str, parameters: Iterable[Parameter], limit_bytes: int, run: int) -> list[Bucket]:
    """Buckets of at most ``limit_bytes``, or of one parameter, in the order given, by dtype and device.

    ``run`` is as for :class:`Bucket`.
    """
    groups: list[list[Parameter]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], int]] = {}
    for parameter in parameters:
        size = parameter.numel() * parameter.dtype.itemsize
        kind = (parameter.dtype, parameter.device)
        group, used = open_groups.get(kind, ([], limit_bytes))
        if used + size > limit_bytes:
            group, used = [], 0
            groups.append(group)
        group.append(parameter)
        open_groups[kind] = (group, used + size)
    return [Bucket(f"{prefix}/{index}", group, run) for index, group in enumerate(groups)]
