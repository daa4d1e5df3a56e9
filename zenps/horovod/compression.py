"""Gradient compression as in Horovod and BytePS: casts floating-point tensors to float16 for the transfer."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger("zenps.worker")


class Compressor(Protocol):
    """How a tensor is compressed before it is pushed, and restored afterwards."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the compressed tensor, and what :meth:`decompress` needs to restore it."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, context: torch.dtype | None) -> Tensor:
        """Restores what :meth:`compress` has returned."""
        ...


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: torch.dtype | None) -> Tensor:
        """Returns the tensor itself."""
        return tensor


class FP16Compressor:
    """Casts floating-point tensors to float16, and their sums back. Other dtypes stay as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype | None]:
        """Returns the tensor as float16, and its dtype."""
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: torch.dtype | None) -> Tensor:
        """Returns the tensor in the dtype that it had before."""
        return tensor if context is None else tensor.to(context)


class Compression:
    """The compressors by the names that Horovod and BytePS give them."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor


def warn_of_optimizer(compression: type[Compressor]) -> None:
    """Logs that an optimizer's gradients are not compressed by this argument, but by a setting."""
    if compression is not Compression.none:
        logger.warning(
            "compression=%s: gradients are pushed as they are; set sync.values to quantize them",
            compression.__name__,
        )
