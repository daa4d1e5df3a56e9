"""The operations of the PTX interpreter: what each opcode does to registers and memory.

Source: PTX ISA, https://docs.nvidia.com/cuda/parallel-thread-execution/#instruction-set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.ptx import Instruction
from benchmarks.ptx_machine import EXECUTE, MEMORY, WARP, Array, Machine, _words, dtype_of

Binary = Callable[[Any, Any], Any]


def _truncated_division(a: Array, b: Array) -> Array:
    if a.dtype.kind == "u":
        return a // b
    magnitude = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -magnitude, magnitude)


def _remainder(a: Array, b: Array) -> Array:
    return a - _truncated_division(a, b) * b


def _shift_left(a: Array, amount: Array) -> Array:
    width = 8 * a.itemsize
    return np.where(amount < width, a << np.minimum(amount, width - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Array, amount: Array) -> Array:
    width = 8 * a.itemsize
    shifted = a >> np.minimum(amount, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(amount < width, shifted, a.dtype.type(0))


BINARY: dict[str, Binary] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "min": np.minimum, "max": np.maximum, "div": _truncated_division, "rem": _remainder,
}  # fmt: skip
COMPARE: dict[str, Binary] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "hi": np.greater, "ls": np.less_equal, "hs": np.greater_equal,
    "neu": np.not_equal, "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


def _binary(machine: Machine, at: Instruction, lanes: Array) -> None:
    kind = at.opcode[-1]
    target, a, b = at.operands
    operands = machine.value(a, lanes, kind), machine.value(b, lanes, kind)
    with np.errstate(over="ignore", invalid="ignore"):
        machine.put(target, lanes, BINARY[at.opcode[0]](*operands))


def _shift(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, a, b = at.operands
    shift = _shift_left if at.opcode[0] == "shl" else _shift_right
    machine.put(target, lanes, shift(machine.value(a, lanes, at.opcode[-1]), machine.value(b, lanes, "u32")))


def _multiply(machine: Machine, at: Instruction, lanes: Array) -> None:
    kind = at.opcode[-1]
    a, b = (machine.value(operand, lanes, kind) for operand in at.operands[1:3])
    if at.opcode[1] == "lo" or kind[0] == "f":
        product = a * b
    else:
        wide = dtype_of(kind[0] + str(16 * a.itemsize))
        product = a.astype(wide) * b.astype(wide)
        if at.opcode[1] == "hi":
            product = (product >> wide.type(8 * a.itemsize)).astype(a.dtype)
    if at.opcode[0] == "mad":
        summand = machine.value(at.operands[3], lanes, f"u{8 * product.itemsize}")
        product = product + summand.view(product.dtype)
    machine.put(at.operands[0], lanes, product)


def _convert(machine: Machine, at: Instruction, lanes: Array) -> None:
    to, source = dtype_of(at.opcode[-2]), at.opcode[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        machine.put(at.operands[0], lanes, machine.value(at.operands[1], lanes, source).astype(to))


def _compare(machine: Machine, at: Instruction, lanes: Array) -> None:
    kind = at.opcode[-1]
    target, a, b = at.operands[:3]
    result = COMPARE[at.opcode[1]](machine.value(a, lanes, kind), machine.value(b, lanes, kind))
    if at.opcode[2] in ("and", "or", "xor"):
        result = BINARY[at.opcode[2]](result, machine.value(at.operands[3], lanes, "pred"))
    machine.put(target, lanes, result)


def _select(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, a, b, chosen = at.operands
    values = (machine.value(operand, lanes, at.opcode[-1]) for operand in (a, b))
    machine.put(target, lanes, np.where(machine.value(chosen, lanes, "pred"), *values))


def _move(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, source = at.operands
    kind = at.opcode[-1]
    if source.startswith("{"):
        parts = _lanes_of(source)
        part_kind = f"u{int(kind[1:]) // len(parts)}"
        columns = [machine.value(part, lanes, part_kind) for part in parts]
        machine.put(target, lanes, np.stack(columns, axis=1).copy().view(dtype_of(kind)).ravel())
    elif target.startswith("{"):
        parts = _lanes_of(target)
        whole = machine.value(source, lanes, kind).copy().view(f"u{int(kind[1:]) // 8 // len(parts)}")
        for column, part in enumerate(parts):
            machine.put(part, lanes, whole.reshape(len(lanes), len(parts))[:, column].copy())
    else:
        machine.put(target, lanes, machine.value(source, lanes, kind))


def _unary(function: Callable[[Array], Array]) -> Callable[[Machine, Instruction, Array], None]:
    def execute(machine: Machine, at: Instruction, lanes: Array) -> None:
        machine.put(at.operands[0], lanes, function(machine.value(at.operands[1], lanes, at.opcode[-1])))

    return execute


def _bits(words: Array) -> Array:
    return np.unpackbits(words.copy().view(np.uint8).reshape(len(words), -1), axis=1, bitorder="little")


def _popc(words: Array) -> Array:
    return _bits(words).sum(axis=1, dtype=np.uint32)


def _reversed_bits(words: Array) -> Array:
    return np.packbits(_bits(words)[:, ::-1], axis=1, bitorder="little").copy().view(words.dtype).ravel()


def _leading_zeros(words: Array) -> Array:
    """``clz``, and what ``bfind.shiftamt`` gives of an unsigned number that is not zero."""
    bits = _bits(words)[:, ::-1]
    return np.where(bits.any(axis=1), bits.argmax(axis=1), bits.shape[1]).astype(np.uint32)


def _find(machine: Machine, at: Instruction, lanes: Array) -> None:
    words = machine.value(at.operands[1], lanes, at.opcode[-1])
    machine.put(at.operands[0], lanes, np.where(words != 0, _leading_zeros(words), np.uint32(~np.uint32(0))))


def _permute_bytes(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, a, b, selector = at.operands
    pair = (
        np.stack([machine.value(a, lanes, "u32"), machine.value(b, lanes, "u32")], axis=1)
        .copy()
        .view(np.uint8)
    )
    chosen = machine.value(selector, lanes, "u32")
    picks = np.stack([chosen >> np.uint32(4 * byte) & np.uint32(7) for byte in range(4)], axis=1)
    machine.put(
        target, lanes, np.take_along_axis(pair, picks.astype(np.int64), 1).copy().view(np.uint32).ravel()
    )


def _insert_bits(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, source, into = at.operands[:3]
    position, length = (int(operand) for operand in at.operands[3:])
    mask = np.uint32(((1 << length) - 1) << position)
    inserted = machine.value(source, lanes, "u32") << np.uint32(position) & mask
    machine.put(target, lanes, machine.value(into, lanes, "u32") & ~mask | inserted)


# ── warps ───────────────────────────────────────────────────────────────────────────────────────────────────


def _warps_of(lanes: Array) -> Array:
    """The lanes in rows of one warp each; collectives here are always of whole warps."""
    whole = lanes.reshape(-1, WARP)
    assert (whole == whole[:, :1] // WARP * WARP + np.arange(WARP)).all()
    return whole


def _shuffle(machine: Machine, at: Instruction, lanes: Array) -> None:
    _warps_of(lanes)
    values = machine.value(at.operands[-4], lanes, "u32").reshape(-1, WARP)
    distance = machine.value(at.operands[-3], lanes, "u32").astype(np.int64).reshape(-1, WARP)
    here = np.arange(WARP)
    source = {"up": here - distance, "bfly": here ^ distance, "idx": distance % WARP}[at.opcode[2]]
    inside = source >= 0
    taken = np.take_along_axis(values, np.where(inside, source, here), 1)
    machine.put(at.operands[0], lanes, taken.ravel())
    if len(at.operands) == 6:
        machine.put(at.operands[1], lanes, inside.ravel())


def _vote(machine: Machine, at: Instruction, lanes: Array) -> None:
    _warps_of(lanes)
    votes = machine.value(at.operands[1], lanes, "pred").reshape(-1, WARP)
    if at.opcode[2] == "ballot":
        result: Array = np.packbits(votes, axis=1, bitorder="little").copy().view(np.uint32).ravel()
    else:
        result = np.asarray(votes.all(axis=1))
    machine.put(at.operands[0], lanes, np.repeat(result, WARP))


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def _lanes_of(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


def _load(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, source = at.operands
    kind = at.opcode[-1]
    addresses, width = machine.addresses(source, lanes), dtype_of(kind).itemsize
    if at.opcode[1] != "param":
        machine.touch(addresses, machine.read)
    for number, part in enumerate(_lanes_of(target)):
        held = MEMORY[width][_words(width, addresses + np.uint64(number * width))]
        machine.put(part, lanes, held.view(dtype_of(kind)))


def _store(machine: Machine, at: Instruction, lanes: Array) -> None:
    target, source = at.operands
    width = dtype_of(at.opcode[-1]).itemsize
    addresses = machine.addresses(target, lanes)
    machine.touch(addresses, machine.written)
    for number, part in enumerate(_lanes_of(source)):
        word = machine.value(part, lanes, at.opcode[-1]).view(f"u{width}")
        MEMORY[width][_words(width, addresses + np.uint64(number * width))] = word


def _atomic(machine: Machine, at: Instruction, lanes: Array) -> None:
    """One thread after another."""
    is_red = at.opcode[0] == "red"
    operation, kind = next(part for part in at.opcode if part in ATOMIC), at.opcode[-1]
    target, address, operand = ("", *at.operands) if is_red else at.operands
    addresses, dtype = machine.addresses(address, lanes), dtype_of(kind)
    machine.touch(addresses, machine.read)
    machine.touch(addresses, machine.written)
    for number, part in enumerate(_lanes_of(operand)):
        given = machine.value(part, lanes, kind)
        places = _words(dtype.itemsize, addresses + np.uint64(number * dtype.itemsize))
        memory = MEMORY[dtype.itemsize]
        before = np.empty(len(lanes), dtype=dtype)
        for lane, place in enumerate(places):
            word = memory[place : place + 1].view(dtype)
            before[lane] = word[0]
            word[0] = ATOMIC[operation](word[0], given[lane])
        if not is_red:
            machine.put(target, lanes, before)


ATOMIC: dict[str, Binary] = {
    "add": np.add, "or": np.bitwise_or, "exch": lambda _, new: new, "max": np.maximum,
}  # fmt: skip

EXECUTE.update(dict.fromkeys(BINARY, _binary))
EXECUTE.update(
    {
        "shl": _shift, "shr": _shift, "mul": _multiply, "mad": _multiply, "cvt": _convert, "setp": _compare,
        "selp": _select, "mov": _move, "cvta": _move, "not": _unary(np.invert), "neg": _unary(np.negative),
        "popc": _unary(_popc), "brev": _unary(_reversed_bits), "clz": _unary(_leading_zeros), "bfind": _find,
        "prmt": _permute_bytes, "bfi": _insert_bits, "shfl": _shuffle, "vote": _vote,
        "ld": _load, "st": _store, "atom": _atomic, "red": _atomic,
    }
)  # fmt: skip
