"""The package as it is imported, read without importing it: its modules, and who imports what."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROLES = ("worker", "server", "scheduler")


class Import(NamedTuple):
    """``name`` is the full name of what is imported, in line ``line`` of the file ``where``."""

    where: Path
    line: int
    name: str


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(root: Path) -> dict[str, Path]:
    """Every module of ``zenps`` by its full name, packages as ``….__init__``; through links, as imports."""
    found = {}
    for folder, _, files in os.walk(root / "zenps", followlinks=True):
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            found[".".join(path.relative_to(root).with_suffix("").parts)] = path
    return dict(sorted(found.items()))


def imports(path: Path, module: str) -> Iterator[Import]:
    """Everything that a file imports, wherever in the file it does so."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import(names=names):
                yield from (Import(path, node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(names=names):
                yield from (
                    Import(path, node.lineno, f"{base(node, module)}.{alias.name}") for alias in names
                )
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(path, node.lineno, name)


def base(node: ast.ImportFrom, module: str) -> str:
    """The full name of what ``node``, which stands in ``module``, imports from."""
    package = module.rsplit(".", node.level)[0] if node.level else ""
    return ".".join(filter(None, (package, node.module)))


def outside(root: Path) -> Iterator[Path]:
    """The Python files that are not part of the package: they use it."""
    for folder in ("tests", "benchmarks", "examples", "docs", "docker"):
        yield from sorted((root / folder).rglob("*.py"))
