"""Sparsifier savings: the bytes that ``sync.sparsifier`` would save of a training's dense gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .profile import Profile


def sparsifier_savings(
    found: Sequence[Profile], workers: int, density: float, least_bytes: int
) -> tuple[float, dict[str, float]]:
    """Returns what each worker pushes and pulls of large dense gradients in a step: whole, and by sparsifier.

    Args:
        found: the tensors.
        workers: their number.
        density: ``sync.density``.
        least_bytes: ``sparsifier.least_bytes``.
    """
    large = [
        profile
        for profile in found
        if not profile.is_sparse and profile.rows * profile.item_bytes >= least_bytes
    ]
    sizes = [(profile.rows, profile.item_bytes) for profile in large]
    return sum(2.0 * elements * item_bytes for elements, item_bytes in sizes), {
        "topk": sum(own_bytes(*size, workers, density) for size in sizes),
        "exdyna": sum(agreed_bytes(*size, workers, density) for size in sizes),
    }


def own_bytes(elements: int, item_bytes: int, workers: int, density: float) -> float:
    """Returns what a worker pushes and pulls if each pushes its own elements, and all are different."""
    union = min(workers * density, 1.0)
    pushed = elements * density * (item_bytes + position_bytes(density))
    return pushed + elements * union * (item_bytes + position_bytes(union))


def agreed_bytes(elements: int, item_bytes: int, workers: int, density: float) -> float:
    """Returns what a worker pushes and pulls if all agree on the elements first."""
    pulled = elements * density * (item_bytes + position_bytes(density))
    return pulled + elements * density * (item_bytes + position_bytes(density) / workers)


def position_bytes(density: float) -> float:
    """Returns the entropy of a position among elements that are selected at random."""
    left = 1 - density
    bits = -math.log2(density) - (left * math.log2(left) / density if left else 0.0)
    return bits / 8
