"""The launcher for CUDA devices, with a CuPy that only records what it is asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zenps.errors import ConfigError
from zenps.kernels.gpu.cupy import CupyLauncher
from zenps.kernels.gpu.sources import digest

STREAM = 0x1234


class FakeCupy:
    """CuPy's names that the launcher uses."""

    def __init__(self) -> None:
        self.compiled: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.launched: list[tuple[str, tuple[Any, ...]]] = []

    def RawModule(self, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]) -> Any:
        assert "__global__" in code
        self.compiled.append((name_expressions, options))

        def get_function(expression: str) -> Any:
            assert expression in name_expressions

            def launch(grid: tuple[int], block: tuple[int], words: tuple[Any, ...], stream: Any) -> None:
                assert stream.ptr == STREAM
                self.launched.append((expression, (grid, block, words)))

            return launch

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return fake


def test_a_kernel_is_compiled_once_and_alone_when_it_is_first_launched(cupy: FakeCupy) -> None:
    launcher = CupyLauncher()
    assert cupy.compiled == []
    numbers = torch.zeros(3, dtype=torch.int32)
    for _ in range(2):
        launcher.launch(
            "scatter", "gather_rows<uint32, int64>", 2, 64, (numbers, numbers, numbers, 5, numbers)
        )
    launcher.launch("scatter", "gather_rows<uint64, int64>", 1, 64, (numbers, numbers, numbers, 5, numbers))
    assert [names for names, _ in cupy.compiled] == [
        ("gather_rows<uint32, int64>",),
        ("gather_rows<uint64, int64>",),
    ]
    assert all(f"-DSOURCES_{digest()}" in options for _, options in cupy.compiled)
    address = numbers.data_ptr()
    assert cupy.launched[0] == (
        "gather_rows<uint32, int64>",
        ((2,), (64,), (address, address, address, 5, address)),
    )
    assert len(cupy.launched) == 3


def test_a_struct_is_passed_by_value(cupy: FakeCupy) -> None:
    """As an array of one item, whose bytes CuPy copies to the parameter."""
    numbers = torch.zeros(3, dtype=torch.int64)
    CupyLauncher().launch("scatter", "gather_rows<uint64, int64>", 1, 64, ((5, numbers, -1), numbers))
    struct, address = cupy.launched[0][1][2]
    assert (struct.size, struct.nbytes, address) == (1, 24, numbers.data_ptr())
    assert struct.tobytes() == np.array([5, address, -1], dtype=np.int64).tobytes()


def test_nothing_is_compiled_for_an_empty_grid(cupy: FakeCupy) -> None:
    CupyLauncher().launch("scatter", "gather_rows<uint32, int64>", 0, 64, (torch.zeros(0),))
    assert (cupy.compiled, cupy.launched) == ([], [])


def test_a_missing_cupy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"CuPy; run `pip install cupy-cuda13x`"):
        CupyLauncher()
