"""Compiled kernels: their registers, shared memory and code size for every architecture.

No GPU and no driver are needed. ``python benchmarks/cubins.py`` writes ``benchmarks/results/cubins.json``;
``tests/cuda/test_compile.py`` compiles the same way.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvrtc

from zenps.kernels.gpu.sources import EXPRESSIONS, OPTIONS, folder, source_text

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
RESULTS = Path(__file__).parent / "results" / "cubins.json"

COMPILED = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)
"""The lines about a kernel in the output of ptxas."""


class Usage(NamedTuple):
    """The resources of a kernel: those of one thread, and in ``shared_bytes`` those of one block."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int


# Of one multiprocessor: warps, and KiB of shared memory ("Technical Specifications per Compute Capability",
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/). All have 65536 registers.
MULTIPROCESSORS = {
    "sm_75": (32, 64),
    "sm_80": (64, 164),
    "sm_86": (48, 100),
    "sm_89": (48, 100),
    "sm_90": (64, 228),
    "sm_100": (64, 228),
    "sm_120": (48, 100),
}
BLOCK_WARPS = 8  # of zenps.kernels.gpu.launcher.BLOCK
REGISTER_UNIT, SHARED_UNIT, SHARED_RESERVED = 256, 128, 1024


def resident_warps(usage: Usage, architecture: str) -> int:
    """The number of warps of such a kernel that a multiprocessor runs at once, in blocks of 256 threads."""
    warps, shared_kib = MULTIPROCESSORS[architecture]
    registers = -(-usage.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    shared = -(-usage.shared_bytes // SHARED_UNIT) * SHARED_UNIT + SHARED_RESERVED
    blocks = (warps // BLOCK_WARPS, 65536 // registers // BLOCK_WARPS, shared_kib * 1024 // shared)
    return min(blocks) * BLOCK_WARPS


class Compiled(NamedTuple):
    """One source for one architecture."""

    cubin_bytes: int
    kernels: dict[str, Usage]
    """By name expression."""


class Program(NamedTuple):
    """What NVRTC made of one source for one architecture, and ptxas's report about it."""

    ptx: str
    cubin: bytes
    log: str
    lowered: dict[str, str]
    """Mangled name of a kernel → its name expression."""


def compile_source(source: str, expressions: Sequence[str], architecture: str) -> Compiled:
    """Returns the sizes of the kernels of ``cuda/<source>.cu``.

    Raises:
        RuntimeError: the compiler refused it; the message is the compiler's.
    """
    program = compile_program(source, expressions, architecture, ("--ptxas-options=-v",))
    return Compiled(len(program.cubin), read_usages(program.log, program.lowered))


def compile_program(
    source: str, expressions: Sequence[str], architecture: str, more_options: Sequence[str] = ()
) -> Program:
    """Compiles ``cuda/<source>.cu`` with the options that CuPy's ``RawModule`` would use.

    Raises:
        RuntimeError: the compiler refused it; the message is the compiler's.
    """
    options = (
        *OPTIONS,
        f"-I{folder()}",
        # CuPy adds these two.
        "-ftz=true",
        "--device-as-default-execution-space",
        f"--gpu-architecture={architecture}",
        *more_options,
    )
    program = _checked(
        nvrtc.nvrtcCreateProgram(source_text(source).encode(), f"{source}.cu".encode(), 0, [], [])
    )
    try:
        for expression in expressions:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = log.decode().rstrip("\0")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source}.cu for {architecture}:\n{text}")
        lowered = {
            _checked(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode(): expression
            for expression in expressions
        }
        ptx = _output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        cubin = _output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Program(ptx.decode().rstrip("\0"), cubin, text, lowered)
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _output(program: Any, size_of: Callable[..., Any], read: Callable[..., Any]) -> bytes:
    written = bytearray(_checked(size_of(program)))
    _checked(read(program, written))
    return bytes(written)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The values of an NVRTC call; raises if it failed."""
    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {result.name}")
    return values[0] if values else None


def read_usages(log: str, expressions: dict[str, str]) -> dict[str, Usage]:
    usages = {}
    for said in COMPILED.finditer(log):
        number = {name: int(text or 0) for name, text in said.groupdict().items() if name != "kernel"}
        usages[expressions[said["kernel"]]] = Usage(
            registers=number["registers"],
            stack_bytes=number["stack"],
            spilled_bytes=number["stores"] + number["loads"],
            shared_bytes=number["shared"],
        )
    return usages


def report() -> dict[str, Any]:
    """The JSON file: lists have one number for each of ``architectures``."""
    jobs = [
        (source, EXPRESSIONS[source], architecture)
        for source in EXPRESSIONS
        for architecture in ARCHITECTURES
    ]
    with ThreadPoolExecutor() as pool:
        results = [*pool.map(lambda job: compile_source(*job), jobs)]
    compiled = {
        source: [result for job, result in zip(jobs, results, strict=True) if job[0] == source]
        for source in EXPRESSIONS
    }
    _, *version = nvrtc.nvrtcVersion()
    return {
        "nvrtc": ".".join(map(str, version)),
        "architectures": ARCHITECTURES,
        "cubin_bytes": {source: [one.cubin_bytes for one in each] for source, each in compiled.items()},
        "kernels": {
            source: {
                expression: {
                    name: [one.kernels[expression]._asdict()[name] for one in each] for name in Usage._fields
                }
                | {
                    "resident_warps": [
                        resident_warps(one.kernels[expression], architecture)
                        for one, architecture in zip(each, ARCHITECTURES, strict=True)
                    ]
                }
                for expression in EXPRESSIONS[source]
            }
            for source, each in compiled.items()
        },
    }


def compact_json(value: Any, indent: str = "") -> str:
    """JSON with one line for each innermost object."""
    if not isinstance(value, dict) or not any(isinstance(inner, dict) for inner in value.values()):
        return json.dumps(value)
    inner = indent + "  "
    lines = (f"{inner}{json.dumps(name)}: {compact_json(under, inner)}" for name, under in value.items())
    return "{\n" + ",\n".join(lines) + "\n" + indent + "}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write (default: %(default)s)")
    path: Path = parser.parse_args().json
    path.write_text(compact_json(report()) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
