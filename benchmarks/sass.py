"""sm_90 machine code (SASS) of the kernels, and how many of its instructions a launch issues.

NVRTC compiles to PTX and to machine code; NVIDIA's ``nvdisasm`` prints for each machine instruction the line
of PTX that it comes from. The PTX is interpreted (:mod:`benchmarks.ptx_machine`), so each machine instruction
was issued as often as its line was. No GPU and no driver are needed.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import ptx_operations  # noqa: F401  fills the interpreter's table
from benchmarks.cubins import compile_program
from benchmarks.ptx import Kernel, parse
from benchmarks.ptx_machine import SECTOR_BITS, WARP, Machine
from zenps.kernels.gpu.launcher import Argument, Launcher, word_of
from zenps.kernels.gpu.sources import EXPRESSIONS

ARCHITECTURE = "sm_90"
SECTION = re.compile(r"^\.text\.(\w+):$")
LINE = re.compile(r'//## File "\.nv_debug_ptx_txt", line (\d+)')
MACHINE_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)")
SUBROUTINE, BEGINS_SUBROUTINE = -1, "$__internal_"
ONCE_EACH = {"ld", "st", "atom", "red", "shfl", "vote", "bar"}
"""PTX operations with one machine instruction each: more of these mean copies, by unrolling of a loop."""


class Code(NamedTuple):
    """A kernel in both forms."""

    kernel: Kernel
    lines: tuple[int, ...]
    """The PTX line of each machine instruction; SUBROUTINE for those of a 64-bit division."""
    memory_lines: tuple[int, ...]
    """Likewise of those that access memory, exchange values or wait at a barrier."""


class Launch(NamedTuple):
    """What one launch of a kernel costs.

    Attributes:
        instructions: issued, times the 32 threads that each is issued for.
        read_bytes, written_bytes: of global memory; each sector of 32 bytes counts once, as with a cache that
            holds everything.
    """

    expression: str
    instructions: float
    read_bytes: int
    written_bytes: int


def disassembler() -> str | None:
    """Where ``nvdisasm`` is: of the package nvidia-cuda-nvdisasm, or of a CUDA toolkit; None: nowhere."""
    for folder in map(Path, sys.path):
        packaged = folder / "nvidia" / "cu13" / "bin" / "nvdisasm"
        if packaged.is_file():
            return str(packaged)
    return shutil.which("nvdisasm")


@functools.cache
def code_of(source: str, expression: str) -> Code:
    """Compiles one kernel of ``cuda/<source>.cu``.

    Raises:
        RuntimeError: the compiler refused it, or there is no ``nvdisasm``.
    """
    program = compile_program(source, (expression,), ARCHITECTURE, ("-lineinfo",))
    (name,) = program.lowered
    found = disassembler()
    if found is None:
        raise RuntimeError("nvdisasm is missing; run `pip install nvidia-cuda-nvdisasm`")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.cubin)
        file.flush()
        done = subprocess.run(
            [found, "-c", "-gp", file.name], capture_output=True, text=True, timeout=60, check=True
        )
    # A source's kernels that are no templates are always compiled too.
    return Code(parse(program.ptx)[name], *_ptx_lines(done.stdout, name))


def _ptx_lines(listing: str, kernel: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    line, lines, memory, section = 0, [], [], ""
    for text in listing.splitlines():
        if begun := SECTION.match(text):
            section, line = begun[1], 0
        elif (said := LINE.search(text)) and line != SUBROUTINE:
            line = int(said[1])
        elif text.startswith(BEGINS_SUBROUTINE):
            line = SUBROUTINE
        elif section == kernel and (found := MACHINE_CODE.match(text)):
            operation = found[1].partition(".")[0]
            if operation == "NOP":
                continue
            lines.append(line)
            if operation in MEMORY_OPERATIONS:
                memory.append(line)
    return tuple(lines), tuple(memory)


MEMORY_OPERATIONS = {"LDG", "STG", "LD", "ST", "LDS", "STS", "LDL", "STL", "ATOM", "ATOMG", "ATOMS", "RED",
                     "SHFL", "VOTE", "BAR"}  # fmt: skip


def issued(code: Code, executions: NDArray[np.int64]) -> float:
    """The number of machine instructions that all warps issue, given how often each PTX instruction was."""
    kernel = code.kernel
    ptx_lines = np.array([instruction.line for instruction in kernel.code])
    copies = Counter(code.memory_lines)
    weights = executions.astype(float)
    for begin, end in _blocks(kernel):
        seen = [
            copies[kernel.code[index].line]
            for index in range(begin, end)
            if kernel.code[index].opcode[0] in ONCE_EACH and kernel.code[index].opcode[1] != "param"
        ]
        weights[begin:end] /= max(1, min(seen, default=1))
    # A line that is no instruction stands for the next that is one.
    lines = np.array(code.lines)
    in_subroutine = lines == SUBROUTINE
    places = np.searchsorted(ptx_lines, lines[~in_subroutine]).clip(max=len(ptx_lines) - 1)
    return float(weights[places].sum() + in_subroutine.sum() * weights[_wide_divisions(kernel)].sum())


def _wide_divisions(kernel: Kernel) -> list[int]:
    """The instructions that call the subroutine."""
    return [
        index
        for index, each in enumerate(kernel.code)
        if each.opcode[0] in ("div", "rem") and each.opcode[-1].endswith("64")
    ]


def _blocks(kernel: Kernel) -> Sequence[tuple[int, int]]:
    starts = {0, *kernel.labels.values(), len(kernel.code)}
    starts |= {index + 1 for index, each in enumerate(kernel.code) if each.opcode[0] in ("bra", "ret", "bar")}
    ordered = sorted(starts)
    return [*pairwise(ordered)]


class CountingLauncher(Launcher):
    """Runs kernels on CPU tensors by interpreting their PTX, and keeps what each launch costs."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, source: str, expression: str, grid: int, block: int, args: Sequence[Argument]) -> None:
        assert expression in EXPRESSIONS[source]
        if not grid:
            return
        code = code_of(source, expression)
        words = [
            [word_of(word) & (1 << 64) - 1 for word in (arg if isinstance(arg, tuple) else (arg,))]
            for arg in args
        ]
        machine = Machine(code.kernel, grid, block, words)
        machine.run()
        read, written = (_sectors(touched) << SECTOR_BITS for touched in (machine.read, machine.written))
        instructions = issued(code, machine.executions) * WARP
        self.launches.append(Launch(expression, instructions, read, written))


def _sectors(touched: Sequence[NDArray[np.uint64]]) -> int:
    return len(np.unique(np.concatenate(touched))) if touched else 0
