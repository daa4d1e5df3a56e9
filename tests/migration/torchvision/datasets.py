from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def MNIST(root: str, train: bool, download: bool = False, transform: object = None) -> TensorDataset:
    """Random digits: each is one of ten patterns, with noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)
    digits = torch.randint(10, (1024 if train else 256,), generator=generator)
    return TensorDataset(patterns[digits] + 0.3 * torch.randn(len(digits), 1, 28, 28), digits)
