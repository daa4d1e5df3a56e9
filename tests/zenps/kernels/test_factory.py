"""Selection of the kernel backend: where native kernels were built, and where they were not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zenps.buffers import BufferPool
from zenps.errors import ConfigError
from zenps.kernels import factory
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.factory import make_kernels
from zenps.kernels.native.backend import NativeKernels
from zenps.kernels.native.library import find_library

POOL = BufferPool(0)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(factory, "find_library", lambda: None)
    factory._warn_once.cache_clear()
    yield
    factory._warn_once.cache_clear()


def test_native_kernels_are_used_where_they_were_built() -> None:
    assert find_library(), "no C compiler was there when ZenPS was installed: these tests need one"
    assert isinstance(make_kernels(POOL), NativeKernels)
    assert isinstance(make_kernels(POOL, "native"), NativeKernels)
    assert isinstance(make_kernels(POOL, "torch"), CpuKernels)


def test_without_them_the_log_says_once_that_torch_s_are_used(
    not_built: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(make_kernels(POOL, "torch"), CpuKernels)
    assert caplog.messages == []
    assert isinstance(make_kernels(POOL), CpuKernels)
    make_kernels(POOL)
    (message,) = caplog.messages
    assert "install a C compiler" in message


def test_without_them_a_job_that_wants_them_is_refused(not_built: None) -> None:
    with pytest.raises(ConfigError, match=r"kernels.backend = 'native'.*install a C compiler"):
        make_kernels(POOL, "native")
