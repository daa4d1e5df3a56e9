from __future__ import annotations

from torch import nn


def resnet50(num_classes: int) -> nn.Module:
    """A small network with the interface of a large one, and a buffer as batch normalization has."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 7, stride=8), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, num_classes),
    )  # fmt: skip
