"""Every kernel compiles for every architecture, as CuPy would compile it, without a GPU or a driver."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from benchmarks import cubins
from benchmarks.cubins import ARCHITECTURES, RESULTS, Compiled, Usage, compile_source
from tests.cuda.host.build import BUILD, digest_of, once
from zenps.kernels.gpu.sources import EXPRESSIONS, OPTIONS, folder

MAX_SHARED_BYTES = 48 << 10


def compile_once(source: str, architecture: str) -> Compiled:
    """Kept for the next run: ptxas takes a second for some sources."""
    inputs = [folder() / f"{source}.cu", *folder().glob("*.cuh"), Path(cubins.__file__)]
    names = (*EXPRESSIONS[source], *map(str, nvrtc.nvrtcVersion()))
    path = BUILD / f"{source}-{architecture}-{digest_of(architecture, names, inputs)}.json"

    def compile_to(out: Path) -> None:
        out.write_text(json.dumps(compile_source(source, EXPRESSIONS[source], architecture)))

    cubin_bytes, kernels = json.loads(once(path, compile_to).read_text())
    return Compiled(cubin_bytes, {expression: Usage(*usage) for expression, usage in kernels.items()})


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in (ARCHITECTURES[0], ARCHITECTURES[-1]) else pytest.mark.long)
        for name in ARCHITECTURES
    ],
)
@pytest.mark.parametrize("source", EXPRESSIONS)
def test_kernels_compile_and_spill_nothing(source: str, architecture: str) -> None:
    compiled = compile_once(source, architecture)
    assert compiled.cubin_bytes > 0
    assert set(compiled.kernels) == set(EXPRESSIONS[source])
    assert {name: usage for name, usage in compiled.kernels.items() if usage.spilled_bytes} == {}
    assert max(usage.shared_bytes for usage in compiled.kernels.values()) <= MAX_SHARED_BYTES


def test_every_source_is_listed_and_exists() -> None:
    assert {path.stem for path in folder().glob("*.cu")} == set(EXPRESSIONS)


def test_a_source_that_does_not_compile_is_reported() -> None:
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        compile_source("place", ["no_such_kernel<int32>"], "sm_90")


def test_spills_are_read_from_what_ptxas_says() -> None:
    log = (
        "ptxas info    : Compiling entry function '_Z1aPx' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z1aPx\n"
        "ptxas         .     48 bytes stack frame, 44 bytes spill stores, 52 bytes spill loads\n"
        "ptxas info    : Used 24 registers, used 1 barriers, 48 bytes cumulative stack, 1024 bytes smem\n"
        "ptxas info    : Compiling entry function '_Z1bPx' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z1bPx\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 7 registers, used 0 barriers\n"
    )
    assert cubins.read_usages(log, {"_Z1aPx": "a", "_Z1bPx": "b"}) == {
        "a": Usage(registers=24, stack_bytes=48, spilled_bytes=96, shared_bytes=1024),
        "b": Usage(registers=7, stack_bytes=0, spilled_bytes=0, shared_bytes=0),
    }


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "architecture", "warps"),
    [(32, 0, "sm_90", 64), (90, 0, "sm_90", 16), (32, 0, "sm_75", 32), (32, 48 << 10, "sm_90", 32),
     (32, 48 << 10, "sm_75", 8), (255, 0, "sm_90", 8)],
)  # fmt: skip
def test_occupancy(registers: int, shared_bytes: int, architecture: str, warps: int) -> None:
    """NVIDIA's rules: registers go to warps by 256, shared memory to blocks by 128 bytes, and 1 KiB more."""
    assert cubins.resident_warps(Usage(registers, 0, 0, shared_bytes), architecture) == warps


def test_the_archived_table_names_these_kernels() -> None:
    archived = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert archived["architectures"] == [*ARCHITECTURES]
    named = {source: set(kernels) for source, kernels in archived["kernels"].items()}
    renew = "run `python benchmarks/cubins.py`"
    assert named == {source: set(expressions) for source, expressions in EXPRESSIONS.items()}, renew


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="a second opinion, where the CUDA toolkit is installed"
)
@pytest.mark.parametrize("source", EXPRESSIONS)
def test_nvcc_compiles_them_too(source: str) -> None:
    wanted = "".join(f"    (const void*){expression},\n" for expression in EXPRESSIONS[source])
    stub = f'#include "{folder() / source}.cu"\nconst void* wanted[] = {{\n{wanted}}};\n'
    inputs = [folder() / f"{source}.cu", *folder().glob("*.cuh")]

    def compile_to(out: Path) -> None:
        written = out.with_suffix(".cu")
        written.write_text(stub, encoding="utf-8")
        flags = (*OPTIONS, "-cubin", "-arch=sm_90", "-Werror", "all-warnings")
        command = ["nvcc", *flags, str(written), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        written.unlink()
        assert done.returncode == 0, done.stderr

    code = once(BUILD / f"{source}-nvcc-{digest_of(stub, OPTIONS, inputs)}.cubin", compile_to).read_bytes()
    assert all(expression.partition("<")[0].encode() in code for expression in EXPRESSIONS[source])
