"""Call profiler: records which functions of the tree call functions of other files, step by step."""

from __future__ import annotations

import ast
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

PACKAGE: Final = "zenps"
ROLES: Final = ("worker", "server", "scheduler")


class Place(NamedTuple):
    """A function, or a method, of a file of the tree; both are empty for what is in none, as the script."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


class Pair(NamedTuple):
    """A crossing from function to function."""

    caller: Place
    callee: Place


class _Call(NamedTuple):
    """From one file into another."""

    caller: CodeType | None
    """None: no function of the tree."""
    instruction: int
    """Which of the caller's; -1 where it called a library, which then called."""
    callee: CodeType
    depth: int


class Profiler:
    """Is told of all calls in this process, and records those in the tree while a step is on.

    Args:
        root: of the tree.
        flag: its first byte is the number of the step that is on; 0: none.
    """

    def __init__(self, root: Path, flag: mmap.mmap | bytearray) -> None:
        self._root = root
        self._flag = flag
        self._files: dict[str, str | None] = {}
        self._modules: dict[int, set[str]] = {}
        self._calls: dict[int, Counter[_Call]] = {}

    def install(self) -> None:
        """In this thread, and in those that it starts."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """As :func:`sys.setprofile` calls it."""
        step = self._flag[0]
        if not step or event != "call" or (file := self._file(frame.f_code)) is None:
            return
        self._modules.setdefault(step, set()).add(file)
        caller = self._next(frame.f_back)
        if caller is not None and self._file(caller.f_code) == file:
            return
        instruction = caller.f_lasti if caller is not None and caller is frame.f_back else -1
        call = _Call(caller and caller.f_code, instruction, frame.f_code, self._depth(frame))
        self._calls.setdefault(step, Counter())[call] += 1

    def steps(self) -> list[dict[str, Any]]:
        """What was recorded, as :func:`_read` reads it."""
        return [
            {"modules": sorted(modules), "calls": [*self._described(self._calls.get(step, Counter()))]}
            for step, modules in sorted(self._modules.items())
        ]

    def _described(self, calls: Counter[_Call]) -> Iterator[tuple[str | int, ...]]:
        for call, count in calls.items():
            name = called_as(call.caller, call.instruction) if call.caller else ""
            yield *self._place(call.caller), *self._place(call.callee), call.depth, name, count

    def _next(self, frame: FrameType | None) -> FrameType | None:
        """The nearest frame in the tree, this one or one that waits for it."""
        while frame is not None and self._file(frame.f_code) is None:
            frame = frame.f_back
        return frame

    def _depth(self, frame: FrameType) -> int:
        """How many crossings lead here."""
        depth = 0
        while (caller := self._next(frame.f_back)) is not None:
            depth += self._file(caller.f_code) != self._file(frame.f_code)
            frame = caller
        return depth

    def _file(self, code: CodeType) -> str | None:
        name = code.co_filename
        if name not in self._files:
            path = Path(name).resolve()
            is_ours = path.is_relative_to(self._root) and path.suffix == ".py"
            file = path.relative_to(self._root).as_posix() if is_ours else ""
            self._files[name] = file if file.partition("/")[0] in (PACKAGE, *ROLES) else None
        return self._files[name]

    def _place(self, code: CodeType | None) -> tuple[str, str]:
        return (self._file(code) or "", code.co_qualname) if code is not None else ("", "")


def called_as(caller: CodeType, instruction: int) -> str:
    """The name by which it calls there; empty where it is not seen.

    With a dot before it unless what is called may have been given to the caller under this name: is an
    attribute of ``self``, a parameter, or a variable of the function around.
    """
    if instruction < 0:
        return ""
    name = _names_of_calls(caller.co_filename).get([*caller.co_positions()][instruction // 2], "")
    base, _, name = name.rpartition(".")
    parameters = caller.co_varnames[: caller.co_argcount + caller.co_kwonlyargcount]
    # The variables around a comprehension are those of its own function.
    around = (
        () if caller.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>") else caller.co_freevars
    )
    is_given = base == "self" or (not base and name in (*parameters, *around))
    return name if is_given or not name else f".{name}"


@cache
def _names_of_calls(file: str) -> dict[tuple[int | None, ...], str]:
    """``name``, ``self.name`` or ``object.name``, by where in the file a call stands for a code object."""
    found: dict[tuple[int | None, ...], str] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            position = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            match node.func:
                case ast.Name(id=name):
                    found[position] = name
                case ast.Attribute(value=base, attr=name, end_lineno=line, end_col_offset=column):
                    is_own = isinstance(base, ast.Name) and base.id == "self"
                    found[position] = f"self.{name}" if is_own else f"object.{name}"
                    # It is placed at the name where the expression before has several lines.
                    begin = (column or 0) - len(name)
                    found[(line, node.end_lineno, begin, node.end_col_offset)] = found[position]
    return found
