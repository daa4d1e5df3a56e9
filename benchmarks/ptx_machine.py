"""PTX interpreter: runs a kernel on tensors in host memory, and counts what its warps execute and touch.

All threads of a grid advance together: of those that can run, the ones at the lowest instruction do, up to
the end of its basic block. So the threads of a warp that took different ways meet again where the ways do, as
on a GPU. Global memory is this process's own: a wrong address ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ptx import Instruction, Kernel

Array = NDArray[Any]
WARP = 32
SECTOR_BITS = 5
"""A GPU's memory moves in sectors of 32 bytes."""

RUNNING, AT_BARRIER, YIELDING, EXITED = range(4)
ENDS_BLOCK = {"bra", "bar", "nanosleep", "ret", "exit"}


class _Memory:
    """This process's memory as an array of words."""

    def __init__(self, width: int) -> None:
        self.__array_interface__ = {
            "data": (WARP, False),
            "shape": ((1 << 47) // width - WARP,),
            "typestr": f"<u{width}",
            "version": 3,
        }


MEMORY = {width: np.asarray(_Memory(width)) for width in (1, 2, 4, 8)}


def _words(width: int, addresses: Array) -> Array:
    offsets = addresses.astype(np.int64) - WARP
    if (offsets % width).any():
        raise ValueError(f"an address that is no multiple of {width}")
    return offsets // width


class Machine:
    """The state of one launch.

    Attributes:
        executions: of each of the kernel's instructions, by how many warps it was issued.
        read, written: addresses of the sectors of global memory, each once for each instruction and thread.
    """

    def __init__(self, kernel: Kernel, grid: int, block: int, words: list[list[int]]) -> None:
        threads = grid * block
        self.kernel, self.block = kernel, block
        self.executions = np.zeros(len(kernel.code), dtype=np.int64)
        self.read: list[Array] = []
        self.written: list[Array] = []
        self.thread, self.number = np.arange(threads) % block, np.arange(threads) // block
        self.registers = {
            name: np.zeros(threads, dtype=bool if kind == "pred" else f"u{int(kind[1:]) // 8}")
            for name, kind in kernel.registers.items()
        }
        self._pc, self._status = np.zeros(threads, dtype=np.int64), np.zeros(threads, dtype=np.int8)
        self._parameters = {}
        for (name, size), each in zip(kernel.parameters.items(), words, strict=True):
            self._parameters[name] = np.array(each, dtype=np.uint64)
            assert self._parameters[name].nbytes == size, (name, size, len(each))
        self._shared = np.full((grid, kernel.shared_bytes // 8 + 2), -1, dtype=np.int64)
        self._local = np.zeros((threads, kernel.local_bytes // 8 + 2), dtype=np.int64)
        self._ends = self._block_ends()

    def run(self) -> None:
        """Runs all threads to their end."""
        while True:
            running = np.flatnonzero(self._status == RUNNING)
            if len(running):
                at = int(self._pc[running].min())
                self._run_block(at, running[self._pc[running] == at])
            elif not self._release():
                return

    def _block_ends(self) -> list[int]:
        """For each instruction the end of its basic block."""
        code, starts = self.kernel.code, set(self.kernel.labels.values())
        ends, end = [0] * len(code), len(code)
        for index in reversed(range(len(code))):
            if code[index].opcode[0] in ENDS_BLOCK or index + 1 in starts:
                end = index + 1
            ends[index] = end
        return ends

    def _release(self) -> bool:
        """Lets blocks pass their barriers or, if there are none, those that wait for others look again."""
        waiting, yielding = self._status == AT_BARRIER, self._status == YIELDING
        if waiting.any():
            missing = np.unique(self.number[yielding])
            waiting &= ~np.isin(self.number, missing)
        chosen = waiting if waiting.any() else yielding
        self._status[chosen] = RUNNING
        return bool(chosen.any())

    def _run_block(self, begin: int, lanes: Array) -> None:
        end = self._ends[begin]
        self.executions[begin:end] += len(np.unique(lanes // WARP))
        for index in range(begin, end):
            instruction, active = self.kernel.code[index], lanes
            if instruction.guard is not None:
                active = lanes[self.registers[instruction.guard][lanes] != instruction.negated]
            if index == end - 1:
                self._pc[lanes] = end
                if instruction.opcode[0] in ENDS_BLOCK:
                    self._jump(instruction, active)
                    return
            if len(active):
                EXECUTE[instruction.opcode[0]](self, instruction, active)

    def _jump(self, instruction: Instruction, lanes: Array) -> None:
        match instruction.opcode[0]:
            case "bra":
                self._pc[lanes] = self.kernel.labels[instruction.operands[0]]
            case "bar":
                self._status[lanes] = AT_BARRIER
            case "nanosleep":
                self._status[lanes] = YIELDING
            case _:
                self._status[lanes] = EXITED

    # ── operands ────────────────────────────────────────────────────────────────────────────────

    def value(self, operand: str, lanes: Array, kind: str) -> Array:
        """An operand's value in each lane, as ``kind``, such as ``s32``."""
        dtype = dtype_of(kind)
        if operand.startswith("%") and operand[1:] in self.registers:
            held = self.registers[operand[1:]][lanes]
            return held if dtype == np.bool_ else held.astype(f"u{dtype.itemsize}").view(dtype)
        if operand[:2] in ("0f", "0d"):
            return np.full(len(lanes), int(operand[2:], 16), dtype=f"u{len(operand) // 2 - 1}").view(dtype)
        if operand.startswith("%"):
            return self._special(operand, lanes).astype(dtype)
        if re.match(r"-?\d", operand):
            if dtype == np.bool_:
                return np.full(len(lanes), int(operand, 0) != 0)
            number = int(operand, 0) & ((1 << 8 * dtype.itemsize) - 1)
            return np.full(len(lanes), number, dtype=f"u{dtype.itemsize}").view(dtype)
        return self._address_of(operand, lanes).astype(dtype)

    def _special(self, name: str, lanes: Array) -> Array:
        grid = len(self._pc) // self.block
        fixed = {"%ntid.x": self.block, "%nctaid.x": grid}
        if name in fixed:
            return np.full(len(lanes), fixed[name])
        return {"%tid.x": self.thread, "%ctaid.x": self.number, "%laneid": self.thread % WARP}[name][lanes]

    def _address_of(self, name: str, lanes: Array) -> Array:
        if name in self._parameters:
            return np.full(len(lanes), self._parameters[name].ctypes.data, dtype=np.uint64)
        if name in self.kernel.shared:
            base, row, offset = self._shared, self.number[lanes], self.kernel.shared[name]
        else:
            base, row, offset = self._local, lanes, self.kernel.local[name]
        return np.asarray(base.ctypes.data + row * base.strides[0] + offset).astype(np.uint64)

    def put(self, operand: str, lanes: Array, value: Array) -> None:
        """Writes a register; a narrower value is extended as its sign says."""
        register = self.registers[operand.removeprefix("%")]
        if register.dtype == np.bool_:
            register[lanes] = value
        elif value.dtype.kind == "i":
            register[lanes] = value.astype(f"i{register.itemsize}").view(register.dtype)
        else:
            register[lanes] = value.view(f"u{value.itemsize}").astype(register.dtype)

    def addresses(self, operand: str, lanes: Array) -> Array:
        base, _, offset = operand[1:-1].partition("+")
        return self.value(base, lanes, "u64") + np.uint64(int(offset or 0) & (1 << 64) - 1)

    def touch(self, addresses: Array, into: list[Array]) -> None:
        """Records sectors of global memory."""
        for base in (self._shared, self._local):
            if ((addresses >= base.ctypes.data) & (addresses < base.ctypes.data + base.nbytes)).all():
                return
        into.append(np.unique(addresses >> np.uint64(SECTOR_BITS)))


def dtype_of(kind: str) -> np.dtype[Any]:
    if kind == "pred":
        return np.dtype(bool)
    letter = {"s": "i", "u": "u", "b": "u", "f": "f"}[kind[0]]
    return np.dtype(f"{letter}{int(kind[1:]) // 8}")


# Filled by benchmarks/ptx_operations.py.
EXECUTE: dict[str, Callable[[Machine, Instruction, Array], None]] = {}
