from __future__ import annotations

import logging

import pytest
import torch

from zenps.horovod.compression import Compression, warn_of_optimizer


@pytest.mark.parametrize(
    ("dtype", "travels_as"),
    [(torch.float64, torch.float16), (torch.bfloat16, torch.float16), (torch.int32, torch.int32)],
)
def test_fp16_restores_the_dtype(dtype: torch.dtype, travels_as: torch.dtype) -> None:
    compressed, context = Compression.fp16.compress(torch.tensor([1, 2], dtype=dtype))
    assert compressed.dtype == travels_as
    restored = Compression.fp16.decompress(compressed, context)
    assert restored.dtype == dtype
    assert restored.tolist() == [1, 2]


def test_an_optimizer_says_that_compression_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zenps.worker"):
        warn_of_optimizer(Compression.none)
        assert caplog.text == ""
        warn_of_optimizer(Compression.fp16)
    assert "FP16Compressor: gradients are pushed as they are; set sync.values to quantize them" in caplog.text
