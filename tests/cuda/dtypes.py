"""Dtypes of gradients in kernel tests, and the integers that show their bits."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number."""

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
