"""PTX parser: the instructions of each kernel in the text that NVRTC compiles to.

Reference: PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution/. Only what this project's kernels
use is understood; anything else raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ENTRY = re.compile(r"\.entry (\w+)\(")
PARAMETER = re.compile(r"\.param (?:\.u64|\.align 8 \.b8) (\w+)(?:\[(\d+)\])?")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;")
VARIABLE = re.compile(r"\.(shared|local) (?:\.align (\d+) )?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?;")
INSTRUCTION = re.compile(r"(?:@(!?)%(p\d+)\s+)?([a-z][\w.]*)\s*(.*);$")
LABEL = re.compile(r"(\$\w+):$")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+")


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``line`` counts from 1 in the whole text."""

    line: int
    guard: str | None
    """The register that has to be true, or false where ``negated``."""
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass
class Kernel:
    """An entry function. Variables are named with their offset in shared or local memory."""

    name: str
    parameters: dict[str, int] = field(default_factory=dict)
    """Name → size in bytes."""
    registers: dict[str, str] = field(default_factory=dict)
    """Register → its type, such as ``b32``."""
    shared: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    local_bytes: int = 0
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Label → index in ``code`` of the instruction after it."""

    def add_variable(self, space: str, alignment: int, size: int, name: str) -> None:
        used = self.shared_bytes if space == "shared" else self.local_bytes
        offset = -(-used // alignment) * alignment
        if space == "shared":
            self.shared[name], self.shared_bytes = offset, offset + size
        else:
            self.local[name], self.local_bytes = offset, offset + size


def parse(text: str) -> dict[str, Kernel]:
    """Returns the kernels by mangled name."""
    kernels: dict[str, Kernel] = {}
    kernel = Kernel("")
    of_module: list[tuple[str, int, int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.partition("//")[0].strip().rstrip(",")
        if not stripped or stripped.startswith((".loc\t", ".loc ")):
            continue
        if entry := ENTRY.search(stripped):
            kernel = kernels[entry[1]] = Kernel(entry[1])
            for variable in of_module:
                kernel.add_variable(*variable)
        elif parameter := PARAMETER.match(stripped):
            kernel.parameters[parameter[1]] = int(parameter[2] or 8)
        elif declared := REGISTERS.match(stripped):
            for index in range(int(declared[3])):
                kernel.registers[f"{declared[2]}{index}"] = declared[1]
        elif declared := re.match(r"\.reg \.(\w+)\s+%(\w+);", stripped):
            kernel.registers[declared[2]] = declared[1]
        elif variable_text := VARIABLE.search(stripped):
            space, align, kind, name, count = variable_text.groups()
            width = int(kind[1:]) // 8
            variable = (space, int(align or width), width * int(count or 1), name)
            if kernel.name:
                kernel.add_variable(*variable)
            else:
                of_module.append(variable)
        elif label := LABEL.match(stripped):
            kernel.labels[label[1]] = len(kernel.code)
        elif stripped == "}":
            kernel = Kernel("")
        elif kernel.name and (found := INSTRUCTION.match(stripped)):
            negated, guard, opcode, operands = found.groups()
            kernel.code.append(
                Instruction(
                    number, guard, bool(negated), tuple(opcode.split(".")), tuple(OPERAND.findall(operands))
                )
            )
    return kernels
