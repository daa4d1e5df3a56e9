"""What the compiler makes of each kernel, for every architecture: registers, shared memory, bytes of code.

No GPU and no driver are needed. ``python benchmarks/cubins.py`` writes ``benchmarks/results/cubins.json``;
``tests/cuda/test_compile.py`` compiles the same way.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvrtc

from zenps.kernels.sources import EXPRESSIONS, OPTIONS, folder, source_text

__all__ = ["ARCHITECTURES", "RESULTS", "Compiled", "Usage", "compile_source", "read_usages"]

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
RESULTS = Path(__file__).parent / "results" / "cubins.json"

COMPILED = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)
"""What ptxas says of a kernel."""


class Usage(NamedTuple):
    """What one thread, and in ``shared_bytes`` one block, of a kernel takes."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int


class Compiled(NamedTuple):
    """One source for one architecture."""

    cubin_bytes: int
    kernels: dict[str, Usage]
    """By name expression."""


def compile_source(source: str, expressions: Sequence[str], architecture: str) -> Compiled:
    """Compiles ``cuda/<source>.cu`` with the options that CuPy's ``RawModule`` would use.

    Raises:
        RuntimeError: the compiler refused it; the message is the compiler's.
    """
    options = (
        *OPTIONS,
        f"-I{folder()}",
        "-ftz=true",  # CuPy adds it
        f"--gpu-architecture={architecture}",
        "--ptxas-options=-v",
    )
    program = _checked(
        nvrtc.nvrtcCreateProgram(source_text(source).encode(), f"{source}.cu".encode(), 0, [], [])
    )
    try:
        for expression in expressions:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode().rstrip("\0")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source}.cu for {architecture}:\n{text}")
        lowered = {
            _checked(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode(): expression
            for expression in expressions
        }
        return Compiled(_checked(nvrtc.nvrtcGetCUBINSize(program)), read_usages(text, lowered))
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _checked(answer: tuple[Any, ...]) -> Any:
    """What an NVRTC call returns beside its result."""
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
