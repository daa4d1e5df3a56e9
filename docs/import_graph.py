"""Import graph of the tree by file, and which of its classes are related."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from call_profiler import PACKAGE, ROLES


class Sources:
    """Who imports whom, and which classes are akin, in the whole tree."""

    def __init__(self, root: Path) -> None:
        self._files = {_module(file): file for file in _files(root)}
        parsed = {file: ast.parse((root / file).read_text(encoding="utf-8")) for file in self._files.values()}
        self._names = {file: {*_imported(module, file, parsed[file])} for module, file in self._files.items()}
        self._bases: dict[str, set[str]] = {}
        for node in (node for tree in parsed.values() for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                self._bases.setdefault(node.name, set()).update(bases)

    def are_akin(self, one: str, other: str) -> bool:
        """Whether one of two classes is the other's ancestor, or the same, by their names."""
        return one in self._ancestors(other) or other in self._ancestors(one)

    def _ancestors(self, name: str) -> set[str]:
        found, open_ = set[str](), {name}
        while open_:
            found |= open_
            open_ = set().union(*(self._bases.get(each, set()) for each in open_)) - found
        return found

    def knows(self, caller: str, callee: str) -> bool:
        """Whether the one file imports the other, or a name that a package has from there."""
        return any(callee in self._sources(module, name) for module, name in self._names[caller])

    def _sources(self, module: str, name: str) -> set[str]:
        """The files from which a name of a module comes."""
        if f"{module}.{name}" in self._files:
            return {self._files[f"{module}.{name}"]}
        file = self._files.get(module)
        if file is None:
            return set()
        found = {file}
        if file.endswith("/__init__.py"):
            for source, passed_on in self._names[file]:
                if passed_on == name:
                    found |= self._sources(source, name)
        return found


def _imported(module: str, file: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules, and the names that are taken from them; no name: the module itself."""
    is_package = file.endswith("/__init__.py")
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, "") for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                parts = module.split(".")
                package = parts[: len(parts) - level + is_package] if level else []
                source = ".".join([*package, *filter(None, [base])])
                yield from ((source, alias.name) for alias in names)


def _files(root: Path) -> Iterator[str]:
    """Those of the package and its roles, each once, though roles may be linked into the package."""
    for top in (PACKAGE, *ROLES):
        for folder, folders, names in os.walk(root / top):
            folders[:] = [each for each in folders if not (Path(folder) / each).is_symlink()]
            for name in names:
                if name.endswith(".py"):
                    yield (Path(folder) / name).relative_to(root).as_posix()


def _module(file: str) -> str:
    """The name under which it is imported: ``worker/ddp.py`` is ``zenps.worker.ddp``."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == PACKAGE else [PACKAGE, *parts])
