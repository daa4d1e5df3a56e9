"""Gradient clipping by norm or by value, for models whose gradients are sparse, dense or both.

Call it once the averages of all ranks are there: after ``optimizer.synchronize()``, or in a hook that
``optimizer.register_step_pre_hook`` has registered. Nothing is sent: ranks have equal averages, so they clip
alike. ``torch.nn.utils`` has the same functions, but they fail for sparse gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from zenps.errors import TensorError, UsageError

_EPSILON = 1e-6
"""torch.nn.utils.clip_grads_with_norm_ adds the same number to the norm."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place, so that the norm of all of them together is at most ``max_norm``.

    The norm is that of the gradients made dense. A sparse one is coalesced first, because duplicates of a row
    must be added before their norm is known; rows that it lacks are zeros, which add nothing.

    Args:
        parameters: those whose ``grad`` is clipped, strided or sparse COO; None is skipped.
        max_norm: of all gradients, after clipping.
        norm_type: the p of the p-norm, above 0; may be infinite.
        error_if_nonfinite: raise for a norm that is NaN or infinite, and change nothing but duplicates.
        foreach: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, a tensor of no dimensions.

    Raises:
        UsageError: ``norm_type`` is not above 0.
        TensorError: a gradient has another layout.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise UsageError(f"norm_type {norm_type:g}: expected more than 0, or infinity")
    values = _values(parameters)
    norm: Tensor = get_total_norm(values, norm_type, error_if_nonfinite, foreach)
    # No branch on the norm: that would wait for a GPU.
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for device, group in _by_device(values).items():
        if foreach is False:
            for each in group:
                each.mul_(factor.to(device))
        else:
            torch._foreach_mul_(group, factor.to(device))
    return norm


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Limits each element of the gradients, in place, to between ``-clip_value`` and ``clip_value``.

    Sparse gradients are coalesced first. Arguments and errors are those of :func:`clip_grad_norm_`.
    """
    limit = float(clip_value)
    for group in _by_device(_values(parameters)).values():
        if foreach is False:
            for each in group:
                each.clamp_(-limit, limit)
        else:
            torch._foreach_clamp_min_(group, -limit)
            torch._foreach_clamp_max_(group, limit)


def _values(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Returns the memory of all gradients that have any elements: of a sparse one, its values."""
    values = []
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout not in (torch.strided, torch.sparse_coo):
            raise TensorError(f"a gradient of layout {gradient.layout}: expected strided or sparse COO")
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        if gradient.numel():  # an infinite norm of nothing is an error
            values.append(gradient)
    return values


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device].append(tensor)
    return groups
