"""MiCRO sparsifier: exclusive partitions of equal size, which never change.

Yoon and Oh, "MiCRO: near-zero cost gradient sparsification for scaling and accelerating distributed DNN
training", HiPC 2023 (https://arxiv.org/abs/2310.00967).
"""

from __future__ import annotations

from .exclusive import Exclusive


class Micro(Exclusive):
    """The elements above a threshold of one of ``world`` equal partitions."""
