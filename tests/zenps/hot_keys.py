"""Unions of workers that share their hot rows, for tests of costs."""

from __future__ import annotations


def hot_keys(density: float, overlap: float, workers: int) -> tuple[float, ...]:
    """``Tensor.unions`` where each worker draws each of the same rows with probability ``overlap``.

    Then that is the overlap ratio of any two workers (Zen §2.2), and the union of k has (1 - (1 - p)ᵏ) ÷ p
    times the rows of one. At overlap 0 all rows differ.
    """
    counts = [min(1 << level, workers) for level in range(1, (workers - 1).bit_length() + 1)]
    # Summed as a series: the closed form loses its digits where p is small.
    ratios = [sum((1 - overlap) ** i for i in range(k)) for k in counts]
    return tuple(min(density * ratio, 1.0) for ratio in ratios)
