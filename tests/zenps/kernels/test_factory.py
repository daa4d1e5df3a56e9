"""Selection of the kernel backend: where native kernels were built, and where they cannot be loaded."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.zenps.kernels.native_library import build_native, c_compiler
from zenps.buffers import BufferPool
from zenps.errors import ConfigError
from zenps.kernels import factory
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.factory import make_kernels
from zenps.kernels.native import bits, library
from zenps.kernels.native.backend import NativeKernels
from zenps.kernels.native.library import find_library, load_library
from zenps.kernels.native.magnitudes import find
from zenps.kernels.native.positions import look_up

POOL = BufferPool(0)
CACHES: tuple[functools._lru_cache_wrapper[object], ...] = (
    library.open_library,
    library.native_library,
    factory._warn_once,
)


def cut_off(tmp_path: Path) -> str:
    (tmp_path / "short.so").write_bytes(build_native().read_bytes()[:60])
    return str(tmp_path / "short.so")


def without_symbols(tmp_path: Path) -> str:
    (tmp_path / "older.c").write_text("int zenps_older;\n")
    command = [c_compiler(), "-shared", "-fPIC", str(tmp_path / "older.c"), "-o", str(tmp_path / "older.so")]
    subprocess.run(command, check=True, timeout=60)
    return str(tmp_path / "older.so")


@pytest.fixture(params=[None, cut_off, without_symbols], ids=["not built", "cut off", "older"])
def unusable(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """No library, or one that cannot be loaded. Returns what messages say of it."""
    path = request.param and request.param(tmp_path)
    monkeypatch.setattr(library, "find_library", lambda: path)
    for cache in CACHES:
        cache.cache_clear()
    yield {None: "were not built", cut_off: "file too short", without_symbols: "zenps_version"}[request.param]
    for cache in CACHES:
        cache.cache_clear()


def test_native_kernels_are_used_where_they_were_built() -> None:
    assert find_library(), "no C compiler was there when ZenPS was installed: these tests need one"
    assert isinstance(make_kernels(POOL), NativeKernels)
    assert isinstance(make_kernels(POOL, "native"), NativeKernels)
    assert isinstance(make_kernels(POOL, "torch"), CpuKernels)


def test_without_them_the_log_says_once_that_torch_s_are_used(
    unusable: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(make_kernels(POOL, "torch"), CpuKernels)
    assert caplog.messages == []
    assert isinstance(make_kernels(POOL), CpuKernels)
    make_kernels(POOL)
    (message,) = caplog.messages
    assert unusable in message
    assert "install a C compiler" in message


def test_without_them_a_job_that_wants_them_is_refused(unusable: str) -> None:
    with pytest.raises(ConfigError, match=rf"kernels.backend = 'native'.*{unusable}.*install a C compiler"):
        make_kernels(POOL, "native")


def test_without_them_codecs_layouts_and_sparsifiers_work(unusable: str) -> None:
    assert bits.set_bits(np.array([5], np.uint8), 2).tolist() == [0, 2]
    assert bits.mark_bits(np.array([0, 2]), 8).tolist() == [5]
    assert look_up(torch.zeros(1, dtype=torch.int32), 0, 1, torch.zeros(1, dtype=torch.int64)) is None
    assert find(np.array([1.0, -3.0]), 2.0).tolist() == [1]


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plan and arguments may have another layout there."""
    other = tmp_path / "other.so"
    other.write_bytes(build_native().read_bytes())
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    with pytest.raises(ImportError, match=f"has version {library.VERSION - 1}, expected {library.VERSION}"):
        load_library(str(other))
