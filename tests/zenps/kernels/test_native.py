"""Native kernels: the bits of torch's whatever the keys are, and nothing outside their buffers is touched.

:mod:`.test_native_sanitizers` runs these tests again, under sanitizers.
"""

from __future__ import annotations

import re
import threading
from ctypes import byref, c_int64
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.host.build import Sanitizer
from tests.zenps.kernels.native_library import EAGER, SANITIZER, SOURCES, build_native
from zenps.buffers import BufferPool
from zenps.errors import TensorError
from zenps.kernels.base import ACCUMULATE, Rows
from zenps.kernels.cpu import CpuKernels
from zenps.kernels.native.backend import NativeKernels
from zenps.kernels.native.library import BITMAP, NONE, RADIX, Plan, load_library

# Nothing is pooled: a sanitizer sees the end of each buffer.
POOL = BufferPool(0)
TORCH = CpuKernels(POOL)
LIBRARIES = {"best": load_library(str(build_native(*EAGER)))}
LIBRARIES["least"] = load_library(str(build_native(*EAGER, "-DBASE_LOOPS_ONLY")))
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

NATIVE = {
    f"{instructions}-{threads}-{method}": NativeKernels(POOL, LIBRARIES[instructions], threads, method)
    for instructions, threads, method in product(LIBRARIES, (1, 3), (0, BITMAP, RADIX))
}

every_native = pytest.mark.parametrize("native", NATIVE.values(), ids=NATIVE)
every_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)

INT64 = st.integers(-(2**63), 2**63 - 1)
NEAR = st.integers(0, 300)
HOSTILE = st.sampled_from([-(2**63), 2**63 - 1, -1, 0, 63, 64, 2**31, 2**31 - 1, 2**32, 2**48])


def bits(values: Tensor) -> Tensor:
    """The bits of values, with one NaN for all: arithmetic may change its payload."""
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.full_like(values, torch.nan), values)
    return values.view(BITS[values.dtype.itemsize])


def same(got: Rows, expected: Rows) -> bool:
    return torch.equal(got[0], expected[0]) and torch.equal(bits(got[1]), bits(expected[1]))


def random_values(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all: infinities, denormals and NaN, too."""
    values = torch.empty(rows, columns, dtype=dtype)
    data = np.random.default_rng(seed).bytes(values.nbytes)
    values.untyped_storage().copy_(torch.UntypedStorage(list(data)))
    return values


@st.composite
def parts(draw: st.DrawFn) -> list[Rows]:
    """Sets of rows by keys that need be neither sorted nor different, nor anywhere near one another."""
    dtype, columns = draw(st.sampled_from(list(ACCUMULATE))), draw(st.sampled_from([0, 1, 2, 3, 7, 16, 70]))
    keys = draw(
        st.lists(
            st.lists(draw(st.sampled_from([NEAR, HOSTILE, INT64, NEAR | HOSTILE])), max_size=60),
            min_size=1,
            max_size=4,
        )
    )
    if draw(st.booleans()):
        keys = [sorted(set(some)) for some in keys]
    seed = draw(st.integers(0, 1 << 30))
    return [
        (torch.tensor(some, dtype=torch.int64), random_values(len(some), columns, dtype, seed + index))
        for index, some in enumerate(keys)
    ]


@every_native
@settings(deadline=None, max_examples=60)
@given(ranks=parts(), divisor=st.integers(1, 5))
def test_any_keys_give_the_bits_of_torch(native: NativeKernels, ranks: list[Rows], divisor: int) -> None:
    divisor = divisor if ranks[0][1].is_floating_point() else 1
    assert same(native.aggregate(ranks, divisor), TORCH.aggregate(ranks, divisor))
    assert same(native.scatter(ranks), TORCH.scatter(ranks))
    for keys, values in ranks:
        assert same(native.compact(keys, values), TORCH.compact(keys, values))


@every_library
@pytest.mark.parametrize("dtype", list(ACCUMULATE))
@pytest.mark.parametrize("span", [400, 10**6, 10**15])
def test_no_number_of_threads_changes_a_bit(library: object, dtype: torch.dtype, span: int) -> None:
    generator = torch.Generator().manual_seed(4)
    keys = torch.randint(0, span, (900,), generator=generator)
    values = torch.randint(-1000, 1000, (900, 33), generator=generator).to(torch.float32) / 7
    values = values.to(dtype)
    ranks = [(some.unique(), values[: len(some.unique())]) for some in keys.tensor_split(5)]
    expected = TORCH.compact(keys, values), TORCH.aggregate(ranks, 1), TORCH.scatter(ranks[:1])
    for threads in (1, 2, 5, 64, 1000):
        native = NativeKernels(POOL, library, threads)  # type: ignore[arg-type]
        got = native.compact(keys, values), native.aggregate(ranks, 1), native.scatter(ranks[:1])
        assert all(same(one, other) for one, other in zip(got, expected, strict=True))


@every_native
@pytest.mark.parametrize("columns", [16, 17, 32, 48, 80])
def test_rows_of_whole_lines_and_others_are_placed(native: NativeKernels, columns: int) -> None:
    keys = torch.randperm(700, generator=torch.Generator().manual_seed(5)).split([300, 1, 399])
    ranks = [(some, random_values(len(some), columns, torch.float32, columns)) for some in keys]
    assert same(native.scatter(ranks), TORCH.scatter(ranks))


@every_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_float_is_widened_and_rounded_as_torch_does(library: object, dtype: torch.dtype) -> None:
    native = NativeKernels(POOL, library)  # type: ignore[arg-type]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 16)
    keys = torch.arange(len(every))
    assert same(native.aggregate([(keys, every)], 1), (keys, every))
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        other = every.view(-1)[torch.randperm(2**16, generator=generator)].view(-1, 16)
        expected = ((every.float() + other.float()) / 3).to(dtype)
        assert same(native.aggregate([(keys, every), (keys, other)], 3), (keys, expected))


@every_library
def test_flushed_denormals_change_no_rounding(library: object) -> None:
    native = NativeKernels(POOL, library)  # type: ignore[arg-type]
    every = torch.arange(0, 2**10, dtype=torch.int16).view(torch.float16)[:, None]
    keys = torch.arange(len(every))
    torch.set_flush_denormal(True)
    try:
        assert same(native.aggregate([(keys, every)], 1), (keys, every))
    finally:
        torch.set_flush_denormal(False)


@every_library
@pytest.mark.parametrize("method", [BITMAP, RADIX])
def test_keys_that_change_after_they_were_measured_are_refused(library: object, method: int) -> None:
    keys = torch.arange(50)
    given_parts = (c_int64 * 3)(keys.data_ptr(), 0, len(keys))
    for hostile in (-1, 50, 2**62, -(2**63)):
        plan = Plan(parts=1, dtype=2, columns=1, divisor=1, threads=1, method=method)
        keys.copy_(torch.arange(50))
        library.zenps_measure(given_parts, byref(plan))  # type: ignore[attr-defined]
        assert (plan.method, plan.rows, plan.least, plan.most) == (method, 50, 0, 49)
        memory = torch.zeros(plan.rank_bytes, dtype=torch.uint8)
        keys[17] = hostile
        assert library.zenps_rank(given_parts, byref(plan), memory.data_ptr()) == -1  # type: ignore[attr-defined]


@every_library
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("method", [BITMAP, RADIX])
def test_memory_that_others_write_to_harms_nothing_but_the_sum(
    library: object, method: int, in_order: bool
) -> None:
    """A process of the same host may write to shared memory while it is read."""
    native = NativeKernels(POOL, library, 2, method)  # type: ignore[arg-type]
    keys = np.arange(3000) if in_order else np.random.default_rng(1).integers(0, 3000, 3000)
    shared, values, over = torch.from_numpy(keys.copy()), torch.ones(3000, 8), threading.Event()

    def write() -> None:
        generator = np.random.default_rng(2)
        while not over.is_set():
            shared.numpy()[generator.integers(0, 3000, 40)] = generator.integers(-100, 3100, 40)
            shared.numpy()[:] = keys

    writer = threading.Thread(target=write)
    writer.start()
    refused = 0
    try:
        for _ in range(200):
            try:
                got, _ = native.aggregate([(shared, values), (shared, values)], 1)
                assert len(got) <= 6000
            except TensorError:
                refused += 1
    finally:
        over.set()
        writer.join(10)
    assert refused < 200


def test_keys_too_far_apart_are_left_to_torch() -> None:
    keys = torch.tensor([2**63 - 1, -(2**63)])
    plan = Plan(parts=1, dtype=2, columns=1, divisor=1, threads=1)
    LIBRARIES["best"].zenps_measure((c_int64 * 3)(keys.data_ptr(), 0, 2), byref(plan))
    assert plan.method == NONE


@pytest.mark.parametrize("span", [2**20, 2**30, 2**46])
def test_memory_follows_the_rows_not_the_span(span: int) -> None:
    keys = torch.randint(0, span, (10_000,), generator=torch.Generator().manual_seed(1))
    plan = Plan(parts=1, dtype=2, columns=1, divisor=1, threads=1)
    LIBRARIES["best"].zenps_measure((c_int64 * 3)(keys.data_ptr(), 0, len(keys)), byref(plan))
    assert plan.rank_bytes <= 21 * len(keys)


@pytest.mark.skipif(SANITIZER is Sanitizer.ADDRESS, reason="torch's exceptions end AddressSanitizer itself")
def test_what_c_does_not_take_raises_as_it_does_with_torch() -> None:
    native = NATIVE["best-1-0"]
    rows = torch.arange(3), torch.ones(3, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="can't be cast"):
        native.aggregate([rows], 2)
    for wrong in (torch.ones(2, 2), torch.ones(3, 2, dtype=torch.complex64)):
        with pytest.raises((RuntimeError, KeyError, IndexError, ValueError)):
            TORCH.compact(torch.arange(3), wrong)
        with pytest.raises((RuntimeError, KeyError, IndexError, ValueError)):
            native.compact(torch.arange(3), wrong)


def test_older_compilers_know_the_instruction_sets_that_are_asked_for() -> None:
    """An unknown one is an error to them, and a package is then built without native kernels."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]")))
    asked_for = set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', sources))
    known = {"avx", "avx2", "bmi", "bmi2", "fma", "popcnt"}  # to GCC 9 and clang 14
    assert asked_for, "expected calls of __builtin_cpu_supports"
    assert asked_for <= known
